"""A GPU with readings from a file, on a virtual clock, in place of NVML."""

import csv
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from server.energy.nvml import NvmlError

_FOLDER = Path(__file__).parent / "board_readings"


class VirtualTime:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class RecordedBoard:
    """A Board with the readings of board_readings/NAME.csv; a row is valid until the time_s of the next row.

    An empty cell of energy_mj or power_mw raises the NVML error whose code is in the column error.
    """

    def __init__(self, name: str, time: VirtualTime, mig: bool = False, processes: Sequence[int] = ()) -> None:
        with (_FOLDER / f"{name}.csv").open() as file:
            self._rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
        self._times = [float(row["time_s"]) for row in self._rows]
        self._clock = time
        self._mig = mig
        self._processes = list(processes)

    def energy(self) -> int:
        return self._cell("energy_mj")

    def power(self) -> int:
        return self._cell("power_mw")

    def mig(self) -> bool:
        return self._mig

    def processes(self) -> list[int]:
        return self._processes

    def _cell(self, column: str) -> int:
        row = self._rows[max(0, bisect_right(self._times, self._clock() + 1e-9) - 1)]
        if not row[column]:
            raise NvmlError(int(row["error"]))
        return int(row[column])
