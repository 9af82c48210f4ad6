"""Models for benchmarks/reload.py: batches take a device's time, and outputs name the version of the file."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from batchwright import Model, Tensor

VERSION = 0


class Timed(Model):
    """Takes 10 + b ms for a batch of b, as an accelerator would, without using the processor."""

    inputs = {"x": Tensor("FP32", [4])}
    outputs = {"sum": Tensor("FP32"), "version": Tensor("INT64")}
    max_batch_size = 8

    def run(self, x: Any) -> Mapping[str, Any]:
        """Sum the rows."""
        time.sleep(0.010 + 0.001 * len(x))
        return {"sum": x.sum(1), "version": np.full(len(x), VERSION)}
