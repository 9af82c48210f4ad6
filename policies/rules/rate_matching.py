"""Rate matching: the batch size whose service rate meets the arrival rate (BatchMonitor).

    symbol   name
    B        batch size
    T_b      service_times[B - 1], s
    R_b      state.arrival_rate, 1/s

Equation (1), R_b <= B / T_b: a batch is served in the time in which it forms. The paper waits for exactly that many
requests and counts arrivals in tumbling seconds. Taken literally (research/rate_matching_literal.py), a lone request
starves, since the size is never below 2. Here the size is a control limit under a rate that decays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.rules.rule import Rule
from policies.traits import ActionTable, control_limit_table
from policies.types import Action, State, Wait, launch_oldest


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


RATE_MATCHING = Rule(
    name="rate-matching",
    build=lambda _, profile: RateMatching(profile.service_times),
    description="Launches once as many requests wait as the smallest batch whose service rate meets the arrival rate.",
    example="rate-matching",
)
