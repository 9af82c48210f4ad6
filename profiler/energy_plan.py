"""Plan of an energy measurement: batch sizes, number and length of windows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from profiler.energy import TICK, Windows
from profiler.measure import coarse_sizes

_MAX_SIZES = 12
_MAX_CHECKED = 16, 0.1  # batch size and service time (s) of the duty-cycle check, which needs many batches per window


@dataclass(frozen=True, slots=True)
class EnergyPlan:
    """Plan of an energy measurement.

    Attributes:
        sizes: batch sizes, ascending from 1 to the largest.
        passes: number of passes over all sizes, each in random order.
        visit: windows of one size in one pass, and of one partial load.
        rest: pause between two visits, s, in which the device cools.
        idle: windows of idle power, before and after; with a long settling time, since power falls slowly after a load.
        checked: batch size of the duty-cycle check.
        shares: shares of time in service in that check; empty for no check.
    """

    sizes: tuple[int, ...]
    passes: int
    visit: Windows
    rest: float
    idle: Windows
    checked: int = 1
    shares: tuple[float, ...] = ()

    @property
    def duration(self) -> float:
        """Approximate duration of the whole measurement, s."""
        visits = self.passes * len(self.sizes) + len(self.shares)
        return 2 * self.idle.duration + visits * (self.rest + self.visit.duration)

    def within(self, seconds: float) -> "EnergyPlan":
        """The plan shortened to about this duration, s; a window keeps at least three ticks."""
        factor = min(1.0, seconds / self.duration)
        visit, idle = _shortened(self.visit, factor), _shortened(self.idle, factor)
        return replace(self, visit=visit, idle=idle, rest=factor * self.rest)


def full_energy_plan(service_times: Sequence[float]) -> EnergyPlan:
    """Plan for about twelve sizes in three passes of windows of 4 s, about five minutes.

    Args:
        service_times: l(b), s, for b = 1, 2, ...
    """
    largest = len(service_times)
    sizes = coarse_sizes(largest)
    if len(sizes) > _MAX_SIZES:
        sizes = tuple(b for b in sizes if b in (1, 2, 3, largest) or b & (b - 1) == 0)
    max_size, max_time = _MAX_CHECKED
    checked = max(b for b in sizes if b == 1 or (b <= max_size and service_times[b - 1] <= max_time))
    return EnergyPlan(
        sizes, 3, Windows(1.5, 4.0, 1), 2.0, Windows(20.0, 4.0, 3), checked=checked, shares=(0.2, 0.5, 0.8)
    )


def quick_energy_plan(service_times: Sequence[float]) -> EnergyPlan:
    """Plan for one window of 0.4 s at each of four sizes without the duty-cycle check, about five seconds."""
    sizes = coarse_sizes(len(service_times))
    few = {sizes[(len(sizes) - 1) * i // 3] for i in range(4)}
    return EnergyPlan(tuple(sorted(few)), 1, Windows(0.3, 0.4, 1, min_batches=1), 0.0, Windows(0.5, 0.4, 1))


def _shortened(windows: Windows, factor: float) -> Windows:
    return replace(windows, settle=factor * windows.settle, length=max(3 * TICK, factor * windows.length))
