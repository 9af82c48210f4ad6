"""Models of a user for benchmarks/user_models.py: two inputs and two outputs, and one whose code fails on order."""

import ctypes
import os
import sys
import time
from typing import Any

import numpy as np

from batchwright import Model, Tensor

WEIGHT = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(4, 2)
FAULTS = {
    101: "an exception",
    102: "one row too few",
    103: "NaN",
    104: "a hang beyond the batch timeout",
    105: "20,000 printed lines",
    106: "sys.exit",
    107: "a wrong datatype",
    108: "a segmentation fault",
    109: "os._exit",
}


class Linear(Model):
    """x W + 2 shift, and the sum of x."""

    inputs = {"x": Tensor("FP32", [4]), "shift": Tensor("FP32", [2])}
    outputs = {"y": Tensor("FP32", [2]), "sum": Tensor("FP32", [1])}

    def run(self, x: Any, shift: Any) -> dict[str, Any]:
        """Compute the batch."""
        return {"y": x @ WEIGHT + 2 * shift, "sum": x.sum(1, keepdims=True)}


class Faulty(Model):
    """Twice its input, unless the first number of a sample is a key of `FAULTS`."""

    inputs = {"x": Tensor("FP32", [2])}
    outputs = {"y": Tensor("FP32", [2])}

    def run(self, x: Any) -> dict[str, Any]:  # noqa: D102
        codes = set(x[:, 0].astype(int).tolist())
        if 101 in codes:
            raise ValueError("this sample is poisoned")
        if 102 in codes:
            return {"y": x[:-1]}
        if 104 in codes:
            time.sleep(3.0)
        if 105 in codes:
            for index in range(20_000):
                print("line", index)
        if 106 in codes:
            sys.exit(3)
        if 108 in codes:
            ctypes.string_at(0)
        if 109 in codes:
            os._exit(3)
        if 107 in codes:
            return {"y": x.astype(np.float64)}
        return {"y": np.where(x[:, :1] == 103, np.nan, 2 * x).astype(np.float32)}


class Longest(Model):
    """The sum of a sample's numbers; a batch takes 2 ms for each number of its longest sample."""

    inputs = {"x": Tensor("FP32", [-1], pad=0.0)}
    outputs = {"sum": Tensor("FP32")}
    lengths = [*range(4, 65, 4)]
    SECONDS = 0.002

    def run(self, x: Any) -> dict[str, Any]:
        """Sleep, and compute the batch."""
        time.sleep(self.SECONDS * x.shape[1])
        return {"sum": x.sum(axis=1)}
