"""Catch-up: LazyBatching that preempts only if the expected cost is lower.

LazyBatching preempts whenever the slack allows, so under load the batch in flight is delayed again and again by later
arrivals. Here two actions are compared at each stage boundary with waiting requests and enough slack (remaining times):

    (a) the requests in flight run to the end, after t_a; waiting requests and arrivals until then follow;
    (b) n new requests catch up and all run merged to the end, after t_b; the other requests follow.

After either action greedy is assumed to decide. With service times l(b) = c + a b and arrivals of rate lambda, greedy
has a relative value h(n) of n waiting requests at a free device, and a gain g, the mean number in the system. Both
follow from h(n) = n l(n) + lambda l(n)^2 / 2 - g l(n) + E[h(N)], N Poisson of mean lambda l(n). The terms are the
waiting requests, the arrivals during service, and the queue after it. The solution is a quadratic,
h(n) = alpha n^2 + beta n with

    alpha = a (1 + lambda a / 2) / (1 - (lambda a)^2)
    beta  = u - g v,  u = (c (1 + lambda a) + lambda a alpha (1 + 2 lambda c)) / (1 - lambda a),  v = a / (1 - lambda a)
    g     = lambda (c / 2 + alpha (1 + lambda c) + u) / (1 + lambda v)

The solution is exact if batches have no maximum size and an idle device serves an empty batch. Service times that are
not affine are fitted by a line. Greedy's batches have about the size whose throughput equals the arrival rate, so the
fit is from that size to about twice that size. An action of duration t, during which m requests are in the system and
after which r of them still wait, costs

    m t + lambda t^2 / 2 - g t + E[h(r + N)],  N Poisson of mean lambda t

and the action of lower cost is taken. That is one step of policy improvement from greedy, repeated at each boundary,
which cannot be worse than greedy for Poisson arrivals and a known rate. With lambda = 0 it is the sum of all requests'
times to completion.

Stage by stage a batch takes longer than in one launch (`Profile.stage_overhead`), but new requests can be merged. The
expected saving by a merge is a sum over the stage boundaries: the probability that the first arrivals come in the stage
before the boundary, times the saving by merging them there. If the sum is below the cost of the overhead, the batch is
run in one launch.

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
from policies.rules.lazy_batching import NO_CLAIM, Claim, LazyBatching, Stack, check_stages, stack_of
from policies.rules.rule import Rule
from policies.spec import Spec
from policies.traits import StepPolicy
from policies.types import Action, Launch, State, Wait

_EQUAL = 1.0 + 1e-9  # times that differ by less, by rounding, are the same
_MAX_LOAD = 0.97  # beyond it greedy has no relative value, or one too large to compare with


@dataclass(frozen=True, slots=True)
class GreedyValue:
    """Greedy's relative value of n waiting requests, h(n) = quadratic n^2 + linear n, and its gain.

    Attributes:
        rate: arrival rate, 1/s.
        quadratic: alpha, s.
        linear: beta, s.
        gain: g, the mean number in the system.
    """

    rate: float
    quadratic: float
    linear: float
    gain: float

    def cost(self, in_system: int, waiting_after: int, time: float) -> float:
        """Cost of `time` (s) with that many requests in the system, some of which still wait after it, s."""
        arrivals = self.rate * time
        mean = waiting_after + arrivals
        after = self.quadratic * (mean * mean + arrivals) + self.linear * mean
        return (in_system + arrivals / 2 - self.gain) * time + after


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
    """Service times as intercept + slope b, s, and the maximum arrival rate at which they are evaluated, 1/s."""

    slope: float
    intercept: float
    max_rate: float

    def value(self, arrival_rate: float) -> GreedyValue:
        """Greedy's value at this rate, 1/s."""
        return greedy_value(self.slope, self.intercept, min(arrival_rate, self.max_rate))


@dataclass(frozen=True, slots=True)
class CatchUp(StepPolicy):
    """Preempts if the slack allows it and the expected cost is lower.

    Attributes:
        lazy: LazyBatching, which computes the slack.
        rates: highest arrival rate that batches of up to 1, 2, ... can serve, 1/s.
        lines: affine fits of the service time of all stages, by that batch size.
    """

    lazy: LazyBatching
    rates: Sequence[float]
    lines: Sequence[Line]

    def decide(self, state: State, /) -> Action:
        """Launch a sub-batch, for one stage or all of them; Wait only without requests."""
        return self.next_launch(state, NO_CLAIM) or Wait()

    def next_launch(self, state: State, others: Claim) -> Launch | None:
        """As LazyBatching, but new requests preempt only if they can be merged and the cost is lower."""
        launch = self.lazy.next_launch(state, others)
        if launch is None or launch.requests[0].stage:
            return launch
        if not state.suspended:
            whole = not others.requests and not self._stages_cost_less(state, len(launch.requests))
            return replace(launch, stages=None) if whole else launch
        new = min(len(launch.requests), self.lazy.profile.max_batch_size - len(state.suspended))
        if new <= 0 or not self._preemption_costs_less(state, new, others):
            return self.lazy.resume(state)
        return replace(launch, requests=launch.requests[:new])

    def claim(self, state: State) -> Claim:
        """As LazyBatching's."""
        return self.lazy.claim(state)

    def latest_start(self, state: State) -> float:
        """As LazyBatching's."""
        return self.lazy.latest_start(state)

    def _preemption_costs_less(self, state: State, new: int, others: Claim) -> bool:
        """Whether action (b), `new` requests catch up, costs less than action (a)."""
        in_system = len(state.suspended) + len(state.waiting) + others.requests
        waiting = len(state.waiting) - new
        stack = stack_of(state.suspended)
        return self._saving(self._value(state), stack, new, in_system=in_system, waiting=waiting) > 0.0

    def _saving(self, value: GreedyValue, stack: Stack, new: int, *, in_system: int, waiting: int) -> float:
        """The cost saved if `new` requests catch up, s; `waiting` excludes the new ones."""
        follow = value.cost(in_system, waiting + new, self.lazy.completion_time(stack))
        return follow - value.cost(in_system, waiting, self.lazy.completion_time(stack, new))

    def _stages_cost_less(self, state: State, size: int) -> bool:
        """Whether a new batch costs less stage by stage than in one launch."""
        profile = self.lazy.profile
        staged, whole = profile.span(size), profile.service_time(size)
        if staged <= _EQUAL * whole or size == profile.max_batch_size:
            return staged <= _EQUAL * whole
        value, waiting = self._value(state), len(state.waiting) - size
        saving, no_arrival_yet = 0.0, 1.0
        for stage in range(1, profile.stages):
            expected = value.rate * profile.span(size, stage - 1, stage)
            new = min(max(1, ceil(expected - 0.5)), profile.max_batch_size - size)
            merged = self._saving(value, [(stage, size)], new, in_system=size + waiting + new, waiting=waiting)
            saving += no_arrival_yet * (1.0 - exp(-expected)) * max(merged, 0.0)
            no_arrival_yet *= exp(-expected)
        in_system = size + waiting
        return saving > value.cost(in_system, waiting, staged) - value.cost(in_system, waiting, whole)

    def _value(self, state: State) -> GreedyValue:
        rate = state.arrival_rate
        return self.lines[min(bisect_left(self.rates, rate), len(self.lines) - 1)].value(rate)


def _build(spec: Spec, profile: Profile) -> CatchUp:
    check_stages(spec, profile)
    return catch_up(profile)


def catch_up(profile: Profile, predicted: int | None = None) -> CatchUp:
    """Return the policy for a model with this profile, with stage times; `predicted` as in LazyBatching."""
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
    return Line(slope, max(fit.intercept, 0.0), _MAX_LOAD / max(slope, 1.0 / capacity))


CATCH_UP = Rule(
    name="catch-up",
    build=_build,
    keys=frozenset({"slo_ms"}),
    needs_stages=True,
    per_bin=False,
    description="Experimental. Launches stage by stage, or whole batches if stages cost more than they save. Between "
    "stages new requests go first if that reduces the mean response time and all requests can be answered within "
    "{slo_ms} ms; they catch up and are merged. If stages add little overhead it is faster than greedy: at low load if "
    "a further request takes little time, at half load if it takes at least a third of a batch's fixed time.",
    example="catch-up:slo_ms=60",
)
