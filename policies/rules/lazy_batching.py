"""LazyBatching: new requests preempt between stages, catch up with the batch in flight, and are merged with it.

Choi, Kim and Rhu, "LazyBatching: An SLA-aware Batching System for Cloud Machine Learning Inference", sections IV, VI.

    symbol               name
    SLA_target           deadline - arrival, of each request, s
    T_wait               started - arrival, the initial wait; now - arrival of a request that has not started, s
    NodeLatency(n)       profile.span(1, n, n + 1), s: the node is the stage
    SingleInputExecTime  LazyBatching.alone, s (Algorithm 1); of dynamic graphs by dec_timesteps (unrolled.py)
    Slack                budget - work (Claim), s: `printed` is equation (2) to the letter
    InfQ                 state.waiting: the pending inputs
    BatchTable           state.suspended, the latest run last: the stack, its top at the end
    sub-batch            neighbours in the stack at the same stage: catching up with a sub-batch merges the two
    active batch         LazyBatching.active: the topmost sub-batch
    model-allowed        profile.max_batch_size: new requests are limited to the free places in the active batch. If
    maximum batch size     the next sub-batch that they reach has too few places, the requests run last go first

At each stage boundary the oldest waiting requests preempt, as many as the slack allows; else the active batch
continues. The slack is the smallest of all requests in flight, new ones included; equation (1) is the case of one
request. On an idle device all waiting requests start, since none in flight can be delayed. `printed` counts a request
with its full time, even if most stages are done, and only the wait before its start; `remaining` counts the remaining
stages and all time since arrival. Both sum what each request would take alone. `oracle` takes the measured time of
catching up and running merged instead.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import Literal

from policies.profile import Profile
from policies.rules.rule import Rule
from policies.spec import Spec
from policies.traits import StepPolicy
from policies.types import Action, Launch, Request, SpecError, State, Wait

Slack = Literal["printed", "remaining", "oracle"]
SLACKS: tuple[Slack, ...] = ("printed", "remaining", "oracle")
Stack = Sequence[tuple[int, int]]  # (stage, number) of each sub-batch, the top last


@dataclass(frozen=True, slots=True)
class Claim:
    """The device time that requests in flight need; slack = budget - work.

    Attributes:
        budget: time within which all of them have to be done, s.
        work: their estimated service time, s.
        requests: number of requests, waiting ones included.
    """

    budget: float = inf
    work: float = 0.0
    requests: int = 0

    def __add__(self, other: "Claim") -> "Claim":
        """Both together: the lesser budget, the sum of the work."""
        return Claim(min(self.budget, other.budget), self.work + other.work, self.requests + other.requests)


NO_CLAIM = Claim()


@dataclass(frozen=True, slots=True)
class LazyBatching(StepPolicy):
    """Preempts whenever the slack allows.

    Attributes:
        profile: profile of the model, with stage times.
        slack: estimate of the slack.
        predicted: number of stages assumed for a request; None: the profile's.
    """

    profile: Profile
    slack: Slack = "printed"
    predicted: int | None = None

    @property
    def stages(self) -> int:
        """The number of stages assumed for a request."""
        return self.profile.stages if self.predicted is None else self.predicted

    @property
    def alone(self) -> float:
        """SingleInputExecTime: service time of a request alone, s (Algorithm 1)."""
        return self.profile.span(1, 0, self.stages)

    def decide(self, state: State, /) -> Action:
        """Launch one stage of one sub-batch; Wait only without requests."""
        return self.next_launch(state, NO_CLAIM) or Wait()

    def next_launch(self, state: State, others: Claim) -> Launch | None:
        """The next stage of this model's requests; None where the slack allows none.

        Args:
            state: with the requests of this model only.
            others: claim of the other models on the device.
        """
        if not state.suspended and not others.work:
            return self._launch(state.waiting[: self.profile.max_batch_size]) if state.waiting else None
        admitted = self.admitted(state, others) if state.waiting else 0
        return self._launch(state.waiting[:admitted]) if admitted else self.resume(state)

    def resume(self, state: State) -> Launch | None:
        """The next stage of the active batch, if there is one."""
        return self._launch(self.active(state.suspended)) if state.suspended else None

    def active(self, suspended: Sequence[Request]) -> Sequence[Request]:
        """The topmost sub-batch; at most the maximum, which may have become smaller since it was merged."""
        stage = suspended[-1].stage
        size = sum(1 for _ in takewhile(lambda r: r.stage == stage, reversed(suspended)))
        return suspended[-min(size, self.profile.max_batch_size) :]

    def admitted(self, state: State, others: Claim) -> int:
        """How many waiting requests may preempt, the oldest first, by the slack (equation 2)."""
        active = len(self.active(state.suspended)) if state.suspended else 0
        room = min(len(state.waiting), self.profile.max_batch_size - active)
        if not room:
            return 0
        budget = min(r.deadline for r in state.waiting[:room]) - state.now
        budget = min(budget, others.budget, self._budget(state)) - others.work
        work = self._work(state.suspended)
        return room if work(room) <= budget else bisect_right(range(1, room + 1), budget, key=work)

    def claim(self, state: State) -> Claim:
        """The device time that this model's requests in flight need; state has the requests of this model only."""
        if not state.suspended:
            return Claim(requests=len(state.waiting))
        requests = len(state.waiting) + len(state.suspended)
        return Claim(self._budget(state), self._work(state.suspended)(0), requests)

    def latest_start(self, state: State) -> float:
        """The instant by which the model's most urgent request would have to be started alone, s."""
        return min(r.deadline for r in (*state.suspended, *state.waiting)) - self.alone

    def completion_time(self, stack: Stack, new: int = 0) -> float:
        """Time until all requests in the stack, and `new` ones that catch up, are complete, s.

        Merged up to the maximum batch size; the others follow.
        """
        time, size, stage = 0.0, new, 0
        for reached, number in reversed(stack):
            if size and reached > stage:
                time += self.profile.span(size, stage, reached)
            excess = size + number - self.profile.max_batch_size
            if excess > 0:
                time += self._span(excess, reached)
            size, stage = min(size + number, self.profile.max_batch_size), reached
        return time + self._span(size, stage) if size else 0.0

    def _budget(self, state: State) -> float:
        if self.slack == "printed":
            return min((r.deadline - r.started for r in state.suspended), default=inf)
        return min((r.deadline for r in state.suspended), default=inf) - state.now

    def _work(self, suspended: Sequence[Request]) -> Callable[[int], float]:
        """The estimated service time of all requests in flight, s, by the number of new ones."""
        stack, alone = stack_of(suspended), self.alone
        match self.slack:
            case "printed":
                return lambda n: (len(suspended) + n) * alone
            case "remaining":
                left = sum(number * self._span(1, stage) for stage, number in stack)
                return lambda n: left + n * alone
            case "oracle":
                return lambda n: self.completion_time(stack, n)

    def _span(self, size: int, stage: int) -> float:
        """Time of `size` requests from a stage to the end, s, in several batches if they are above the maximum size.

        A request that has passed the predicted number of stages counts with one more stage.
        """
        full, rest = divmod(size, self.profile.max_batch_size)
        times, first = ((full, self.profile.max_batch_size), (1, rest)), min(stage, self.stages - 1)
        return sum(n * self.profile.span(b, first, self.stages) for n, b in times if n and b)

    def _launch(self, batch: Sequence[Request]) -> Launch:
        return Launch(batch, 1, "full" if len(batch) >= self.profile.max_batch_size else "policy")


def stack_of(suspended: Sequence[Request]) -> Stack:
    """The sub-batches of the stack, the top last."""
    stack: list[tuple[int, int]] = []
    stage, number = -1, 0
    for request in suspended:
        if request.stage != stage:
            if number:
                stack.append((stage, number))
            stage, number = request.stage, 0
        number += 1
    if number:
        stack.append((stage, number))
    return stack


def _build(spec: Spec, profile: Profile) -> LazyBatching:
    slack = next((s for s in SLACKS if s == spec.parameters.get("slack", "printed")), None)
    if slack is None:
        raise SpecError(f"policy {spec.text!r}: unknown slack {spec.parameters['slack']!r}; give {', '.join(SLACKS)}")
    check_stages(spec, profile)
    return LazyBatching(profile, slack)


def check_stages(spec: Spec, profile: Profile) -> None:
    """Check that a policy that decides between stages has an objective, and a profile whose batches have stages.

    Raises:
        SpecError: the spec has no valid `slo_ms`, or the profile has service times by length.
    """
    spec.number("slo_ms")  # required: it sets the deadlines
    if profile.varies_by_length:
        raise SpecError(
            f"policy {spec.text!r} decides between stages, and profile {profile.name!r} has service times by length, "
            "but none by stage; use greedy or multi-bin"
        )


LAZY = Rule(
    name="lazy",
    build=_build,
    keys=frozenset({"slo_ms", "slack"}),
    defaults={"slack": "printed"},
    needs_stages=True,
    per_bin=False,
    description="Experimental. Launches one stage at a time. Between stages new requests go first as long as all "
    "requests can be answered within {slo_ms} ms (slack {slack}); they catch up and are merged. It is faster than a "
    "long fixed batching window at low load; under load greedy is faster.",
    example="lazy:slo_ms=60",
)
