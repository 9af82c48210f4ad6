"""Detection of drift: measured service times and energies that no longer match a profile, and the refit that follows.

The results depend on the observations only: no clock, no I/O, no randomness. The server's controller makes these calls:

    detector = DriftDetector(profile)
    detector.observe_batch(size, service_time, length)   after each batch
    detector.observe_energy(instant, joules)     after each reading of the energy counter
    detector.observe_cpu_time(size, cpu_time)    after each batch of a process whose CPU time is counted
    refit = detector.refit(costs)                periodically: a new profile and the drifts, or None
    objective = objective.after(counts)          periodically: solve again with its factor if the level has changed

**Service times** are learned from every batch (learned_times.py). The learned times are compared with the profile in
use after 16, 32, 64, ... batches, and later every 2,048, but not while a drift may have begun. They replace it if they
differ significantly, so that it changes a few times at first, and rarely later.

**Detection.** The ratio of an observed to an expected value should be 1. A two-sided CUSUM detector (Page, 1954)
accumulates log ratios with an allowance of 0.1 (0.05 for energies), so that within 10 per cent each sum returns to 0.
The last time a sum was 0 is the estimate of the change point. One value is clipped to 0.3 (a batch) or 0.4 (an energy
window), so that a single outlier raises no alarm. After an alarm by batches the service times are learned anew, from
those since the change point.

The threshold for batches is 3: about 15 batches at 1.5 times the expected time, about 35 at 1.2 times. It is 300 times
the variance v of log ratios if that is more, since disturbances of a device last for many batches: about 75 batches at
1.5 times the expected time if v is 0.05. v is half the mean square of successive differences, which a jump hardly
affects. A device may be slower now and then for a second, as a virtual machine is whose host has other work. So the
threshold is multiplied by 4, up to 16, by each alarm that takes back the change of the one before, and halved after
each 4,096 batches without one. Such disturbances then are variation of the learned times, and policies stay.

A change by a factor of 3 waits for no threshold: five batches in a row that show it are an alarm.

The threshold for energy windows is 0.4: two windows of 1.5 times the energy. Each window averages at least eight
batches. A batch missing from one window is counted in the next, so such errors do not accumulate. An alarm is a drift
if the mean ratio since the change point differs from 1 by more than 5 per cent; otherwise the detector is reset.

**CPU times** are learned in the same way by batch size, from those of the profile, or else from its service times. They
replace the profile's if they differ significantly, where the policy weighs what a batch costs.

**Refits of energies** (energy_refits.py): only observations after the change point are used. The first windows after a
change are few and often determine a scale only. So the energies are fitted again once 8, 16, 32 and 64 windows have
followed the refit, each time to all of them. `better_energies` says when a new fit is accepted.
"""

from collections import deque
from dataclasses import replace
from itertools import islice
from math import exp, log
from statistics import median
from typing import TypeVar

from policies.adaptation.energy_refits import (
    EFFECT,
    Drift,
    EnergyWindow,
    Refit,
    batch_energy,
    better_energies,
    energy_drift,
    labelled,
    refit_energies,
)
from policies.adaptation.learned_times import LearnedTimes, ServedBatch
from policies.profile import Profile

_MAX_BATCHES = 256  # kept
_TIME_THRESHOLD, _PER_VARIANCE, _ENERGY_THRESHOLD = 3.0, 300.0, 0.4  # of sums, beyond which there is an alarm
_CAUTION, _MOST_CAUTION, _CALM = 4.0, 16.0, 4096  # factor of the threshold by a change back, its limit; batches
_BACK = 0.5  # of the logarithm of a change: the sum of two in a row that take each other back is at most that
_RECENT, _LARGE_CHANGE = 5, 3.0  # batches in a row, whose ratios are an alarm beyond this factor
_UNDECIDED = 0.05  # part of the threshold of an alarm above which a change may have begun
_TIME_EFFECT = 0.1  # relative error of service times up to which another policy would be no better
_FIRST_LOOK, _LAST_LOOK = 16, 2048  # batches after which the learned times are compared with those in use
_MAX_WINDOWS = 64  # kept
_LOOKS = (8, 16, 32, 64)  # windows since a refit of the energies with which they are fitted again
_MIN_WINDOW = 0.25  # s, of an energy window
_MIN_WINDOW_BATCHES = 8  # of an energy window: a batch at its edge is then at most an eighth of it


class CusumDetector:
    """Two-sided CUSUM detector of ratios that deviate from 1, with an estimate of the change point.

    Attributes:
        variance: of log ratios, by successive differences.
    """

    __slots__ = ("_allowance", "_clip", "_count", "_down", "_down_since", "_last", "_up", "_up_since", "variance")

    def __init__(self, allowance: float, clip: float) -> None:
        """Set allowance and clip of a log ratio."""
        self._allowance, self._clip = allowance, clip
        self._count, self._last, self.variance = 0, 0.0, 0.0
        self._up = self._down = 0.0
        self._up_since = self._down_since = 0

    def update(self, ratio: float) -> None:
        """Add an observed ratio, above 0."""
        value, clip = log(ratio), self._clip
        if value > clip:  # min() and max() take twice as long, once per batch
            value = clip
        elif value < -clip:
            value = -clip
        self._count = count = self._count + 1
        step = value - self._last
        self._last = value
        self.variance += (step * step / 2 - self.variance) / min(count, 64)
        self._up = up = self._up + value - self._allowance
        if up <= 0.0:
            self._up, self._up_since = 0.0, count
        self._down = down = self._down - value - self._allowance
        if down <= 0.0:
            self._down, self._down_since = 0.0, count

    @property
    def level(self) -> float:
        """The larger sum."""
        return max(self._up, self._down)

    @property
    def since_change(self) -> int:
        """Number of ratios since the estimated change point."""
        return self._count - (self._up_since if self._up > self._down else self._down_since)

    def reset(self) -> None:
        """Reset both sums; the estimate of the variance is kept."""
        self._up = self._down = 0.0
        self._up_since = self._down_since = self._count = 0


class DriftDetector:
    """Detects drift of the profile of one model on one device, and refits it.

    Attributes:
        profile: the current profile; `refit` replaces it.
        discarded_windows: number of calls of `discard_window`; a counter reading that began before the last call is
            invalid.
    """

    def __init__(self, profile: Profile, idle_power: float = 0.0) -> None:
        """Start with a profile; `idle_power`: power counted while nothing runs, W, 0 if only batches are counted."""
        self.profile = profile
        self._idle_power = idle_power
        self.discarded_windows = 0
        self._learned = LearnedTimes(profile)
        self._cpu_times = LearnedTimes(_of_cpu(profile))
        self._next_cpu_look = _FIRST_LOOK
        self._batches: deque[ServedBatch] = deque(maxlen=_MAX_BATCHES)
        self._next_look = _FIRST_LOOK
        self._windows: deque[EnergyWindow] = deque(maxlen=_MAX_WINDOWS)
        self._times = CusumDetector(_TIME_EFFECT, clip=0.3)
        self._energies = CusumDetector(EFFECT, clip=0.4)
        self._recent: deque[float] = deque(maxlen=_RECENT)  # ratios of the latest batches
        self._caution, self._last_alarm, self._calm = 1.0, 0.0, 0  # of alarms by batches; the last as a log ratio
        self._windows_since_refit = 0
        self._looks: tuple[int, ...] = ()  # the remaining ones of _LOOKS, none before a refit
        self._counts = [0] * (profile.max_batch_size + 1)  # batches by size since `_reading`
        self._reading: tuple[float, float] | None = None  # instant, s, and J at the start of the window

    def observe_batch(self, batch_size: int, service_time: float, length: float | None = None) -> None:
        """Add a completed batch.

        Args:
            batch_size: number of requests.
            service_time: s, above 0.
            length: of the longest request; None for a profile without lengths.
        """
        batch = ServedBatch(batch_size, service_time, length)
        self._batches.append(batch)
        self._counts[batch_size] += 1
        ratio = self._learned.observe(batch)
        self._recent.append(ratio)
        self._calm += 1
        if self._calm == _CALM:
            self._caution, self._calm = max(self._caution / 2, 1.0), 0
        self._times.update(ratio * exp(self._learned.cv**2 / 2))  # the mean of its logarithm then is about 0

    def observe_cpu_time(self, batch_size: int, cpu_time: float) -> None:
        """Add the user and system time that a completed batch took, s, above 0."""
        self._cpu_times.observe(ServedBatch(batch_size, cpu_time))

    @property
    def learned(self) -> Profile:
        """The profile with the times as they are known now, which need not be in use."""
        learned = self._with_times(self._learned.known())
        known = self._cpu_times.batches >= _FIRST_LOOK
        return replace(learned, cpu_times=self._cpu_times.known().service_times) if known else learned

    @property
    def latest_ratio(self) -> float:
        """Median over the latest batches of the service time over that of the profile in use; 1 while they are few."""
        return median(self._recent) if len(self._recent) == _RECENT else 1.0

    def discard_window(self) -> None:
        """Discard the open energy window, because work other than whole batches ran, such as single stages."""
        self._reading = None
        self.discarded_windows += 1

    def observe_energy(self, at: float, joules: float) -> None:
        """Add a reading of the energy counter at instant `at`, s; it closes the window if that is long enough.

        Windows in which the counter decreased (it was reset) or did not change are dropped.
        """
        if self._reading is None or joules < self._reading[1]:
            self._open(at, joules)
            return
        elapsed, energy = at - self._reading[0], joules - self._reading[1]
        if elapsed < _MIN_WINDOW or sum(self._counts) < _MIN_WINDOW_BATCHES:
            return
        window = EnergyWindow({size: n for size, n in enumerate(self._counts) if n}, elapsed, energy)
        self._open(at, joules)
        predicted = batch_energy(self.profile, window)
        if energy > 0 and predicted > 0:
            self._windows.append(window)
            self._windows_since_refit += 1
            self._energies.update(energy / (self._idle_power * elapsed + predicted))

    def refit(self, costs: bool = True) -> Refit | None:
        """Return the refitted profile and the drifts, or None without drift; the observations are used only once.

        `costs` is whether the policy weighs what a batch costs; if not, CPU times are learned only.
        """
        found = self._refit_times(), self._refit_energies(), self._refit_cpu_times() if costs else None
        drifts = [drift for drift in found if drift is not None]
        return Refit(self.profile, tuple(drifts)) if drifts else None

    def _refit_times(self) -> Drift | None:
        threshold = self._caution * max(_TIME_THRESHOLD, _PER_VARIANCE * self._times.variance)
        known = self._learned.batches > _FIRST_LOOK and len(self._recent) == _RECENT
        large = known and (min(self._recent) > _LARGE_CHANGE or max(self._recent) < 1.0 / _LARGE_CHANGE)
        alarm = large or self._times.level > threshold
        if alarm:
            self._learned.restart(_last(self._batches, max(self._times.since_change, 1)))
            self._times.reset()
            self._recent.clear()
            self._next_look = self._learned.batches
        if self._learned.batches < self._next_look or self._times.level > _UNDECIDED * threshold:
            return None
        self._next_look += min(max(self._next_look, _FIRST_LOOK), _LAST_LOOK)
        change = self._learned.change(_TIME_EFFECT) if alarm else self._learned.change()
        if change is None:
            return None
        ratio, of_one_size = change
        if alarm:
            self._note_alarm(log(ratio))
        self.profile = self._with_times(self._learned.update())
        self._times.reset()
        return Drift("service times", ratio, self._learned.batches, of_one_size)

    def _refit_cpu_times(self) -> Drift | None:
        if self._cpu_times.batches < self._next_cpu_look:
            return None
        if replace(self.profile, cpu_times=self.profile.service_times).saved != "cpu_time":  # were they known
            return None
        self._next_cpu_look += min(self._next_cpu_look, _LAST_LOOK)
        change = (1.0, False) if self.profile.cpu_times is None else self._cpu_times.change()
        if change is None:
            return None
        self.profile = replace(self.profile, cpu_times=self._cpu_times.update().service_times)
        return Drift("CPU times", change[0], self._cpu_times.batches, change[1])

    def _note_alarm(self, change: float) -> None:
        """Raise the threshold if this alarm, a log ratio, takes back the one before."""
        if abs(change + self._last_alarm) < _BACK * abs(self._last_alarm):
            self._caution, self._calm = min(_CAUTION * self._caution, _MOST_CAUTION), 0
        self._last_alarm = change

    def _with_times(self, learned: Profile) -> Profile:
        changed = replace(
            self.profile,
            service_times=learned.service_times,
            length_service_times=learned.length_service_times,
            stage_service_times=learned.stage_service_times,
            cvs=learned.cvs,
        )
        return labelled(changed, "service times", self._learned.batches)

    def _refit_energies(self) -> Drift | None:
        if self._energies.level <= _ENERGY_THRESHOLD:
            return self._fit_energies_again()
        windows = _last(self._windows, self._energies.since_change)
        windows = windows[1:] or windows  # the change point is within the first
        self._energies.reset()
        drift = energy_drift(self.profile, windows, self._idle_power)
        if drift is not None:
            self.profile, self._idle_power = refit_energies(self.profile, windows, self._idle_power)
            self._windows_since_refit, self._looks = 0, _LOOKS
        return drift

    def _fit_energies_again(self) -> Drift | None:
        remaining = tuple(look for look in self._looks if look > self._windows_since_refit)
        if remaining == self._looks:
            return None
        self._looks = remaining
        found = better_energies(self.profile, _last(self._windows, self._windows_since_refit), self._idle_power)
        if found is None:
            return None
        self._energies.reset()
        self.profile, self._idle_power, drift = found
        return drift

    def _open(self, at: float, joules: float) -> None:
        self._reading = at, joules
        self._counts = [0] * len(self._counts)


def _of_cpu(profile: Profile) -> Profile:
    """The profile with its CPU times, else its service times by size, as service times."""
    times = profile.cpu_times or profile.service_times
    return Profile(profile.name, times)


_Item = TypeVar("_Item")


def _last(items: "deque[_Item]", count: int) -> list[_Item]:
    return list(islice(items, max(0, len(items) - count), None))
