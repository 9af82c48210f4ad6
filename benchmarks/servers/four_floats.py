"""A model of four floats, for the cost of a call without an image."""

from typing import Any

from batchwright import Model, Tensor


class FourFloats(Model):
    """Twice its input."""

    inputs = {"x": Tensor("FP32", [4])}
    outputs = {"y": Tensor("FP32", [4])}

    def run(self, x: Any) -> dict[str, Any]:
        """Double the batch."""
        return {"y": 2 * x}
