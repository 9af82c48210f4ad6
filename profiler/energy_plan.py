"""Plan of an energy measurement: batch sizes, number and length of windows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from profiler.energy import TICK, Windows
from profiler.measure import coarse_sizes

_MAX_SIZES = 12
_SETTLE = 15.0  # s; a GPU's power falls this long after a load, so idle power read earlier is too high
_SHORTEST = 1.0  # s of a window: ten ticks of a GPU's counter, an error of 1 per cent at most
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
        idle_after: whether idle power is measured after the loads, too.
    """

    sizes: tuple[int, ...]
    passes: int
    visit: Windows
    rest: float
    idle: Windows
    checked: int = 1
    shares: tuple[float, ...] = ()
    idle_after: bool = True

    @property
    def duration(self) -> float:
        """Approximate duration of the whole measurement, s."""
        visits = self.passes * len(self.sizes) + len(self.shares)
        return (1 + self.idle_after) * self.idle.duration + visits * (self.rest + self.visit.duration)

    def within(self, seconds: float) -> "EnergyPlan":
        """The plan shortened to about this duration, s.

        First windows become shorter, but not below one second, then there are two passes, then fewer sizes: at least
        the smallest, the largest and the checked one. The settling time of idle power never falls below 15 s, since
        idle power would be too high and the energies above it too low. So the least duration is about a minute.
        """
        if seconds >= self.duration:
            return self
        idle = replace(self.idle, settle=min(self.idle.settle, _SETTLE))
        plan = replace(self, idle=idle)._with_windows(seconds)
        if plan.duration > seconds + 1e-9 and plan.passes > 2:
            plan = replace(plan, passes=2)._with_windows(seconds)
        while plan.duration > seconds + 1e-9 and (dropped := plan._fewer_sizes()) != plan:
            plan = dropped
        return plan

    def _with_windows(self, seconds: float) -> "EnergyPlan":
        visits = self.passes * len(self.sizes) + len(self.shares)
        fixed = (1 + self.idle_after) * self.idle.duration + visits * self.visit.repeats * TICK
        factor = min(1.0, max(0.0, seconds - fixed) / (self.duration - fixed))
        visit = self.visit
        length = max(min(_SHORTEST, visit.length), factor * visit.length)
        shorter = length / visit.length
        return replace(
            self, visit=replace(visit, length=length, settle=shorter * visit.settle), rest=shorter * self.rest
        )

    def _fewer_sizes(self) -> "EnergyPlan":
        """The plan without the size whose neighbours are nearest to each other, on a logarithmic scale."""
        inner = [i for i in range(1, len(self.sizes) - 1) if self.sizes[i] != self.checked]
        if not inner:
            return self
        closest = min(inner, key=lambda i: self.sizes[i + 1] / self.sizes[i - 1])
        return replace(self, sizes=self.sizes[:closest] + self.sizes[closest + 1 :])


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
    """Plan for one window of 0.4 s at each of four sizes without the duty-cycle check, about 20 seconds.

    Most of that is the settling of idle power, which is measured before the loads only.
    """
    sizes = coarse_sizes(len(service_times))
    few = {sizes[(len(sizes) - 1) * i // 3] for i in range(4)}
    windows = Windows(0.3, 0.4, 1, min_batches=1)
    return EnergyPlan(tuple(sorted(few)), 1, windows, 0.0, Windows(_SETTLE, 0.4, 1), idle_after=False)
