"""Records of a GPU call: lines of JSON, which several processes append to one file, and samples of the GPU's sensors.

A line is written by one system call, so whatever stops the call, what was measured before is kept. All instants are of
time.monotonic, which the processes of a machine share.
"""

import csv
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.conditions import Conditions

RECORDS = "records.jsonl"
COLUMNS = "time", "joules", "watts", "clock", "memory_clock", "temperature", "throttle"
Record = dict[str, Any]
_REASON = 600  # characters of a failure, whose end is kept: it may be a server's log


class Recorder:
    """Appends records to a folder's file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, kind: str, **values: Any) -> None:
        """Append a record, and print its beginning."""
        line = json.dumps({"kind": kind, "time": time.monotonic(), **values})
        descriptor = os.open(self.folder / RECORDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)
        print(line[:200], flush=True)

    def part(self, name: str, until: float, run: Callable[[], object]) -> None:
        """Run a part of the call unless its end has passed; record its seconds, and what it raised."""
        began, values = time.monotonic(), dict[str, Any]()
        try:
            if began > until:
                raise TimeoutError("no time was left for it")
            run()
        except Exception as error:  # noqa: BLE001  (the other parts are measured)
            values["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[-_REASON:]}"
        self.add("part", name=name, seconds=round(time.monotonic() - began, 1), **values)


def read_records(folder: Path) -> list[Record]:
    """The records of a folder, without a line that was cut off; none without a file."""
    found = []
    with suppress(FileNotFoundError):
        for line in (folder / RECORDS).read_text().splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


@dataclass(frozen=True)
class Samples:
    """Samples of a GPU's sensors at 20 Hz.

    Attributes:
        times: s of time.monotonic.
        joules: the energy counter, or the integral of the power where there is none.
        about: which of them.
        conditions: clocks, temperature and throttling.
    """

    times: NDArray[np.float64]
    joules: NDArray[np.float64]
    conditions: tuple[Conditions, ...]
    about: str = "NVML's energy counter, sampled 20 times a second"

    @classmethod
    def read(cls, path: Path) -> "Samples":
        """Read the samples of a call, without a row that was cut off; none without a file."""
        rows = list[list[float]]()
        with suppress(FileNotFoundError), path.open() as file:
            for row in csv.reader(file):
                with suppress(ValueError):
                    rows.append([float(value) for value in row])
        table = np.array([row for row in rows if len(row) == len(COLUMNS)]).reshape(-1, len(COLUMNS))
        counted, powered = ~np.isnan(table[:, 1]), ~np.isnan(table[:, 2])
        table = table[counted if counted.any() else powered]  # a reading may fail now and then
        times, joules, watts = table[:, 0], table[:, 1], table[:, 2]
        conditions = tuple(Conditions(*(int(value) for value in row)) for row in table[:, 3:])
        if counted.any() or not len(table):
            return cls(times, joules, conditions)
        joules = np.concatenate([[0.0], np.cumsum(np.diff(times) * (watts[1:] + watts[:-1]) / 2)])
        return cls(times, joules, conditions, "NVML's power, sampled 20 times a second and integrated")

    def energy(self, begin: float, end: float) -> float | None:
        """Energy between two instants, J; None where the samples do not cover them, or the window is empty.

        The counter steps about every 100 ms. Between the samples at which it has changed it is taken as linear.
        """
        changed = np.flatnonzero(np.diff(self.joules, prepend=-np.inf) > 0)
        times, joules = self.times[changed], self.joules[changed]
        if len(times) < 2 or begin < times[0] or end > times[-1] or end <= begin:
            return None
        first, last = np.interp([begin, end], times, joules)
        return float(last - first)

    def power(self, begin: float, end: float) -> float | None:
        """Mean power between two instants, W."""
        joules = self.energy(begin, end)
        return None if joules is None else joules / (end - begin)

    def conditions_within(self, begin: float, end: float) -> tuple[Conditions, ...]:
        """The conditions between two instants."""
        inside = np.flatnonzero((self.times >= begin) & (self.times <= end))
        return tuple(self.conditions[index] for index in inside)
