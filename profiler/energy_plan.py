"""How long what of a device's energy is measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from profiler.energy import Windows
from profiler.measure import octaves

_TICK = 0.1  # s that a window lasts beyond its length, about
_MANY_SIZES = 12
_CHECKED_UP_TO = 16, 0.1  # batch size and service time, s, of the duty-cycle check: it wants many batches in a window


@dataclass(frozen=True, slots=True)
class EnergyPlan:
    """How long what is measured.

    Attributes:
        sizes: batch sizes, ascending from 1 to the largest.
        passes: over all sizes, each in an order of its own.
        visit: windows of one size in one pass, and of one part load.
        rest: s between two visits, in which the device cools.
        idle: windows before all and after all; they settle for long, as a device that has just worked draws more.
        checked: batch size of the duty-cycle check.
        shares: of time in service in that check; none leaves it out.
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
        """About how long all of it takes, s."""
        visits = self.passes * len(self.sizes) + len(self.shares)
        return 2 * lasting(self.idle) + visits * (self.rest + lasting(self.visit))

    def within(self, seconds: float) -> "EnergyPlan":
        """The same with everything shortened to about that time; a window keeps three ticks at least."""
        factor = min(1.0, seconds / self.duration)
        visit, idle = _shortened(self.visit, factor), _shortened(self.idle, factor)
        return replace(self, visit=visit, idle=idle, rest=factor * self.rest)


def full_energy_plan(service_times: Sequence[float]) -> EnergyPlan:
    """About twelve sizes in three passes of windows of 4 s; five minutes or so.

    Args:
        service_times: l(b), s, for b = 1, 2, ...
    """
    largest = len(service_times)
    sizes = octaves(largest)
    if len(sizes) > _MANY_SIZES:
        sizes = tuple(b for b in sizes if b in (1, 2, 3, largest) or b & (b - 1) == 0)
    most, longest = _CHECKED_UP_TO
    checked = max(b for b in sizes if b == 1 or (b <= most and service_times[b - 1] <= longest))
    return EnergyPlan(
        sizes, 3, Windows(1.5, 4.0, 1), 2.0, Windows(20.0, 4.0, 3), checked=checked, shares=(0.2, 0.5, 0.8)
    )


def quick_energy_plan(service_times: Sequence[float]) -> EnergyPlan:
    """Four sizes, a window of 0.4 s each, once; five seconds or so, and no check."""
    sizes = octaves(len(service_times))
    few = {sizes[(len(sizes) - 1) * i // 3] for i in range(4)}
    return EnergyPlan(tuple(sorted(few)), 1, Windows(0.3, 0.4, 1, min_batches=1), 0.0, Windows(0.5, 0.4, 1))


def lasting(windows: Windows) -> float:
    """About how long these windows take, s."""
    return windows.settle + windows.repeats * (windows.length + _TICK)


def _shortened(windows: Windows, factor: float) -> Windows:
    return replace(windows, settle=factor * windows.settle, length=max(3 * _TICK, factor * windows.length))
