"""The largest batch that the deadline allows: BatchMonitor's benchmark, "max batch size" (paper, section IV)."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.profile import Profile
from policies.rules.rule import Rule
from policies.spec import Spec
from policies.types import Action, Launch, State, Wait, launch_oldest


@dataclass(frozen=True, slots=True)
class MaxUnderDeadline:
    """Launch when full, or at the last instant at which the oldest request can still be on time.

    Attributes:
        service_times: l(b), s; index b - 1; the largest batch is its length.
    """

    service_times: Sequence[float]

    def decide(self, state: State, /) -> Action:
        """Wait as long as the oldest request's deadline allows for a batch of all waiting requests."""
        full = len(self.service_times)
        size = len(state.waiting)
        if size >= full:
            return launch_oldest(state, full, full)
        deadline = min(r.deadline for r in state.waiting)  # the oldest one's, unless the objective has changed
        latest = deadline - self.service_times[size - 1]
        if state.now < latest:
            return Wait(latest)
        return Launch(state.waiting[: self._still_on_time(state.now, deadline, size)], reason="slo")

    def _still_on_time(self, now: float, deadline: float, size: int) -> int:
        """The largest batch that meets the oldest request's deadline after an arrival; all of them if none does."""
        # as in `decide`: `deadline - now >= service time` may be false, by rounding, at the instant waited for
        return next((b for b in range(size, 0, -1) if now <= deadline - self.service_times[b - 1]), size)


def _build(spec: Spec, profile: Profile) -> MaxUnderDeadline:
    spec.number("slo_ms")  # required: it sets the deadlines
    return MaxUnderDeadline(profile.service_times)


MAX_UNDER_DEADLINE = Rule(
    name="max-under-deadline",
    build=_build,
    keys=frozenset({"slo_ms"}),
    description="Launches a full batch, or a partial batch at the last instant at which the oldest request can be "
    "answered within {slo_ms} ms. The chart shows the actions for requests that have just arrived.",
    example="max-under-deadline:slo_ms=60",
)
