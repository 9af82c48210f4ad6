"""Calls of every kind to an image model and to a tensor model of an emulated device, each with its own answer.

Every sample differs from all others, except that encoded images are drawn from a pool. What the device makes of a
sample depends on the sample alone, and is computed here by the same codecs.
"""

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.harness import ROOT, synthetic_image
from benchmarks.support.soak_clients import Message, message
from server.models.images.codec import ImageCodec
from server.models.sources import source_of

FEATURES = ROOT / "benchmarks" / "servers" / "reloaded_tensors.py"  # of the tensor model
IMAGES, TENSORS = "googlenet", "features"  # names of the models
KINDS = {
    "pixels": 0.2,
    "raw pixels": 0.1,
    "encoded": 0.2,
    "raw image": 0.1,
    "compressed": 0.05,
    "prediction": 0.1,
    "tensors": 0.15,
    "JSON": 0.1,
}
LARGEST = 8  # samples of a call
_POOL = 60  # JPEG images, and as many PNG images
_JSON_LENGTH = "Inference-Header-Content-Length"
_RAW = {_JSON_LENGTH: "0"}


@dataclass(frozen=True)
class MixedCall:
    """One call and its answer.

    Attributes:
        kind: one of `KINDS`.
        samples: number of samples.
        path: path of the URL.
        body: of the request.
        headers: of the request.
        is_right: whether the body of a response of status 200, and the length of its JSON part, are this call's answer.
    """

    kind: str
    samples: int
    path: str
    body: bytes
    headers: dict[str, str]
    is_right: Callable[[bytes, int], bool]


class MixedCalls:
    """Draws calls."""

    def __init__(self, tensors: Path, rng: np.random.Generator, computes: bool = False) -> None:
        """`tensors` is `FEATURES` or a copy of it; with `computes` only that is called, on a device that computes."""
        self._computes = computes
        self._kinds = {"tensors": 0.6, "JSON": 0.4} if computes else KINDS
        self._rng = rng
        self._images = ImageCodec()
        self._tensors: Any = source_of(f"{tensors}:Features").emulate(TENSORS, 1).codec
        formats = (("JPEG", {"quality": 80}), ("PNG", {"compress_level": 1}))
        encoded = [
            synthetic_image(rng, 4, int(rng.integers(40, 120)), kind, **options)
            for kind, options in formats
            for _ in range(_POOL)
        ]
        self._pool = [(each, self._of_encoded(each)) for each in encoded]

    def draw(self, kind: str | None = None) -> MixedCall:
        """Draw a call of this kind, or of any kind."""
        kind = kind or str(self._rng.choice([*self._kinds], p=[*self._kinds.values()]))
        count = 1 if kind in ("raw pixels", "raw image", "prediction") else int(self._rng.integers(1, LARGEST + 1))
        if kind in ("tensors", "JSON"):
            return self._tensor_call(kind, count)
        if kind in ("pixels", "raw pixels"):
            pixels = [self._draw_pixels() for _ in range(count)]
            samples = [each.tobytes() for each in pixels]
            outputs = [self._images.emulate(each) for each in pixels]
        else:
            drawn = [self._pool[index] for index in self._rng.integers(len(self._pool), size=count)]
            samples, outputs = [data for data, _ in drawn], [output for _, output in drawn]
        return self._image_call(kind, samples, outputs)

    def draw_corrupt(self) -> MixedCall:
        """Draw a call with half an image, whose answer has the status 400."""
        data, _ = self._pool[self._rng.integers(len(self._pool))]
        return MixedCall("corrupt", 1, f"/v2/models/{IMAGES}/infer", data[: len(data) // 2], _RAW, lambda *_: False)

    def _of_encoded(self, data: bytes) -> Any:
        return self._images.emulate(self._images.decode(data, self._images.decode_cost(data)))

    def _draw_pixels(self) -> Any:
        """An image that is black except for the bytes that the emulated device reads."""
        pixels = np.zeros(224 * 224 * 3, np.uint8)
        read = pixels[::509]
        read[:] = self._rng.integers(0, 256, len(read), np.uint8)
        pixels[0] = 1  # neither JPEG nor PNG begins so
        return pixels.reshape(224, 224, 3)

    def _image_call(self, kind: str, samples: list[bytes], outputs: list[Any]) -> MixedCall:
        right, path, headers = b"".join(output.tobytes() for output in outputs), f"/v2/models/{IMAGES}/infer", _RAW
        body = samples[0]
        is_right: Callable[[bytes, int], bool] = lambda answer, length: answer[length:] == right  # noqa: E731
        if kind == "prediction":
            best = np.argsort(-outputs[0], kind="stable")[:5].tolist()
            path, headers, is_right = f"/predict/{IMAGES}", {}, lambda answer, _: _classes(answer) == best
        elif kind in ("pixels", "encoded", "compressed"):
            made: Message = message(samples, None, "UINT8" if kind == "pixels" else "BYTES")
            body, headers = made.body, made.headers
            if kind == "compressed":
                body, headers = gzip.compress(body, 1), headers | {"Content-Encoding": "gzip"}
        return MixedCall(kind, len(samples), path, body, headers, is_right)

    def _tensor_call(self, kind: str, count: int) -> MixedCall:
        inputs = {
            "x": self._rng.integers(0, 1000, (count, 48, 64)).astype(np.float32),
            "shift": self._rng.integers(0, 1000, (count, 2)).astype(np.float32),
        }
        rows = [{name: array[row] for name, array in inputs.items()} for row in range(count)]
        outputs = [*map(_features, rows)] if self._computes else [*map(self._tensors.emulate, rows)]
        right = {name: np.stack([output[name] for output in outputs]) for name in ("y", "sum")}
        binary, data, entries = kind == "tensors", b"", []
        for name, array in inputs.items():
            entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": array.shape}
            entry |= {"parameters": {"binary_data_size": array.nbytes}} if binary else {"data": array.tolist()}
            data += array.tobytes() if binary else b""
            entries.append(entry)
        document = json.dumps({"inputs": entries, "parameters": {"binary_data_output": binary}}).encode()
        headers = {_JSON_LENGTH: str(len(document))} if binary else {}
        path = f"/v2/models/{TENSORS}/infer"

        def is_right(answer: bytes, length: int) -> bool:
            if binary:
                return answer[length:] == right["y"].tobytes() + right["sum"].tobytes()
            found = {each["name"]: np.array(each["data"], np.float32) for each in json.loads(answer)["outputs"]}
            return all(np.array_equal(found[name], array.reshape(-1)) for name, array in right.items())

        return MixedCall(kind, count, path, document + data, headers, is_right)


def _features(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What the tensor model computes."""
    return {"y": sample["x"][:16, 0], "sum": sample["x"].sum() + sample["shift"].sum()}


def _classes(answer: bytes) -> list[int]:
    return [each["class_index"] for each in json.loads(answer)["predictions"]]
