"""Catch-up: LazyBatching that preempts only when it pays.

LazyBatching preempts whenever the slack allows, so that under load everybody is held up by those who come after him.
Here, at each stage boundary at which somebody waits and the slack (remaining times) allows, two ways are compared:

    (a) those in flight ride to the end, after t_a, and whoever waits or comes until then follows;
    (b) n newcomers catch up and all ride together to the end, after t_b; the rest follows.

From then on either way is counted as if greedy decided. Service that then takes l(b) = c + a b and arrivals of rate
lambda give greedy's relative value h(n), of n waiting when the device is free, and its gain g, the mean number in the
system. Both follow from h(n) = n l(n) + lambda l(n)^2 / 2 - g l(n) + E[h(N)], N Poisson of mean lambda l(n): those who
wait, those who come meanwhile, and the queue they leave. A quadratic solves it, h(n) = alpha n^2 + beta n with

    alpha = a (1 + lambda a / 2) / (1 - (lambda a)^2)
    beta  = u - g v,  u = (c (1 + lambda a) + lambda a alpha (1 + 2 lambda c)) / (1 - lambda a),  v = a / (1 - lambda a)
    g     = lambda (c / 2 + alpha (1 + lambda c) + u) / (1 + lambda v)

exactly, but for two things: it lets no batch be too large, and an idle device serve an empty batch. Where service times
are no line, the line is theirs from the size whose service keeps up with the arrivals, around which greedy's batches
settle, to about twice that size. A way of t during which m requests are here, and after which `left` of them still
wait, then costs

    m t + lambda t^2 / 2 - g t + E[h(left + N)],  N Poisson of mean lambda t

and the way of less cost is taken. That is one step of policy improvement from greedy, made anew at each boundary, which
cannot be worse than greedy for Poisson arrivals and a known rate. With lambda = 0 it is the plain sum of everybody's
time to completion, with nobody to come.

Stage by stage a batch takes longer than in one launch (`Profile.stage_overhead`). It is launched whole where the chance
to let newcomers catch up is worth less than that: the sum, over the boundaries, of the probability that the first
newcomers come just before one, times what their catching up then gains.

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
from policies.rules.lazy_batching import NOBODY, Claim, LazyBatching, Stack, stack_of
from policies.types import Action, Launch, State, Wait

_EQUAL = 1.0 + 1e-9  # times that differ by less, by rounding, are the same
_STEADY = 0.97  # load beyond which greedy has no relative value, or one too large to compare by


@dataclass(frozen=True, slots=True)
class GreedyValue:
    """What greedy makes of a queue: h(n) = quadratic n^2 + linear n, beside a mean number in the system.

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
        """Of `time` (s) with so many here, of whom `left` still wait after it: summed times in the system, s."""
        come = self.rate * time
        mean = left + come
        after = self.quadratic * (mean * mean + come) + self.linear * mean
        return (here + come / 2 - self.gain) * time + after


def greedy_value(slope: float, intercept: float, rate: float) -> GreedyValue:
    """Of greedy for service times intercept + slope b, s, and Poisson arrivals; slope x rate is below 1."""
    load = rate * slope
    quadratic = slope * (1 + load / 2) / (1 - load * load)
    fixed = (intercept * (1 + load) + load * quadratic * (1 + 2 * rate * intercept)) / (1 - load)
    by_gain = slope / (1 - load)
    gain = rate * (intercept / 2 + quadratic * (1 + rate * intercept) + fixed) / (1 + rate * by_gain)
    return GreedyValue(rate, quadratic, fixed - gain * by_gain, gain)


@dataclass(frozen=True, slots=True)
class Line:
    """Service times as intercept + slope b, s, and the highest arrival rate that they are looked at with, 1/s."""

    slope: float
    intercept: float
    highest: float

    def value(self, arrival_rate: float) -> GreedyValue:
        """Of greedy at this rate, 1/s."""
        return greedy_value(self.slope, self.intercept, min(arrival_rate, self.highest))


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Preempts when the slack allows and it pays.

    Attributes:
        lazy: LazyBatching, whose slack it keeps.
        rates: arrival rate with which batches of 1, 2, ... or smaller ones keep up, 1/s.
        lines: service times of all stages, by the size that keeps up.
    """

    lazy: LazyBatching
    rates: Sequence[float]
    lines: Sequence[Line]

    def decide(self, state: State, /) -> Action:
        """A sub-batch, for one stage or all of them; never waits."""
        return self.turn(state, NOBODY) or Wait()

    def turn(self, state: State, others: Claim) -> Launch | None:
        """As LazyBatching; but only as many newcomers as can ride along, and only where that pays."""
        launch = self.lazy.turn(state, others)
        if launch is None or launch.requests[0].stage:
            return launch
        if not state.suspended:
            whole = not others.requests and not self._worth_stopping(state, len(launch.requests))
            return replace(launch, stages=None) if whole else launch
        newcomers = min(len(launch.requests), self.lazy.profile.max_batch_size - len(state.suspended))
        if newcomers <= 0 or not self._pays(state, newcomers, others):
            return self.lazy.resume(state)
        return replace(launch, requests=launch.requests[:newcomers])

    def claim(self, state: State) -> Claim:
        """As LazyBatching's."""
        return self.lazy.claim(state)

    def due(self, state: State) -> float:
        """As LazyBatching's."""
        return self.lazy.due(state)

    def _pays(self, state: State, newcomers: int, others: Claim) -> bool:
        """Whether so many newcomers had better catch up now, (b), than follow, (a)."""
        here = len(state.suspended) + len(state.waiting) + others.requests
        left = len(state.waiting) - newcomers
        return self._gain(self._value(state), stack_of(state.suspended), newcomers, (here, left)) > 0.0

    def _gain(self, value: GreedyValue, stack: Stack, newcomers: int, crowd: tuple[int, int]) -> float:
        """What it saves that newcomers catch up, s; crowd: how many are here, and how many wait besides them."""
        here, left = crowd
        follow = value.cost(here, left + newcomers, self.lazy.ride(stack))
        return follow - value.cost(here, left, self.lazy.ride(stack, newcomers))

    def _worth_stopping(self, state: State, size: int) -> bool:
        """Whether a batch that starts is worth more stage by stage than in one launch."""
        profile = self.lazy.profile
        longer, whole = profile.span(size), profile.service_time(size)
        if longer <= _EQUAL * whole or size == profile.max_batch_size:
            return longer <= _EQUAL * whole
        value, left = self._value(state), len(state.waiting) - size
        worth, nobody_yet = 0.0, 1.0
        for stage in range(1, profile.stages):
            expected = value.rate * profile.span(size, stage - 1, stage)
            newcomers = min(max(1, ceil(expected - 0.5)), profile.max_batch_size - size)
            gain = self._gain(value, [(stage, size)], newcomers, (size + left + newcomers, left))
            worth += nobody_yet * (1.0 - exp(-expected)) * max(gain, 0.0)
            nobody_yet *= exp(-expected)
        return worth > value.cost(size + left, left, longer) - value.cost(size + left, left, whole)

    def _value(self, state: State) -> GreedyValue:
        rate = state.arrival_rate
        return self.lines[min(bisect_left(self.rates, rate), len(self.lines) - 1)].value(rate)


def catch_up(profile: Profile, predicted: int | None = None) -> CatchUp:
    """For a model with this profile, by stage; `predicted` as LazyBatching's."""
    lazy = LazyBatching(profile, "remaining", predicted)
    times = [profile.span(b, 0, lazy.stages) for b in range(1, profile.max_batch_size + 1)]
    rates = list(accumulate((b / time for b, time in enumerate(times, 1)), max))
    lines = tuple(_line(times, b, rates[-1]) for b in range(1, len(times) + 1))
    return CatchUp(lazy, tuple(rates), lines)


def _line(times: Sequence[float], size: int, capacity: float) -> Line:
    """Through the times, s, from that size on, or from half the largest, to about twice the size."""
    first, last = min(size, (len(times) + 1) // 2), min(2 * size + 4, len(times))
    fit = fit_affine(range(first, last + 1), times[first - 1 : last])
    slope = max(fit.slope, 0.0)
    return Line(slope, max(fit.intercept, 0.0), _STEADY / max(slope, 1.0 / capacity))
