"""A model for benchmarks/faults.py that fails as its input says."""

import ctypes
import os
import resource
import time
from typing import Any

import numpy as np

from batchwright import Model, Tensor

FAULTS = {-1: "segmentation fault", -2: "os._exit", -3: "allocation beyond memory", -4: "hang"}
LARGEST = 8
FIXED, EACH = 0.02, 0.002  # s of a batch, and of each of its samples
_MEMORY = 2**30  # bytes that the process may allocate beside what it has
_HANG = 60.0  # s


class Failing(Model):
    """Twice its input; a negative number is a fault."""

    inputs = {"x": Tensor("FP32", [1])}
    outputs = {"y": Tensor("FP32", [1])}
    max_batch_size = LARGEST

    def load(self, device: str) -> None:
        """Limit the memory of the process, as a container does."""
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        limit = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def samples(self) -> list[dict[str, Any]]:
        """Two numbers that are no faults."""
        return [{"x": np.full(1, number, np.float32)} for number in (1, 2)]

    def run(self, x: Any) -> dict[str, Any]:
        """Take the time of a batch, or fail."""
        faults = set(x.astype(int).reshape(-1).tolist())
        if -1 in faults:
            ctypes.string_at(0)
        if -2 in faults:
            os._exit(3)
        if -3 in faults:
            np.ones(2 * _MEMORY, np.uint8)
        if -4 in faults:
            time.sleep(_HANG)
        time.sleep(FIXED + EACH * len(x))
        return {"y": 2 * x}
