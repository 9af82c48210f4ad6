"""Rate matching: the batch size whose service rate meets the arrival rate (BatchMonitor).

    symbol   name
    B        batch size
    T_b      service_times[B - 1], s
    R_b      state.arrival_rate, 1/s

Equation (1), R_b <= B / T_b: a batch is served in the time in which it forms. The paper waits for exactly that many
requests and counts arrivals in tumbling seconds. Taken literally, a lone request starves, since the size is never below
2. `RateMatching` takes the size as a control limit under a rate that decays; `RateMatchingLiteral` is Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import ClassVar

from policies.queue.monitor import TumblingMonitor
from policies.rules.rule import Rule
from policies.rules.traits import ActionTable, control_limit_table
from policies.types import Action, Launch, State, Wait, launch_oldest


@dataclass(frozen=True, slots=True)
class RateMatching:
    """Launch once as many requests wait as the smallest batch whose service rate meets the arrival rate.

    Attributes:
        service_times: l(b), s; index b - 1; the largest batch is its length.
    """

    depends_on_rate: ClassVar[bool] = True

    service_times: Sequence[float]

    def limit(self, arrival_rate: float) -> int:
        """The smallest B with B / T_b >= arrival rate (1/s); the largest batch where none is fast enough."""
        for b, service_time in enumerate(self.service_times, 1):
            if b >= arrival_rate * service_time:
                return b
        return len(self.service_times)

    def decide(self, state: State, /) -> Action:
        """Compare the count with the limit; decide again once the rate has decayed without arrivals."""
        if len(state.waiting) < self.limit(state.arrival_rate):
            return Wait(state.reevaluate_at)
        full = len(self.service_times)
        return launch_oldest(state, full, full)

    def action_table(self, arrival_rate: float | None) -> ActionTable:
        """The control limit at this rate."""
        return control_limit_table(self.limit(arrival_rate or 0.0), len(self.service_times))


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


RATE_MATCHING = Rule(
    name="rate-matching",
    build=lambda _, profile: RateMatching(profile.service_times),
    description="Launches once as many requests wait as the smallest batch whose service rate meets the arrival rate.",
    example="rate-matching",
)
RATE_MATCHING_LITERAL = Rule(
    name="rate-matching-literal",
    build=lambda _, profile: RateMatchingLiteral(profile.service_times),
    monitor=TumblingMonitor,
    description="BatchMonitor's Algorithm 1 to the letter: the arrivals of the last second choose the batch size.",
    example="rate-matching-literal",
)
