"""A model of a user for benchmarks/identity.py, which is loaded again while it is served on an emulated device."""

from collections.abc import Mapping
from typing import Any

from batchwright import Model, Tensor


class Features(Model):
    """Scores of 48 x 64 features; an emulated device makes them from a checksum of all inputs of a sample."""

    inputs = {"x": Tensor("FP32", [48, 64]), "shift": Tensor("FP32", [2])}
    outputs = {"y": Tensor("FP32", [16]), "sum": Tensor("FP32")}

    def run(self, x: Any, shift: Any) -> Mapping[str, Any]:
        """Compute the batch."""
        total = x.sum((1, 2)) + shift.sum(1)
        return {"y": x[:, :16, 0], "sum": total}
