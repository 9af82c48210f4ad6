"""Energy counters of the CPU (RAPL) in /sys/class/powercap.

A zone intel-rapl:N (also on AMD) is one package with its cores and caches. Its subzones (intel-rapl:N:M) are part of
it, and the platform ("psys") contains it, so that neither is added. The energy of other processes is included, that of
memory and GPU is not.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

_log = logging.getLogger("batchwright.energy")

_ROOT = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Zone:
    """The zone of one package.

    Attributes:
        folder: directory with the counter energy_uj.
        span: value at which the counter wraps to 0, uJ.
    """

    folder: Path
    span: int

    def energy(self) -> int:
        """The counter, uJ.

        Raises:
            OSError: it cannot be read.
        """
        return _number(self.folder / "energy_uj")


class RaplMeter:
    """Meter of all packages.

    It must be read at least once per wrap of a counter: 262 kJ, a common span, is 22 minutes at 200 W.
    """

    source = "rapl"
    scope = "package"
    resolution = 1e-3  # Intel's manual (volume 3, section on package RAPL): updated about every millisecond

    def __init__(self, zones: Sequence[Zone], start: Sequence[int]) -> None:
        """`start` are the values of the zones' counters to count from, uJ."""
        self.about = f"RAPL counters of {len(zones)} CPU package{'s' * (len(zones) > 1)}, without memory"
        self._zones = zones
        self._last = list(start)
        self._microjoules = 0
        self._failed = False
        self._lock = Lock()  # metrics are read on other threads

    def read(self) -> float | None:
        """Energy since the meter was created, J; None while a counter cannot be read."""
        with self._lock:
            try:
                now = [zone.energy() for zone in self._zones]
            except OSError as error:
                if not self._failed:
                    _log.warning("RAPL cannot be read: %s", error)
                self._failed = True
                return None
            self._failed = False
            steps = zip(self._zones, self._last, now, strict=True)
            self._microjoules += sum(_step(before, after, zone.span) for zone, before, after in steps)
            self._last = now
            return self._microjoules / 1e6


def rapl_meter(root: Path = _ROOT) -> RaplMeter:
    """A meter of all packages in `root`.

    Raises:
        OSError: there are none, or they cannot be read; with the reason and the remedy.
    """
    zones = [
        Zone(folder, _number(folder / "max_energy_range_uj"))
        for folder in sorted(root.glob("intel-rapl:*"))
        if re.fullmatch(r"intel-rapl:\d+", folder.name) and _is_package(folder)
    ]
    if not zones:
        raise OSError(f"no RAPL package under {root}: a virtual machine, a container without /sys, or a CPU without it")
    return RaplMeter(zones, [zone.energy() for zone in zones])


def _is_package(folder: Path) -> bool:
    try:
        return (folder / "name").read_text().startswith("package")
    except OSError:
        return False


def _step(before: int, after: int, span: int) -> int:
    """Energy between two readings, uJ."""
    return after - before if after >= before else max(0, after + span - before)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except OSError as error:
        remedy = "only root may read RAPL; run as root, or make the file readable (chmod a+r)"
        raise OSError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise OSError(f"{path} does not contain a number") from error
