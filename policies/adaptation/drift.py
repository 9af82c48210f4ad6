"""What follows from what was observed: a profile that has drifted is refitted, and tables are weighted anew.

Pure rules: no clock, no I/O, no randomness. The live controller and the simulator ask them in the same order:

    evidence = DriftDetector(profile)
    evidence.observe_batch(size, service_time)      after each batch
    evidence.observe_energy(instant, joules)       whenever the device's counter was read
    refit = evidence.refit()                every now and then: a new profile and why, or None without evidence
    objective = objective.after(answers)    every now and then; solved again by its factor where it moves

**Noticing.** The ratio of an observed to a predicted value should be 1. A cumulative sum in either direction (Page,
1954) adds up log ratios less an allowance of 0.05: while the mean is within 5 per cent it keeps falling back to 0,
where it begins anew, so that its last 0 also tells when a change began. One value counts at most 0.3 (a batch) or 0.4
(a window): no outlier rings alone.

For batches it rings at 3: after 12 that take 1.5 times as long, after about 70 that take 1.1 times. Noise of variance v
climbs to a height h by chance about once in exp(2 x 0.05 h / v) attempts: at 5 per cent of noise once in e^120, never.
Where services are noisier the height is 200 v, once in e^20; v is half the mean square of successive differences, on
which a jump leaves hardly a trace.

For windows of energy it rings at 0.4: after two of 1.5 times the energy. Each averages at least eight batches, and a
batch that one window misses the next one has, so that such errors do not add up.

**Believing.** What rang is believed where the mean ratio since the change is off 1 by more than 5 per cent and by more
than three standard errors; else the sum starts again. An error below 5 per cent is not worth another policy: the cost
is flat around its optimum.

**Refitting** (refitting.py) takes what came after the change only.
"""

from collections import deque
from itertools import islice
from math import log
from typing import TypeVar

from policies.adaptation.refitting import (
    EFFECT,
    Drift,
    EnergyWindow,
    Observation,
    Refit,
    after_change,
    batch_energy,
    energy_drift,
    refit_energies,
    refit_service_times,
    time_drift,
)
from policies.profile import Profile

_MEMORY = 1024  # batches that are kept
_WINDOWS = 64  # windows that are kept
_WINDOW = 0.25  # s; shortest window of energy
_WINDOW_BATCHES = 8  # fewest batches of a window: one at its edge is then at most an eighth of it


class CusumDetector:
    """Two-sided cumulative sum of log ratios; rings when their mean has left 1, and knows since when.

    Attributes:
        ringing: whether either sum is above the height.
    """

    __slots__ = (
        "_clip",
        "_down",
        "_down_since",
        "_height",
        "_last",
        "_noisy",
        "_seen",
        "_up",
        "_up_since",
        "_variance",
    )

    def __init__(self, clip: float, height: float, noisy: float = 0.0) -> None:
        """Rings at `height`, or at `noisy` times the variance if that is more; one log ratio counts at most `clip`."""
        self._clip, self._height, self._noisy = clip, height, noisy
        self._seen, self._last, self._variance = 0, 0.0, 0.0
        self._up = self._down = 0.0
        self._up_since = self._down_since = 0

    def see(self, ratio: float) -> None:
        """One more ratio, above 0."""
        value, clip = log(ratio), self._clip
        if value > clip:  # min() and max() take twice as long, and this is once a batch
            value = clip
        elif value < -clip:
            value = -clip
        self._seen = seen = self._seen + 1
        step = value - self._last
        self._last = value
        self._variance += (step * step / 2 - self._variance) / min(seen, 64)
        self._up = up = self._up + value - EFFECT
        if up <= 0.0:
            self._up, self._up_since = 0.0, seen
        self._down = down = self._down - value - EFFECT
        if down <= 0.0:
            self._down, self._down_since = 0.0, seen

    @property
    def ringing(self) -> bool:
        """Whether either sum is above the height."""
        return max(self._up, self._down) > max(self._height, self._noisy * self._variance)

    @property
    def since(self) -> int:
        """How many ratios were seen after the likeliest instant of a change."""
        return self._seen - (self._up_since if self._up > self._down else self._down_since)

    def restart(self) -> None:
        """Both sums begin anew; what is known of the noise stays."""
        self._up = self._down = 0.0
        self._up_since = self._down_since = self._seen


class DriftDetector:
    """What was seen of one device that serves one model since its profile was fitted.

    Attributes:
        profile: what is believed now; `refit` replaces it.
        disturbances: how often `disturb` was called: a reading of the counter that began before the last one is void.
    """

    def __init__(self, profile: Profile, idle_power: float = 0.0) -> None:
        """`idle_power`: what the counter counts while nothing runs, W; 0 for one that counts batches alone."""
        self.profile = profile
        self._idle_power = idle_power
        self.disturbances = 0
        self._batches: deque[tuple[int, float]] = deque(maxlen=_MEMORY)
        self._windows: deque[EnergyWindow] = deque(maxlen=_WINDOWS)
        self._times = CusumDetector(clip=0.3, height=3.0, noisy=200.0)
        self._energies = CusumDetector(clip=0.4, height=0.4)
        self._counts = [0] * (profile.max_batch_size + 1)  # by size, since the reading that closed the last window
        self._reading: tuple[float, float] | None = None  # that reading

    def batch(self, batch_size: int, service_time: float) -> None:
        """A batch of this size ended; its service time in s, above 0."""
        self._batches.append((batch_size, service_time))
        self._counts[batch_size] += 1
        self._times.see(service_time / self.profile.service_times[batch_size - 1])

    def disturb(self) -> None:
        """Something ran that is counted as no batch, such as single stages: the window that is open says nothing."""
        self._reading = None
        self.disturbances += 1

    def reading(self, at: float, joules: float) -> None:
        """The counter stood at `joules` at the instant `at`, s; a window ends where enough has happened since the last.

        A counter that fell was reset, and one that stood still says nothing: their windows are dropped.
        """
        if self._reading is None or joules < self._reading[1]:
            self._open(at, joules)
            return
        elapsed, energy = at - self._reading[0], joules - self._reading[1]
        if elapsed < _WINDOW or sum(self._counts) < _WINDOW_BATCHES:
            return
        window = EnergyWindow({size: n for size, n in enumerate(self._counts) if n}, elapsed, energy)
        self._open(at, joules)
        predicted = batch_energy(self.profile, window)
        if energy > 0 and predicted > 0:
            self._windows.append(window)
            self._energies.see(energy / (self._idle_power * elapsed + predicted))

    def refit(self) -> Refit | None:
        """The profile that what has drifted leads to; None where nothing has. What led to it counts no more."""
        found = [drift for drift in (self._refit_times(), self._refit_energies()) if drift is not None]
        return Refit(self.profile, tuple(found)) if found else None

    def _refit_times(self) -> Drift | None:
        if not self._times.ringing:
            return None
        seen = [Observation(*batch) for batch in _last(self._batches, self._times.since)]
        batches = after_change(self.profile, seen)
        self._times.restart()
        drift = time_drift(self.profile, batches)
        if drift is not None:
            self.profile = refit_service_times(self.profile, batches)
        return drift

    def _refit_energies(self) -> Drift | None:
        if not self._energies.ringing:
            return None
        windows = _last(self._windows, self._energies.since)
        windows = windows[1:] or windows  # the change came somewhere within the first
        self._energies.restart()
        drift = energy_drift(self.profile, windows, self._idle_power)
        if drift is not None:
            self.profile, self._idle_power = refit_energies(self.profile, windows, self._idle_power)
        return drift

    def _open(self, at: float, joules: float) -> None:
        self._reading = at, joules
        self._counts = [0] * len(self._counts)


_Seen = TypeVar("_Seen")


def _last(seen: "deque[_Seen]", count: int) -> list[_Seen]:
    return list(islice(seen, max(0, len(seen) - count), None))
