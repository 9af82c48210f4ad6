"""The batching SMDP with the age of the oldest request in the state: when to launch, for a share of the response times.

Source: this project's own derivation; research/papers.md, section "Beyond the papers". Symbols as in model.py, and

| symbol   | name here   | meaning, unit                                                                      |
|----------|-------------|------------------------------------------------------------------------------------|
| t        | limit       | response time within which a share of the requests has to be answered, s           |
| x        | age, node   | age of the oldest waiting request, s                                               |
| tau(n)   | max_age     | with n waiting, launch all (at most B_max) once the oldest is this old, s          |
| U(b)     | bias[b - 1] | relative value at the start of a batch of b that leaves no request waiting         |
| W(r, y)  | bias        | the same for a full batch that leaves r requests waiting, the oldest of them y old |

**State.** At an idle device the state is (n, x). The ages of the other n - 1 requests are uniform on (0, x): since
service is first come, first served, they are the Poisson arrivals of that time. This is exact as long as the queue was
empty at the start of the last batch and tau does not increase in n. A launch makes late, in the mean,

    late(n, x) = S_n(t - x) + (n - 1) / x * integral of S_n(t - a) over a in (0, x),      S_n(z) = P(G_n > z).

At an arrival one of these n - 1 requests is 0 old instead.

**Waiting.** V(n, x) is launch(n, x) = late costs + U(n) in the launch region. Elsewhere, with a step d to the next age,

    V(n, x) = exp(-lambda d) V(n, x + d) + integral of lambda exp(-lambda u) V(n + 1, x + u) over u in (0, d)
              + (holding cost of n - g) (1 - exp(-lambda d)) / lambda.

V(n + 1, .) is linear between ages. A chain is that of launches at once, which is calculated once, and what waiting
adds: one backward sweep over the ages and numbers that wait gives V - launch as coefficients of U, of g and of the
costs. Above the largest number that waits at some age there is nothing to calculate.

**Service.** The probability that a batch of b ends with k waiting, the oldest of them aged within dx, is

    lambda Poisson(k - 1; lambda x) D_b(x) dx,      D_b(x) = E[exp(-lambda (G_b - x)); G_b > x].

    U(b) = charges - g l(b) + sum over k of integral of V(k, x) times that + P(none) (V(1, 0) - g / lambda).

**Queues above B_max.** The oldest B_max are launched at once, and r requests remain, the oldest of them y old. With k
arrivals in the service time G, of which the mean given k is used, n = r + k wait and the oldest is G + y old. The cost
of a launch at once takes the ages of the r and the k as uniform on (G, G + y) and (0, G). A wait continues as V(n, x).
The age y of what remains of k arrivals is the mean of its order statistic, spread over two neighbouring grid values.

No policy changes the transitions between the states W, so these are eliminated once. Averages of a policy follow from
one linear system in U(1..B_max) and g.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from policies.solver.distributions import Floats, Ints
from policies.solver.model import LAUNCHES, POWER, RESPONSE, Model, Problem, build_model

Region = NDArray[np.bool_]  # (B_max, ages): whether n requests are launched at an age of the oldest

LATE = 3  # the first column of late requests, after RESPONSE, POWER, LAUNCHES; one for each limit
CAP = 2.0  # times the largest limit: at this age, or the longest service time if that is more, any queue is launched
_FINE = 100  # ages within the longest service time, at least
_COARSE = 120  # ages from there to the cap
_STEP = 0.25  # mean arrivals between two ages within the longest service time, at most, up to a B_max of _JUMPS
_JUMPS = 128  # batch sizes whose jumps have ages of their own: with larger B_max one in two, three, ...
_SIDE = 1e-8  # distance of the two ages around a jump, as a share of the cap
_NARROW = 1e-5  # of the largest age; cells narrower than this have a constant density
_EXPONENTS = 500.0  # exp(-500) is still a normal number
_REACH = 14.0  # the overflow is cut where its probability has fallen by about exp(-14)
_NEGLIGIBLE = 1e-12  # smaller probabilities of a number of arrivals with requests remaining are neglected
_MOST = 300  # requests of the overflow, at most
_STATES = 900  # W, at most
_WIDTHS = 6  # ages of the oldest of r remaining requests, at most
_SPREAD = 2.0  # these are within this many standard deviations of the time in which r requests arrive


class Overflow(NamedTuple):
    """Service completions after which at most B_max requests wait, some of them since before the service.

    Attributes:
        first: index of the first completion with n waiting, by n - 1, then their number.
        state: index of W.
        weight: its probability, with this number of arrivals.
        node: index of the last age at most that of the oldest.
        part: position between this age and the next, from 0 to 1.
        correction: late requests of a launch at once, less those of uniform ages; (entries, limits).
    """

    first: Ints
    state: Ints
    weight: Floats
    node: Ints
    part: Floats
    correction: Floats


class Chain(NamedTuple):
    """The Markov chain of the launches that leave no request waiting, by their size.

    Attributes:
        transitions: (B_max, B_max).
        costs: mean costs until the next of these launches, (B_max, 3 + limits).
        times: mean time until then, s; (B_max,).
    """

    transitions: Floats
    costs: Floats
    times: Floats


class Steps(NamedTuple):
    """The steps d from each age to the next.

    Attributes:
        stay: exp(-lambda d), the probability of no arrival.
        sooner: weight of the value at the age where the step begins, of an arrival in it.
        later: the same at the age where it ends.
        idle: mean time until an arrival or the end of the step, s.
    """

    stay: Floats
    sooner: Floats
    later: Floats
    idle: Floats


@dataclass(frozen=True, eq=False)
class Ages:
    """The ages, and what does not depend on requests that wait while a full batch runs.

    Attributes:
        model: the model by queue length.
        limits: t, s; one or several.
        ages: the ages x, ascending from 0, s; (ages,).
        capped: index of the cap, from which on all requests are launched.
        late: late(n, x) by limit, n - 1 and age, for ages uniform on (0, x).
        late_at_arrival: the same where the youngest request has just arrived.
        after: probability density of k waiting with the oldest aged x at the end of a service, as weights: the
            probability of (k, x) after a batch of b is ends[b - 1, x] * after[k - 1, x]; (B_max, ages).
        ends: see `after`; (B_max, ages).
        idle: probability that no request arrives during a batch of b; (B_max,).
    """

    model: Model
    limits: tuple[float, ...]
    ages: Floats
    capped: int
    late: Floats
    late_at_arrival: Floats
    after: Floats
    ends: Floats
    idle: Floats

    @cached_property
    def steps(self) -> Steps:
        """Those between the ages; (ages - 1,) each."""
        rate = self.model.arrival_rate
        arrivals = rate * np.diff(self.ages)
        stay = np.exp(-arrivals)
        later = later_weight(arrivals, stay)
        return Steps(stay, 1.0 - stay - later, later, (1.0 - stay) / rate)


@dataclass(frozen=True, eq=False)
class AgeModel(Ages):
    """The model in arrays.

    Attributes:
        overflow: completions with requests that waited since before the service.
        visits: mean visits of each W before the next U, after a batch of b; (B_max, W).
        at_once: the chain if every queue is launched at once.
    """

    overflow: Overflow
    visits: Floats
    at_once: Chain


def build_age_model(problem: Problem, limits: tuple[float, ...]) -> AgeModel:
    """Build the arrays for limits of the response time, s.

    Raises:
        SpecError: the problem is malformed.
    """
    model = build_model(problem)
    ages = _ages(model, limits)
    sizes = np.arange(1, model.max_batch_size + 1)
    rate, times, service = model.arrival_rate, model.service_times, model.service
    counted = sizes[:, None]
    tails = [service.tail(times, counted, limit - ages) for limit in limits]
    fresh = [service.tail(times, counted, np.full(1, limit)) for limit in limits]
    survival = np.array([tail[0] for tail in tails])
    share = np.array([_mean_of_tails(*each, ages) for each in zip(fresh, tails, strict=True)])
    late = survival + (counted - 1) * share
    late_at_arrival = survival + np.maximum(counted - 2, 0) * share + (counted > 1) * np.array([f[0] for f in fresh])
    reach = _reach(model)
    probabilities = service.arrival_probabilities(rate, times, len(sizes) + reach + 2)
    probabilities[:, -2] += np.maximum(1.0 - probabilities.sum(axis=1), 0.0)  # more arrivals than considered
    ends = service.quiet_tail(rate, times, counted, ages)
    after = _after(rate, ages, len(sizes))
    mass = probabilities[:, 1 : len(sizes) + 1].sum(axis=1)
    ends *= (mass / np.maximum((ends @ after.T).sum(axis=1), np.finfo(float).tiny))[:, None]
    capped = int(np.searchsorted(ages, _cap(model, limits)))
    base = Ages(
        model=model,
        limits=limits,
        ages=ages,
        capped=capped,
        late=late,
        late_at_arrival=late_at_arrival,
        after=after,
        ends=ends,
        idle=probabilities[:, 0],
    )
    return _with_overflow(base, probabilities, reach)


def _cap(model: Model, limits: tuple[float, ...]) -> float:
    """Return the age at which a queue is launched whatever its length, s."""
    return max(CAP * max(limits), float(model.service_times.max()))


def _ages(model: Model, limits: tuple[float, ...]) -> Floats:
    """Return the grid of ages: finer within the longest service time, and both sides of every jump.

    Service times that vary by more than a step of the grid have no jumps. Above a B_max of 128 the grid gets coarser in
    proportion, because an arrival matters less. The power for 256 is then up to 0.1 per cent lower than with twice as
    many ages, and than simulated. The grid ends at the cap, or at the oldest age after a service if that is later.
    """
    cap, longest = _cap(model, limits), float(model.service_times.max())
    cv = sqrt(_squared_cv(model))
    middle, last = min(longest * (1.0 + 3.0 * cv), cap), longest * (1.0 + 12.0 * cv)
    coarser = ceil(model.max_batch_size / _JUMPS)
    fine = max(_FINE, ceil(middle * model.arrival_rate / (_STEP * coarser)))
    beyond = np.geomspace(cap, max(last, cap), _COARSE // 4)[1:]
    regular = np.concatenate([np.linspace(0.0, middle, fine + 1), np.linspace(middle, cap, _COARSE), beyond])
    steep = model.service_times[_standard_deviations(model) < middle / fine][::-coarser]
    jumps = np.concatenate([steep, *(limit - steep for limit in limits), limits])
    jumps = jumps[(jumps > 2.0 * _SIDE * cap) & (np.abs(jumps / cap - 1.0) > 2.0 * _SIDE) & (jumps < regular[-1])]
    sides = np.concatenate([jumps - _SIDE * cap, jumps + _SIDE * cap])
    near = np.abs(regular[:, None] - jumps).min(axis=1, initial=cap) < 0.1 * _SIDE * cap
    near[[0, fine + _COARSE]] = False  # 0 and the cap
    return np.unique(np.concatenate([regular[~near], sides]))


def _mean_late(model: Model, limit: float, sizes: Ints, low: Floats, high: Floats) -> Floats:
    """Return the mean of P(a + G_b > t) over ages a uniform on (low, high), s; the arguments are broadcast."""
    younger, older = (model.service.tail(model.service_times, sizes, limit - age) for age in (low, high))
    return _mean_of_tails(younger, older, high - low)


def _mean_of_tails(younger: tuple[Floats, Floats], older: tuple[Floats, Floats], width: Floats) -> Floats:
    """Return the same from the tails at the limit less each end of the ages, that are `width` apart, s."""
    narrow = width <= 1e-9 * float(np.max(width, initial=0.0))
    return np.where(narrow, younger[0], (older[1] - younger[1]) / np.where(narrow, 1.0, width))


def _after(rate: float, ages: Floats, counts: int) -> Floats:
    """Return the integrals of lambda Poisson(k - 1; lambda x) times the hat function of each age; (counts, ages)."""
    k = np.arange(1, counts + 2)[:, None]
    probability = _poisson(k, rate * ages)
    at_least = scipy.special.gammainc(counts + 2, rate * ages) + np.cumsum(probability[::-1], axis=0)[::-1]
    differences, width = np.diff(at_least, axis=1), np.diff(ages)
    mass, moment = differences[:-1], differences[1:] * k[:-1] / rate
    middle = (ages[1:] + ages[:-1]) / 2.0
    low, high = (ages[1:] * mass - moment) / width, (moment - ages[:-1] * mass) / width
    narrow = np.flatnonzero(width < _NARROW * ages[-1])  # differences there are mostly rounding
    low[:, narrow] = high[:, narrow] = _poisson(k[:-1] - 1, rate * middle[narrow]) * rate * width[narrow] / 2.0
    after = np.zeros((counts, len(ages)))
    after[:, :-1] += low
    after[:, 1:] += high
    return np.maximum(after, 0.0)


def _poisson(k: Ints, means: Floats) -> Floats:
    """Return the Poisson probabilities of k arrivals, (counts, means)."""
    return np.asarray(np.exp(scipy.special.xlogy(k, means) - means - scipy.special.gammaln(k + 1.0)))


def _reach(model: Model) -> int:
    """Return the number of requests above B_max that are considered."""
    full = model.max_batch_size
    drain, variance = float(model.drain[full]), float(model.arrivals_variance[full])
    falls = 2.0 * drain / (variance * (1.0 + _squared_cv(model)))  # the queue's tail is about exp(-falls n)
    return min(_MOST, ceil(_REACH / falls) + 4) if falls > 0.0 else _MOST


def _squared_cv(model: Model) -> float:
    """Return the largest squared coefficient of variation of the service times."""
    return float(np.max((_standard_deviations(model) / model.service_times) ** 2))


def _standard_deviations(model: Model) -> Floats:
    """Return the standard deviations of the service times, s; (B_max,)."""
    return np.sqrt(np.maximum(2.0 * model.half_second_moment[1:] - model.service_times**2, 0.0))


def _with_overflow(base: Ages, probabilities: Floats, reach: int) -> AgeModel:
    """Add everything about requests that wait while a full batch runs."""
    model, full = base.model, base.model.max_batch_size
    rate, numbers = model.arrival_rate, np.arange(1, reach + 1)[:, None]
    spread = np.linspace(-_SPREAD, _SPREAD, max(min(_WIDTHS, _STATES // reach), 2))
    widths = np.maximum(numbers + np.sqrt(numbers) * spread, 0.0) / rate
    remaining = np.concatenate([np.zeros(full, dtype=np.intp), np.repeat(numbers, len(spread))])
    oldest = np.concatenate([np.zeros(full), widths.ravel()])
    sizes = np.concatenate([np.arange(1, full + 1), np.full(widths.size, full)])
    likely = probabilities[sizes - 1, :-1] > _NEGLIGIBLE
    likely &= (remaining[:, None] > 0) | (np.arange(likely.shape[1]) > full)
    state, arrived = np.nonzero(likely)
    ended = _Completions(
        state,
        probabilities[sizes[state] - 1, arrived],
        remaining[state],
        arrived,
        (arrived + 1)
        * probabilities[sizes[state] - 1, arrived + 1]
        / (rate * probabilities[sizes[state] - 1, arrived]),  # E[G | k arrivals]
        oldest[state],
        np.clip(remaining[state] + arrived - full, 0, reach),
    )
    late = _overflow_late(base, ended)
    costs = np.zeros((len(sizes), LATE + len(base.limits)))
    costs[:, RESPONSE] = (sizes + remaining) * model.service_times[sizes - 1] + rate * model.half_second_moment[sizes]
    costs[:, POWER] = model.charges[sizes, POWER]
    costs[:, LAUNCHES] = 1.0
    above = remaining[state] + arrived > full
    for limit in range(len(base.limits)):
        np.add.at(costs[:, LATE + limit], state[above], (ended.weight * late[limit])[above])
    transitions = _between_overflows(ended, above, widths, full)
    between = np.eye(len(sizes) - full) - transitions[full:]
    visits = np.asarray(np.linalg.solve(between.T, transitions[:full].T).T, dtype=np.float64)
    overflow, times = _overflow(base, ended, late), model.service_times[sizes - 1]
    at_once = _at_once(base, overflow, visits, costs, times)
    known = {each.name: getattr(base, each.name) for each in fields(base)}
    return AgeModel(**known, overflow=overflow, visits=visits, at_once=at_once)


def _at_once(base: Ages, overflow: Overflow, visits: Floats, costs: Floats, times: Floats) -> Chain:
    """Return the chain if every queue is launched at once, given the costs and times of each launch; U, then W."""
    full = base.model.max_batch_size
    transitions = np.zeros((len(times), full))
    transitions[:full] = base.ends @ base.after.T
    transitions[:full, 0] += base.idle
    number = np.repeat(np.arange(full), np.diff(overflow.first))
    transitions[full + overflow.state, number] = overflow.weight  # each pair occurs once
    low, high = (base.late[:, number, overflow.node + offset] for offset in (0, 1))
    late = (1.0 - overflow.part) * low + overflow.part * high + overflow.correction.T
    for limit in range(len(base.limits)):
        costs[:full, LATE + limit] += base.ends @ (base.after * base.late[limit]).sum(axis=0)
        costs[:full, LATE + limit] += base.idle * base.late_at_arrival[limit, 0, 0]
        costs[full:, LATE + limit] += np.bincount(overflow.state, overflow.weight * late[limit], len(times) - full)
    times = times.copy()
    times[:full] += base.idle / base.model.arrival_rate
    return Chain(*(each[:full] + visits @ each[full:] for each in (transitions, costs, times)))


class _Completions(NamedTuple):
    """Ends of services: after a full batch with requests remaining, or with more than B_max waiting.

    Attributes:
        state: index of the launch.
        weight: probability of this number of arrivals.
        remaining: r, requests that waited during the service.
        arrived: k, requests that arrived in it.
        duration: its mean length given k, s.
        oldest: y, age of the oldest remaining request at the launch, s.
        left: requests that remain after the next launch of B_max, at most the reach.
    """

    state: Ints
    weight: Floats
    remaining: Ints
    arrived: Ints
    duration: Floats
    oldest: Floats
    left: Ints

    @property
    def age(self) -> Floats:
        """The age of the oldest request that remained, s."""
        return self.duration + self.oldest

    @property
    def next_oldest(self) -> Floats:
        """The mean age of the oldest request that remains after the next launch, s."""
        fresh = self.duration * self.left / (self.arrived + 1)
        older = self.duration + self.oldest * (self.left - self.arrived) / np.maximum(self.remaining, 1)
        return np.where(self.left <= self.arrived, fresh, older)


def _between_overflows(ended: _Completions, above: Region, widths: Floats, full: int) -> Floats:
    """Return the probabilities from each launch to a launch of B_max with requests remaining; (states, W)."""
    transitions = np.zeros((full + widths.size, widths.size))
    state, number, wanted = ended.state[above], ended.left[above] - 1, ended.next_oldest[above]
    index = np.clip((widths[number] <= wanted[:, None]).sum(axis=1) - 1, 0, widths.shape[1] - 2)
    low, high = widths[number, index], widths[number, index + 1]
    part = np.clip((wanted - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
    for offset, share in ((0, 1.0 - part), (1, part)):
        np.add.at(transitions, (state, number * widths.shape[1] + index + offset), share * ended.weight[above])
    return transitions


def _overflow(base: Ages, ended: _Completions, late: Floats) -> Overflow:
    """Return the completions with at most B_max requests waiting, some of which remained."""
    full = base.model.max_batch_size
    number = ended.remaining + ended.arrived
    chosen = np.flatnonzero((ended.remaining > 0) & (number <= full))
    chosen = chosen[np.argsort(number[chosen], kind="stable")]
    number, age = number[chosen], ended.age[chosen]
    node = np.clip(np.searchsorted(base.ages, age, side="right") - 1, 0, len(base.ages) - 2)
    low, high = base.ages[node], base.ages[node + 1]
    part = np.clip((age - low) / (high - low), 0.0, 1.0)
    uniform = (1.0 - part) * base.late[:, number - 1, node] + part * base.late[:, number - 1, node + 1]
    first = np.searchsorted(number, np.arange(1, full + 2))
    return Overflow(first, ended.state[chosen] - full, ended.weight[chosen], node, part, (late[:, chosen] - uniform).T)


def _overflow_late(base: Ages, ended: _Completions) -> Floats:
    """Return the mean number of late requests of a launch at once, by limit and completion."""
    model = base.model
    launched = np.minimum(ended.remaining + ended.arrived, model.max_batch_size)
    sizes, split = np.maximum(launched, 1), ended.remaining > launched
    old = np.minimum(ended.remaining, launched)
    youngest_old = np.where(split, ended.next_oldest, ended.duration)
    youngest = np.where(split, 0.0, np.minimum(ended.next_oldest, ended.duration))
    late = []
    for limit in base.limits:
        first = model.service.tail(model.service_times, sizes, limit - ended.age)[0]
        olds = np.maximum(old - 1, 0) * _mean_late(model, limit, sizes, youngest_old, ended.age)
        youngs = (launched - old) * _mean_late(model, limit, sizes, youngest, ended.duration)
        late.append((old > 0) * first + olds + youngs)
    return np.array(late)


def chain_of(ages: AgeModel, region: Region) -> Chain:
    """Return the chain of launches under a launch region: that of launches at once, and what waiting adds."""
    count, limits = len(ages.ages), len(ages.limits)
    waiting = ~region
    waiting[-1] = False  # a full batch is launched at once
    until = np.where(waiting.any(axis=1), count - waiting[:, ::-1].argmax(axis=1), 0)  # from this age on all launch
    top = int(np.max(np.flatnonzero(until), initial=-1)) + 2  # the largest launch after a wait
    if top == 1:
        return ages.at_once
    time, response, first_late = top, top + 1, top + 2
    ended = np.zeros((int(until.max()), first_late + limits))
    overflowed = np.zeros((ages.visits.shape[1], first_late + limits))
    value = np.zeros((0, 2 + limits + 1))
    for n in range(top - 1, 0, -1):
        value = _waiting_adds(ages, n, waiting[n - 1 : n + 1], int(until[n - 1]), value)
        ended[: len(value), n - 1 :] += ages.after[n - 1, : len(value), None] * value
        _add_overflow(ages, n, waiting[n - 1], value, overflowed[:, n - 1 :])
    added = ages.ends[:, : len(ended)] @ ended + ages.visits @ overflowed
    if len(value):
        added += ages.idle[:, None] * value[0]
    transitions, costs, times = (each.copy() for each in ages.at_once)
    transitions[:, :top] += added[:, :top]
    times += added[:, time]
    costs[:, RESPONSE] += added[:, response]
    costs[:, LATE:] += added[:, first_late:]
    return Chain(transitions, costs, times)


def _waiting_adds(ages: AgeModel, n: int, waiting: Region, until: int, above: Floats) -> Floats:
    """Return V(n, x) less that of a launch at once, at the ages below `until`, from which on it is 0.

    Args:
        ages: the model.
        n: requests that wait.
        waiting: whether n and n + 1 requests wait, by age.
        until: index of an age.
        above: the result for n + 1.

    Returns:
        One row for each age: coefficients of U(n), U(n + 1), ...; then time, response, late requests.
    """
    columns, rate = above.shape[1], ages.model.arrival_rate
    first_late = columns + 1 - len(ages.limits)
    time, response = first_late - 2, first_late - 1
    value = np.zeros((until, columns + 1))
    if until == 0:
        return value
    steps = min(until, len(ages.ages) - 1)
    stay, sooner, later, idle = (each[:steps] for each in ages.steps)
    shown = slice(steps + 1)
    late = ages.late[:, n - 1, shown]
    late_above = np.where(waiting[1, shown], ages.late[:, n, shown], ages.late_at_arrival[:, n, shown])
    after = np.zeros((steps + 1, columns))
    after[: len(above)] = above[: steps + 1]
    after[:, 0] += 1.0  # U(n + 1)
    after[:, first_late - 1 :] += late_above.T
    np.multiply(later[:, None], after[1:], out=value[:steps, 1:])
    after[:-1] *= sooner[:, None]
    value[:steps, 1:] += after[:-1]
    value[:steps, 0] = stay - 1.0
    value[:steps, time] += idle
    value[:steps, response] += n * idle
    value[:steps, first_late:] += (stay * late[:, 1:] - late[:, :-1]).T
    if until > steps:  # at the last age, too
        value[-1, 1:] = after[-1]
        value[-1, 0] = -1.0
        value[-1, time] += 1.0 / rate
        value[-1, response] += n / rate
        value[-1, first_late:] -= late[:, -1]
    return _accumulated(value, waiting[0, :until], rate * ages.ages[:until])


def _accumulated(added: Floats, waiting: Region, arrivals: Floats) -> Floats:
    """Return v(i) = added(i) + exp(-arrivals(i + 1) + arrivals(i)) v(i + 1) where it waits, else 0; rows by age.

    In each run of waiting, v(i) is a sum over the later ages, of weights that only depend on the distance.
    """
    edges = np.flatnonzero(np.diff(waiting, prepend=False, append=False))
    for start, stop in edges.reshape(-1, 2).tolist():
        end = stop
        while end > start:
            first = max(start, int(np.searchsorted(arrivals, arrivals[end - 1] - _EXPONENTS)))
            run, weights = added[first:end], np.exp(arrivals[first] - arrivals[first:end])[:, None]
            if end < stop:
                run[-1] += np.exp(arrivals[end - 1] - arrivals[end]) * added[end]
            run *= weights
            np.cumsum(run[::-1], axis=0, out=run[::-1])
            run /= weights
            end = first
    added[~waiting] = 0.0
    return added


def _add_overflow(ages: AgeModel, n: int, waiting: Region, value: Floats, added: Floats) -> None:
    """Add the completions after which n requests wait, some of them since before the service."""
    overflow, until = ages.overflow, len(value)
    own = slice(overflow.first[n - 1], overflow.first[n])
    state, weight, node, part, correction = (each[own] for each in overflow[1:])
    waits = np.flatnonzero(node < until)
    state, weight, node, part, correction = (each[waits] for each in (state, weight, node, part, correction))
    following = np.minimum(node + 1, until - 1)  # what waiting adds at the age `until` is 0
    low, high = weight * (1.0 - part), weight * part * (node + 1 < until)
    waited = low * waiting[node] + high * waiting[following]
    added[state] += low[:, None] * value[node] + high[:, None] * value[following]
    added[state, -correction.shape[1] :] -= waited[:, None] * correction


def later_weight(arrivals: Floats, stay: Floats) -> Floats:
    """Return the integral of lambda exp(-lambda u) u / d over (0, d), for lambda d mean arrivals."""
    small = arrivals < 1e-4
    safe = np.where(small, 1.0, arrivals)
    return np.where(small, arrivals / 2.0, (1.0 - stay * (1.0 + arrivals)) / safe)


def averages_of(ages: AgeModel, chain: Chain) -> tuple[Floats, Floats]:
    """Return the averages of a chain and the relative values (bias) U(1..B_max), for each cost.

    The averages are the mean response time (s), mean power (W), launches (1/s) and the shares of late requests;
    (3 + limits,) and (B_max, 3 + limits).
    """
    matrix = np.eye(len(chain.times)) - chain.transitions
    matrix[:, 0] = chain.times
    solved: Floats = np.asarray(np.linalg.solve(matrix, chain.costs), dtype=np.float64)
    average = solved[0].copy()
    solved[0] = 0.0
    average[RESPONSE] /= ages.model.arrival_rate
    average[LATE:] /= ages.model.arrival_rate
    return average, solved


def improved(ages: AgeModel, bias: Floats, gain: float, holding: float, prices: Floats) -> Region:
    """Return the launch region of least cost, given relative values: one sweep with the minimum.

    Args:
        ages: the model.
        bias: U(1..B_max) by total cost; (B_max,).
        gain: average cost per second.
        holding: cost of a request in the system per second.
        prices: of a late request, by limit.
    """
    model, full = ages.model, ages.model.max_batch_size
    rate, (stay, sooner, later, idle) = model.arrival_rate, ages.steps
    launch, at_arrival = (
        bias[:, None] + sum(price * each for price, each in zip(prices, late, strict=True))
        for late in (ages.late, ages.late_at_arrival)
    )
    region = np.ones(launch.shape, dtype=np.bool_)
    numbers = np.arange(1, full)[:, None]
    waits = sooner * at_arrival[1:, :-1] + later * at_arrival[1:, 1:] + (numbers * holding - gain) * idle
    better = stay * launch[:-1, 1:] + waits < launch[:-1, :-1]
    better[:, ages.capped :] = False
    better[: model.min_batch_size - 1] = True
    highest = int(np.max(np.flatnonzero(better.any(axis=1)), initial=-1)) + 1
    above = at_arrival[highest]
    for n in range(highest, 0, -1):
        waits = sooner * above[:-1] + later * above[1:] + (n * holding - gain) * idle
        now, forbidden = launch[n - 1], n < model.min_batch_size
        if forbidden:
            until, value = len(waits), float(above[-1] + (n * holding - gain) / rate)
        else:  # where one step does not pay at this age and all later ones, no wait does
            pays = np.flatnonzero((stay * now[1:] + waits < now[:-1])[: ages.capped])
            until = int(pays[-1]) + 1 if len(pays) else 0
            value = float(now[until])
        values, waiting = _least(stay[:until], waits[:until], now[:until], value, forbidden)
        region[n - 1, :until] = ~waiting
        region[n - 1, until:] = not forbidden
        above = at_arrival[n - 1].copy()
        above[:until] = np.where(waiting, values, above[:until])
        if forbidden:
            above[until:] = value
    return region


def _least(stay: Floats, waits: Floats, now: Floats, value: float, forbidden: bool) -> tuple[Floats, Region]:
    """Return the least of launching now and waiting, and whether waiting is it, by age, from `value` after the last."""
    if len(now) == 0:
        return now, np.zeros(0, dtype=np.bool_)
    band = np.ones((2, len(now)))
    band[0, 1:] = -stay[:-1]
    waits = waits.copy()
    waits[-1] += stay[-1] * value
    values: Floats = scipy.linalg.solve_banded((0, 1), band, waits, check_finite=False)
    if forbidden or (values < now).all():  # a wait pays at all these ages
        return values, np.ones(len(now), dtype=np.bool_)
    chosen, waiting = now.tolist(), np.zeros(len(now), dtype=np.bool_)
    steps = list(zip(stay.tolist(), waits.tolist(), strict=True))
    value = 0.0  # it is counted in the last wait
    for i in range(len(now) - 1, -1, -1):
        value = steps[i][0] * value + steps[i][1]
        if value < chosen[i]:
            waiting[i], chosen[i] = True, value
        value = chosen[i]
    return np.array(chosen), waiting
