"""The process that reads a GPU's sensors at 20 Hz for a whole call: `python -m benchmarks.gpu.sampler`."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from math import nan
from pathlib import Path

import psutil

from profiler.gpu import PynvmlGpu
from server.energy.nvml import NvmlError, PynvmlBoard

_INTERVAL = 0.05  # s

Read = Callable[[], Sequence[float]]  # the columns after the time


def nvml_reader(index: int = 0) -> Read:
    """Read a GPU by its index in NVML; what it does not offer is nan, or 0 of the clocks."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    board, gpu = PynvmlBoard(pynvml, handle), PynvmlGpu(pynvml, handle)

    def value(read: Callable[[], float], scale: float = 1.0, missing: float = 0.0) -> float:
        with suppress(NvmlError):
            return read() / scale
        return missing

    def read() -> Sequence[float]:
        joules, watts = value(board.energy, 1e3, nan), value(board.power, 1e3, nan)
        clock, memory_clock = 0, 0
        with suppress(NvmlError):
            clock, memory_clock = gpu.clocks()
        return joules, watts, clock, memory_clock, value(gpu.temperature), value(gpu.throttle_reasons)

    return read


def rehearsal_reader() -> Read:
    """A counter that steps every 100 ms: 100 W, and 100 W for each processor that is busy."""
    last, joules = -1, 0.0

    def read() -> Sequence[float]:
        nonlocal last, joules
        step = int(time.monotonic() * 10)
        if step != last:
            used = psutil.cpu_times()
            last, joules = step, 100.0 * step / 10 + 100.0 * (used.user + used.system)
        return joules, 100.0, 1000, 1000, 40, 0

    return read


def sample(read: Read, path: Path, until: float) -> None:
    """Write a row at each multiple of the interval until an instant, or until the parent process has ended."""
    parent, began = os.getppid(), time.monotonic()
    with path.open("a", buffering=1) as file:
        for number in count(1):
            file.write(",".join(f"{value:.4f}" for value in (time.monotonic(), *read())) + "\n")
            if time.monotonic() > until or os.getppid() != parent:
                return
            time.sleep(max(0.0, began + number * _INTERVAL - time.monotonic()))


def main() -> None:
    """Sample until --until."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, required=True, help="to which rows are appended")
    parser.add_argument("--until", type=float, required=True, help="s of time.monotonic")
    parser.add_argument("--rehearse", action="store_true")
    chosen = parser.parse_args()
    sample(rehearsal_reader() if chosen.rehearse else nvml_reader(), chosen.file, chosen.until)


if __name__ == "__main__":
    main()
