"""LazyBatching: newcomers preempt between stages, catch up with the batch under way, and ride along.

Choi, Kim and Rhu, "LazyBatching: An SLA-aware Batching System for Cloud Machine Learning Inference", sections IV, VI.

    symbol               name
    SLA_target           deadline - arrival, of each request, s
    T_wait               started - arrival, the initial wait; now - arrival of who has not started, s
    NodeLatency(n)       profile.span(1, n, n + 1), s: the node is the stage
    SingleInputExecTime  LazyBatching.alone, s (Algorithm 1); of dynamic graphs by dec_timesteps (unrolled.py)
    Slack                budget - work (Claim), s: `printed` is equation (2) to the letter
    InfQ                 state.waiting: the pending inputs
    BatchTable           state.suspended, the latest run last: the stack, its top at the end
    sub-batch            neighbours in the stack that stand at one stage, so that catching up is merging
    active batch         LazyBatching.active: the topmost sub-batch
    model-allowed        profile.max_batch_size: newcomers are no more than have room in the active batch; where the
    maximum batch size     next sub-batch is then caught up with and has too little room, who ran last goes first

At each stage boundary the oldest newcomers preempt, as many as the slack allows; else the active batch goes on. The
slack is that of the least fortunate in flight, newcomers included; equation (1) is the case of one. An idle device
takes whoever waits, for there is nobody to spare. Printed, a request counts its full time though most of it is done,
and only the wait before its start; `remaining` counts what remains and all time since arrival. Both sum what everybody
would take alone. `oracle` takes the measured time of catching up and riding together instead.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import Literal

from policies.profile import Profile
from policies.types import Action, Launch, Request, State, Wait

Slack = Literal["printed", "remaining", "oracle"]
SLACKS: tuple[Slack, ...] = ("printed", "remaining", "oracle")
Stack = Sequence[tuple[int, int]]  # (stage, number) of each sub-batch, the top last


@dataclass(frozen=True, slots=True)
class Claim:
    """What requests in flight want of the device; slack = budget - work.

    Attributes:
        budget: time within which all of them have to be done, s.
        work: time that they are counted with, s.
        requests: how many are here, waiting ones included.
    """

    budget: float = inf
    work: float = 0.0
    requests: int = 0

    def __add__(self, other: "Claim") -> "Claim":
        """Both together: the lesser budget, the sum of the work."""
        return Claim(min(self.budget, other.budget), self.work + other.work, self.requests + other.requests)


NOBODY = Claim()


@dataclass(frozen=True, slots=True)
class LazyBatching:
    """Preempts whenever the slack allows.

    Attributes:
        profile: of the model, by stage.
        slack: how it is estimated.
        predicted: number of stages that a request is taken to have; None: the profile's.
    """

    profile: Profile
    slack: Slack = "printed"
    predicted: int | None = None

    @property
    def stages(self) -> int:
        """The number of stages a request is taken to have."""
        return self.profile.stages if self.predicted is None else self.predicted

    @property
    def alone(self) -> float:
        """SingleInputExecTime: what a request takes alone, s (Algorithm 1)."""
        return self.profile.span(1, 0, self.stages)

    def decide(self, state: State, /) -> Action:
        """One stage of one sub-batch; never waits."""
        return self.turn(state, NOBODY) or Wait()

    def turn(self, state: State, others: Claim) -> Launch | None:
        """The next stage of whoever of this model goes next; None where nobody may.

        Args:
            state: with the requests of this model only.
            others: of the other models on the device.
        """
        if not state.suspended and not others.work:
            return self._launch(state.waiting[: self.profile.max_batch_size]) if state.waiting else None
        newcomers = self.admitted(state, others) if state.waiting else 0
        return self._launch(state.waiting[:newcomers]) if newcomers else self.resume(state)

    def resume(self, state: State) -> Launch | None:
        """The next stage of the active batch, if there is one."""
        return self._launch(self.active(state.suspended)) if state.suspended else None

    def active(self, suspended: Sequence[Request]) -> Sequence[Request]:
        """The topmost sub-batch; no larger than the maximum, should that have become smaller."""
        stage = suspended[-1].stage
        size = sum(1 for _ in takewhile(lambda r: r.stage == stage, reversed(suspended)))
        return suspended[-min(size, self.profile.max_batch_size) :]

    def admitted(self, state: State, others: Claim) -> int:
        """How many newcomers the slack lets preempt, the oldest first (equation 2)."""
        active = len(self.active(state.suspended)) if state.suspended else 0
        room = min(len(state.waiting), self.profile.max_batch_size - active)
        if not room:
            return 0
        budget = min(r.deadline for r in state.waiting[:room]) - state.now
        budget = min(budget, others.budget, self._budget(state)) - others.work
        work = self._work(state.suspended)
        return room if work(room) <= budget else bisect_right(range(1, room + 1), budget, key=work)

    def claim(self, state: State) -> Claim:
        """What those of this model who are in flight want; state holds the requests of this model only."""
        if not state.suspended:
            return Claim(requests=len(state.waiting))
        requests = len(state.waiting) + len(state.suspended)
        return Claim(self._budget(state), self._work(state.suspended)(0), requests)

    def due(self, state: State) -> float:
        """The instant by which the model's most urgent request would have to be started alone, s."""
        return min(r.deadline for r in (*state.suspended, *state.waiting)) - self.alone

    def ride(self, stack: Stack, newcomers: int = 0) -> float:
        """Time until everybody in the stack, and newcomers who catch up, have ridden to the end, s.

        Together, up to the maximum; the others after them.
        """
        time, size, stage = 0.0, newcomers, 0
        for reached, number in reversed(stack):
            if size and reached > stage:
                time += self.profile.span(size, stage, reached)
            left_behind = size + number - self.profile.max_batch_size
            if left_behind > 0:
                time += self._span(left_behind, reached)
            size, stage = min(size + number, self.profile.max_batch_size), reached
        return time + self._span(size, stage) if size else 0.0

    def _budget(self, state: State) -> float:
        if self.slack == "printed":
            return min((r.deadline - r.started for r in state.suspended), default=inf)
        return min((r.deadline for r in state.suspended), default=inf) - state.now

    def _work(self, suspended: Sequence[Request]) -> Callable[[int], float]:
        """The time that all in flight are counted with, s, by the number of newcomers."""
        stack, alone = stack_of(suspended), self.alone
        match self.slack:
            case "printed":
                return lambda n: (len(suspended) + n) * alone
            case "remaining":
                left = sum(number * self._span(1, stage) for stage, number in stack)
                return lambda n: left + n * alone
            case "oracle":
                return lambda n: self.ride(stack, n)

    def _span(self, size: int, stage: int) -> float:
        """Of so many from a stage on, s; in several batches where the maximum has become smaller.

        Who outlasts what was predicted has one stage more at least.
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
