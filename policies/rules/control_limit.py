"""Control limit: launch everybody who waits once at least `limit` do. Greedy, serial, static and timeout are members.

Journal, definitions 1 and 2 (equations 15 and 16); where fewer than B_min wait, nothing is launched (exact-tail.md,
misprint of equation 16).
"""

from dataclasses import dataclass, replace
from math import inf

from policies.types import Action, Reason, State, Wait, launch_oldest


@dataclass(frozen=True, slots=True)
class ControlLimit:
    """Launch when `limit` requests wait, or when the oldest has waited `timeout`; never more than the maximum.

    Attributes:
        limit: smallest number that is launched before the time-out.
        max_batch_size: largest batch.
        timeout: waiting time of the oldest request, counted from its arrival, at which whoever waits goes, s.
        reason: what a launch below the maximum is called.
    """

    limit: int
    max_batch_size: int
    timeout: float = inf
    reason: Reason = "policy"

    def decide(self, state: State, /) -> Action:
        """Compare one count and one instant."""
        due = state.waiting[0].arrival + self.timeout
        if len(state.waiting) < self.limit and state.now < due:
            return Wait(until=due)
        launch = launch_oldest(state, self.max_batch_size, self.max_batch_size, self.reason)
        return launch if state.now >= due else replace(launch, formed=state.waiting[self.limit - 1].arrival)


def greedy(max_batch_size: int) -> ControlLimit:
    """Whoever waits goes as soon as the device is free (equation 16)."""
    return ControlLimit(1, max_batch_size)


def serial() -> ControlLimit:
    """One request at a time."""
    return ControlLimit(1, 1)


def static(batch_size: int) -> ControlLimit:
    """Batches of exactly this size (equation 15)."""
    return ControlLimit(batch_size, batch_size)


def timeout(max_batch_size: int, timeout: float) -> ControlLimit:
    """A full batch, or whoever waits when the oldest has waited `timeout` s, counted from its arrival."""
    return ControlLimit(max_batch_size, max_batch_size, timeout)
