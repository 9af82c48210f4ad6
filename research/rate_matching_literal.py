"""BatchMonitor's Algorithm 1 to the letter: the arrivals of the last second choose the batch size.

policies/rules/rate_matching.py is the rule that the server has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor

from policies.catalog import ModelPolicy, choose
from policies.profile import Profile
from policies.types import Action, BatchKey, Launch, State, Wait


class TumblingMonitor:
    """Counts arrivals in tumbling windows, as BatchMonitor's Algorithm 1 does; no estimate during the first window."""

    def __init__(self, window: float = 1.0) -> None:
        """Set the window length, s; windows end at multiples of it on the clock."""
        self._window = window
        self._counts: dict[BatchKey, tuple[int, int, int]] = {}  # (window, its arrivals, arrivals in the one before)
        self._first: int | None = None

    def arrive(self, kind: BatchKey, at: float) -> None:
        """Count the arrival in the window that contains `at`."""
        index = floor(at / self._window)
        self._first = index if self._first is None else self._first
        current, count, before = self._counts.get(kind, (index, 0, 0))
        if index > current:
            current, count, before = index, 0, count if index == current + 1 else 0
        self._counts[kind] = (current, count + 1, before)

    def rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return the arrivals in the last complete window over its length, 1/s; empty during the first window."""
        index = floor(now / self._window)
        if self._first is None or index == self._first:
            return {}
        return {kind: self._last_complete(entry, index) / self._window for kind, entry in self._counts.items()}

    def mean_rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return no rates: Algorithm 1 has no long-run mean."""
        return {}

    @staticmethod
    def _last_complete(entry: tuple[int, int, int], index: int) -> int:
        current, count, before = entry
        if index == current:
            return before
        return count if index == current + 1 else 0


@dataclass(frozen=True, slots=True)
class RateMatchingLiteral:
    """Algorithm 1 to the letter: launch exactly the preferred size, from the count of the last whole second.

    Attributes:
        service_times: l(b), s; index b - 1; the largest batch is its length.
        window: length of the counting window, s; windows end at multiples of it.
    """

    service_times: Sequence[float]
    window: float = 1.0

    def preferred_size(self, state: State) -> int:
        """1 before the first count; then the smallest of 2..B_max with count < b / l(b), else B_max (lines 3 to 18)."""
        if not state.rates:
            return 1
        full = len(self.service_times)
        count = state.arrival_rate
        return next((b for b in range(2, full + 1) if count < b / self.service_times[b - 1]), full)

    def decide(self, state: State, /) -> Action:
        """Wait for the preferred size, at most until the next count; launch exactly that many."""
        size = self.preferred_size(state)
        if len(state.waiting) < size:
            # The preferred size is never below two after the first count: only an arrival can end that wait.
            return Wait(self.window * (floor(state.now / self.window) + 1)) if size > 2 else Wait()
        return Launch(state.waiting[:size], reason="full" if size == len(self.service_times) else "policy")


def rate_matching_literal(profile: Profile) -> ModelPolicy:
    """The policy with its monitor, for a simulation on this profile."""
    policy = RateMatchingLiteral(profile.service_times)
    return replace(choose("greedy", profile), policy=policy, monitor=TumblingMonitor())
