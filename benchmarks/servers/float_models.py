"""Models of a few floats, for the cost of a call without an image."""

from typing import Any

from batchwright import Model, Tensor


class FourFloats(Model):
    """Twice its input."""

    inputs = {"x": Tensor("FP32", [4])}
    outputs = {"y": Tensor("FP32", [4])}

    def run(self, x: Any) -> dict[str, Any]:
        """Double the batch."""
        return {"y": 2 * x}


class KilobyteOfFloats(FourFloats):
    """The same with 1,024 bytes in and out."""

    inputs = {"x": Tensor("FP32", [256])}
    outputs = {"y": Tensor("FP32", [256])}


class ImageOfFloats(FourFloats):
    """As many bytes as an image, 150,528, and their mean."""

    inputs = {"x": Tensor("FP32", [37_632])}
    outputs = {"y": Tensor("FP32", [1])}

    def run(self, x: Any) -> dict[str, Any]:
        """Average each sample."""
        return {"y": x.mean(axis=1, keepdims=True)}
