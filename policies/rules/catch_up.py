"""Catch-up: LazyBatching that preempts only when it pays.

LazyBatching preempts whenever the slack allows, so under load the batch in flight is delayed again and again by later
arrivals. Here, at each stage boundary with waiting requests and enough slack (remaining times), two ways are compared:

    (a) the requests in flight run to the end, after t_a; waiting requests and arrivals until then follow;
    (b) n new requests catch up and all run merged to the end, after t_b; the rest follows.

From then on either way is counted as if greedy decided. Service that then takes l(b) = c + a b and arrivals of rate
lambda give greedy's relative value h(n), of n waiting when the device is free, and its gain g, the mean number in the
system. Both follow from h(n) = n l(n) + lambda l(n)^2 / 2 - g l(n) + E[h(N)], N Poisson of mean lambda l(n): the
waiting requests, the arrivals during service, and the queue that they leave. A quadratic solves it,
h(n) = alpha n^2 + beta n with

    alpha = a (1 + lambda a / 2) / (1 - (lambda a)^2)
    beta  = u - g v,  u = (c (1 + lambda a) + lambda a alpha (1 + 2 lambda c)) / (1 - lambda a),  v = a / (1 - lambda a)
    g     = lambda (c / 2 + alpha (1 + lambda c) + u) / (1 + lambda v)

exactly, but for two approximations: batches have no maximum size, and an idle device serves an empty batch. Service
times that are not affine are fitted by a line from the size whose service keeps up with the arrivals, around which
greedy's batches settle, to about twice that size. A way of duration t, during which m requests are in the system and
after which `left` of them still wait, then costs

    m t + lambda t^2 / 2 - g t + E[h(left + N)],  N Poisson of mean lambda t

and the way of less cost is taken. That is one step of policy improvement from greedy, repeated at each boundary, which
cannot be worse than greedy for Poisson arrivals and a known rate. With lambda = 0 it is the sum of all requests' times
to completion, without arrivals to come.

Stage by stage a batch takes longer than in one launch (`Profile.stage_overhead`). It is launched whole where the option
to merge new requests is worth less than that: the sum, over the boundaries, of the probability that the first arrivals
come just before one, times the gain of merging them.

    symbol   name
    a, c     Line.slope, Line.intercept, s
    lambda   state.arrival_rate, 1/s
    alpha    GreedyValue.quadratic; beta: linear; g: gain
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, exp

from policies.profile import Profile, fit_affine
from policies.rules.lazy_batching import NO_CLAIM, Claim, LazyBatching, Stack, stack_of
from policies.rules.rule import Rule
from policies.rules.traits import StepPolicy
from policies.types import Action, Launch, State, Wait
from policies.unrolled import staged_profile

_EQUAL = 1.0 + 1e-9  # times that differ by less, by rounding, are the same
_STEADY = 0.97  # load beyond which greedy has no relative value, or one too large to compare with


@dataclass(frozen=True, slots=True)
class GreedyValue:
    """Greedy's relative value of n waiting requests, h(n) = quadratic n^2 + linear n, and its gain.

    Attributes:
        rate: of arrivals, 1/s.
        quadratic: s.
        linear: s.
        gain: the mean number in the system.
    """

    rate: float
    quadratic: float
    linear: float
    gain: float

    def cost(self, here: int, left: int, time: float) -> float:
        """Cost of `time` (s) with `here` requests in the system, of which `left` still wait after it, s."""
        arrivals = self.rate * time
        mean = left + arrivals
        after = self.quadratic * (mean * mean + arrivals) + self.linear * mean
        return (here + arrivals / 2 - self.gain) * time + after


def greedy_value(slope: float, intercept: float, rate: float) -> GreedyValue:
    """Greedy's value for service times intercept + slope b, s, and Poisson arrivals; slope x rate is below 1."""
    load = rate * slope
    quadratic = slope * (1 + load / 2) / (1 - load * load)
    fixed = (intercept * (1 + load) + load * quadratic * (1 + 2 * rate * intercept)) / (1 - load)
    by_gain = slope / (1 - load)
    gain = rate * (intercept / 2 + quadratic * (1 + rate * intercept) + fixed) / (1 + rate * by_gain)
    return GreedyValue(rate, quadratic, fixed - gain * by_gain, gain)


@dataclass(frozen=True, slots=True)
class Line:
    """Service times as intercept + slope b, s, and the highest arrival rate they are evaluated at, 1/s."""

    slope: float
    intercept: float
    highest: float

    def value(self, arrival_rate: float) -> GreedyValue:
        """Greedy's value at this rate, 1/s."""
        return greedy_value(self.slope, self.intercept, min(arrival_rate, self.highest))


@dataclass(frozen=True, slots=True)
class CatchUp(StepPolicy):
    """Preempts when the slack allows and it pays.

    Attributes:
        lazy: LazyBatching, whose slack it respects.
        rates: highest arrival rate that batches of up to 1, 2, ... can serve, 1/s.
        lines: affine fits of the service time of all stages, by that batch size.
    """

    lazy: LazyBatching
    rates: Sequence[float]
    lines: Sequence[Line]

    def decide(self, state: State, /) -> Action:
        """A sub-batch, for one stage or all of them; never waits."""
        return self.next_launch(state, NO_CLAIM) or Wait()

    def next_launch(self, state: State, others: Claim) -> Launch | None:
        """As LazyBatching, with at most as many new requests as can be merged, and only where that pays."""
        launch = self.lazy.next_launch(state, others)
        if launch is None or launch.requests[0].stage:
            return launch
        if not state.suspended:
            whole = not others.requests and not self._worth_stopping(state, len(launch.requests))
            return replace(launch, stages=None) if whole else launch
        new = min(len(launch.requests), self.lazy.profile.max_batch_size - len(state.suspended))
        if new <= 0 or not self._pays(state, new, others):
            return self.lazy.resume(state)
        return replace(launch, requests=launch.requests[:new])

    def claim(self, state: State) -> Claim:
        """As LazyBatching's."""
        return self.lazy.claim(state)

    def latest_start(self, state: State) -> float:
        """As LazyBatching's."""
        return self.lazy.latest_start(state)

    def _pays(self, state: State, new: int, others: Claim) -> bool:
        """Whether it costs less that `new` requests catch up now, (b), than that they follow, (a)."""
        here = len(state.suspended) + len(state.waiting) + others.requests
        left = len(state.waiting) - new
        return self._gain(self._value(state), stack_of(state.suspended), new, here=here, left=left) > 0.0

    def _gain(self, value: GreedyValue, stack: Stack, new: int, *, here: int, left: int) -> float:
        """The cost saved if `new` requests catch up, s; `here` are in the system, `left` wait besides the new ones."""
        follow = value.cost(here, left + new, self.lazy.completion_time(stack))
        return follow - value.cost(here, left, self.lazy.completion_time(stack, new))

    def _worth_stopping(self, state: State, size: int) -> bool:
        """Whether a batch that starts costs less stage by stage than in one launch."""
        profile = self.lazy.profile
        longer, whole = profile.span(size), profile.service_time(size)
        if longer <= _EQUAL * whole or size == profile.max_batch_size:
            return longer <= _EQUAL * whole
        value, left = self._value(state), len(state.waiting) - size
        worth, no_arrival_yet = 0.0, 1.0
        for stage in range(1, profile.stages):
            expected = value.rate * profile.span(size, stage - 1, stage)
            new = min(max(1, ceil(expected - 0.5)), profile.max_batch_size - size)
            gain = self._gain(value, [(stage, size)], new, here=size + left + new, left=left)
            worth += no_arrival_yet * (1.0 - exp(-expected)) * max(gain, 0.0)
            no_arrival_yet *= exp(-expected)
        return worth > value.cost(size + left, left, longer) - value.cost(size + left, left, whole)

    def _value(self, state: State) -> GreedyValue:
        rate = state.arrival_rate
        return self.lines[min(bisect_left(self.rates, rate), len(self.lines) - 1)].value(rate)


def catch_up(profile: Profile, predicted: int | None = None) -> CatchUp:
    """The rule for a model with this profile, by stage; `predicted` as in LazyBatching."""
    lazy = LazyBatching(profile, "remaining", predicted)
    times = [profile.span(b, 0, lazy.stages) for b in range(1, profile.max_batch_size + 1)]
    rates = list(accumulate((b / time for b, time in enumerate(times, 1)), max))
    lines = tuple(_line(times, b, rates[-1]) for b in range(1, len(times) + 1))
    return CatchUp(lazy, tuple(rates), lines)


def _line(times: Sequence[float], size: int, capacity: float) -> Line:
    """Fit the times, s, from `size`, or from half the largest, to about twice the size."""
    first, last = min(size, (len(times) + 1) // 2), min(2 * size + 4, len(times))
    fit = fit_affine(range(first, last + 1), times[first - 1 : last])
    slope = max(fit.slope, 0.0)
    return Line(slope, max(fit.intercept, 0.0), _STEADY / max(slope, 1.0 / capacity))


CATCH_UP = Rule(
    name="catch-up",
    build=lambda spec, profile: catch_up(*staged_profile(spec, profile)),
    keys=frozenset({"slo_ms", "timesteps"}),
    needs_stages=True,
    per_bin=False,
    description="Experimental. Launches stage by stage, or whole batches where stopping costs more than it may gain. "
    "Between stages new requests go first where it pays and all requests can be answered within {slo_ms} ms; they "
    "catch up and are merged. It pays where stages add little overhead: at low load if a further request costs little "
    "time, at half load if it costs a third or more of a batch's fixed time.",
    example="catch-up:slo_ms=60",
)
