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

V(n + 1, .) is linear between ages. One backward sweep gives V as coefficients of U(1..B_max), of g and of the costs.

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

from dataclasses import dataclass, replace
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
_STEP = 0.25  # mean arrivals between two ages within the longest service time, at most
_SIDE = 1e-8  # distance of the two ages around a jump, as a share of the cap
_REACH = 14.0  # the overflow is cut where its probability has fallen by about exp(-14)
_NEGLIGIBLE = 1e-12  # smaller probabilities of a number of arrivals with requests remaining are neglected
_MOST = 300  # requests of the overflow, at most
_STATES = 900  # W, at most
_WIDTHS = 6  # ages of the oldest of r remaining requests, at most
_SPREAD = 2.0  # these are within this many standard deviations of the time in which r requests arrive


class Overflow(NamedTuple):
    """Service completions after which at most B_max requests wait, some of them since before the service.

    Attributes:
        state: index of W.
        weight: its probability, with this number of arrivals.
        node: index of the last age at most that of the oldest.
        part: position between this age and the next, from 0 to 1.
        correction: late requests of a launch at once, less those of uniform ages; (entries, limits).
    """

    state: Ints
    weight: Floats
    node: Ints
    part: Floats
    correction: Floats


@dataclass(frozen=True, eq=False)
class AgeModel:
    """The model in arrays.

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
        overflow: completions with n waiting, some of them since before the service; by n - 1.
        visits: mean visits of each W before the next U, after a batch of b; (B_max, W).
        costs: RESPONSE, POWER, LAUNCHES and LATE that no policy changes; U(1..B_max), then W.
        times: mean service time, s; U(1..B_max), then W.
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
    overflow: tuple[Overflow, ...]
    visits: Floats
    costs: Floats
    times: Floats


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


def build_age_model(problem: Problem, limits: tuple[float, ...]) -> AgeModel:
    """Build the arrays for limits of the response time, s.

    Raises:
        SpecError: the problem is malformed.
    """
    model = build_model(problem)
    ages = _ages(model, limits)
    sizes = np.arange(1, model.max_batch_size + 1)
    rate, times, service = model.arrival_rate, model.service_times, model.service
    survival = np.array([service.tail(times, sizes[:, None], limit - ages)[0] for limit in limits])
    fresh = np.array([service.tail(times, sizes, np.array(limit))[0] for limit in limits])[:, :, None]
    share = np.array([_mean_late(model, limit, sizes[:, None], np.zeros(1), ages) for limit in limits])
    counted = sizes[:, None]
    late = survival + (counted - 1) * share
    late_at_arrival = survival + np.maximum(counted - 2, 0) * share + (counted > 1) * fresh
    reach = _reach(model)
    probabilities = service.arrival_probabilities(rate, times, len(sizes) + reach + 2)
    probabilities[:, -2] += np.maximum(1.0 - probabilities.sum(axis=1), 0.0)  # more arrivals than considered
    ends = service.quiet_tail(rate, times, counted, ages)
    after = _after(rate, ages, len(sizes))
    mass = probabilities[:, 1 : len(sizes) + 1].sum(axis=1)
    ends *= (mass / np.maximum((ends @ after.T).sum(axis=1), np.finfo(float).tiny))[:, None]
    capped = int(np.searchsorted(ages, _cap(model, limits)))
    base = AgeModel(
        *(model, limits, ages, capped, late, late_at_arrival, after, ends, probabilities[:, 0], ()),
        *(np.zeros((0, 0)), np.zeros((0, 0)), np.zeros(0)),
    )
    return _with_overflow(base, probabilities, reach)


def _cap(model: Model, limits: tuple[float, ...]) -> float:
    """Return the age at which a queue is launched whatever its length, s."""
    return max(CAP * max(limits), float(model.service_times.max()))


def _ages(model: Model, limits: tuple[float, ...]) -> Floats:
    """Return the grid of ages: finer within the longest service time, and both sides of every jump.

    It ends at the cap, or at the oldest age after a service if that is later.
    """
    cap, longest = _cap(model, limits), float(model.service_times.max())
    cv = sqrt(max(_squared_cv(model), 0.0))
    middle, last = min(longest * (1.0 + 3.0 * cv), cap), longest * (1.0 + 12.0 * cv)
    fine = max(_FINE, ceil(middle * model.arrival_rate / _STEP))
    beyond = np.geomspace(cap, max(last, cap), _COARSE // 4)[1:]
    regular = np.concatenate([np.linspace(0.0, middle, fine + 1), np.linspace(middle, cap, _COARSE), beyond])
    jumps = np.concatenate([model.service_times, *(limit - model.service_times for limit in limits), limits])
    jumps = jumps[(jumps > 2.0 * _SIDE * cap) & (np.abs(jumps / cap - 1.0) > 2.0 * _SIDE) & (jumps < regular[-1])]
    sides = np.concatenate([jumps - _SIDE * cap, jumps + _SIDE * cap])
    near = np.abs(regular[:, None] - jumps).min(axis=1, initial=cap) < 0.1 * _SIDE * cap
    near[[0, fine + _COARSE]] = False  # 0 and the cap
    return np.unique(np.concatenate([regular[~near], sides]))


def _mean_late(model: Model, limit: float, sizes: Ints, low: Floats, high: Floats) -> Floats:
    """Return the mean of P(a + G_b > t) over ages a uniform on (low, high), s; the arguments are broadcast."""
    times, service = model.service_times, model.service
    width = high - low
    narrow = width <= 1e-9 * limit
    at_least = service.tail(times, sizes, limit - high)
    at_most = service.tail(times, sizes, limit - low)
    mean = (at_least[1] - at_most[1]) / np.where(narrow, 1.0, width)
    return np.where(narrow, at_most[0], mean)


def _after(rate: float, ages: Floats, counts: int) -> Floats:
    """Return the integrals of lambda Poisson(k - 1; lambda x) times the hat function of each age; (counts, ages)."""
    k = np.arange(1, counts + 1)[:, None]
    mass = np.diff(scipy.special.gammainc(k, rate * ages), axis=1)
    moment = np.diff(scipy.special.gammainc(k + 1, rate * ages), axis=1) * k / rate
    width = np.diff(ages)
    after = np.zeros((counts, len(ages)))
    after[:, :-1] += (ages[1:] * mass - moment) / width
    after[:, 1:] += (moment - ages[:-1] * mass) / width
    return np.maximum(after, 0.0)


def _reach(model: Model) -> int:
    """Return the number of requests above B_max that are considered."""
    full = model.max_batch_size
    drain, variance = float(model.drain[full]), float(model.arrivals_variance[full])
    falls = 2.0 * drain / (variance * (1.0 + _squared_cv(model)))  # the queue's tail is about exp(-falls n)
    return min(_MOST, ceil(_REACH / falls) + 4) if falls > 0.0 else _MOST


def _squared_cv(model: Model) -> float:
    """Return the largest squared coefficient of variation of the service times."""
    return float(np.max(2.0 * model.half_second_moment[1:] / model.service_times**2 - 1.0))


def _with_overflow(base: AgeModel, probabilities: Floats, reach: int) -> AgeModel:
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
    overflow = tuple(_completions_with(base, ended, late, n) for n in range(1, full + 1))
    return replace(base, overflow=overflow, visits=visits, costs=costs, times=model.service_times[sizes - 1])


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


def _completions_with(base: AgeModel, ended: _Completions, late: Floats, n: int) -> Overflow:
    """Return the completions with n requests waiting, some of which remained."""
    chosen = np.flatnonzero((ended.remaining > 0) & (ended.remaining + ended.arrived == n))
    age = ended.age[chosen]
    node = np.clip(np.searchsorted(base.ages, age, side="right") - 1, 0, len(base.ages) - 2)
    low, high = base.ages[node], base.ages[node + 1]
    part = np.clip((age - low) / (high - low), 0.0, 1.0)
    uniform = (1.0 - part) * base.late[:, n - 1, node] + part * base.late[:, n - 1, node + 1]
    state = ended.state[chosen] - base.model.max_batch_size
    return Overflow(state, ended.weight[chosen], node, part, (late[:, chosen] - uniform).T)


def _overflow_late(base: AgeModel, ended: _Completions) -> Floats:
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
    """Return the chain of launches under a launch region: one backward sweep over the ages for each queue length."""
    model, full, limits = ages.model, ages.model.max_batch_size, len(ages.limits)
    rate, step = model.arrival_rate, np.diff(ages.ages)
    stay = np.exp(-rate * step)
    later = later_weight(rate * step, stay)
    sooner = 1.0 - stay - later
    count = len(ages.ages)
    time, response, first_late = full, full + 1, full + 2
    costs, times = ages.costs.copy(), ages.times.copy()
    transitions = np.zeros((len(times), full))
    ended = np.zeros((count, full + 2 + limits))
    above = np.zeros((0, 0))
    value = np.zeros((count, full + 2 + limits))
    for n in range(full, 0, -1):
        launching = region[n - 1]
        columns = slice(n - 1, None)  # those to the left are 0
        value = np.zeros((count, full + 3 + limits - n))
        waits = n < full and not launching.all()  # at some age; else there is nothing to solve
        if waits:
            value[:-1, 1:] = sooner[:, None] * above[:-1] + later[:, None] * above[1:]
            idle = (1.0 - stay) / rate
            value[:-1, time - n + 1] += idle
            value[:-1, response - n + 1] += n * idle
            if not launching[-1]:
                value[-1, 1:] = above[-1]
                value[-1, time - n + 1] += 1.0 / rate
                value[-1, response - n + 1] += n / rate
        value[launching] = 0.0
        value[launching, 0] = 1.0
        value[launching, first_late - n + 1 :] = ages.late[:, n - 1, launching].T
        if waits:
            band = np.ones((2, count))
            band[0, 1:] = np.where(launching[:-1], 0.0, -stay)
            value = scipy.linalg.solve_banded((0, 1), band, value, overwrite_b=True, check_finite=False)
        ended[:, columns] += ages.after[n - 1][:, None] * value
        _add_overflow(ages, n, launching, value, transitions[full:], costs[full:], times[full:])
        above = value.copy()
        above[launching, first_late - n + 1 :] = ages.late_at_arrival[:, n - 1, launching].T
    after = ages.ends @ ended
    after += ages.idle[:, None] * above[0]
    transitions[:full] += after[:, :full]
    times[:full] += after[:, time] + ages.idle / rate
    costs[:full, RESPONSE] += after[:, response]
    costs[:full, LATE:] += after[:, first_late:]
    return Chain(*(each[:full] + ages.visits @ each[full:] for each in (transitions, costs, times)))


def _add_overflow(
    ages: AgeModel, n: int, launching: Region, value: Floats, transitions: Floats, costs: Floats, times: Floats
) -> None:
    """Add the completions after which n requests wait, some of them since before the service."""
    full = ages.model.max_batch_size
    state, weight, node, part, correction = ages.overflow[n - 1]
    at = (weight * (1.0 - part))[:, None] * value[node] + (weight * part)[:, None] * value[node + 1]
    launched = weight * ((1.0 - part) * launching[node] + part * launching[node + 1])
    transitions[state, n - 1 : full] += at[:, : full - n + 1]
    times[state] += at[:, full - n + 1]
    costs[state, RESPONSE] += at[:, full - n + 2]
    costs[state, LATE:] += at[:, full - n + 3 :] + launched[:, None] * correction


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
    rate, step = model.arrival_rate, np.diff(ages.ages)
    stay = np.exp(-rate * step)
    later = later_weight(rate * step, stay)
    sooner, idle = 1.0 - stay - later, (1.0 - stay) / rate
    launch, at_arrival = (
        bias[:, None] + sum(price * each for price, each in zip(prices, late, strict=True))
        for late in (ages.late, ages.late_at_arrival)
    )
    region = np.ones(launch.shape, dtype=np.bool_)
    above = at_arrival[full - 1]
    stays = stay.tolist()
    for n in range(full - 1, 0, -1):
        waits = (sooner * above[:-1] + later * above[1:] + (n * holding - gain) * idle).tolist()
        launches = launch[n - 1].tolist()
        at_cap = above[-1] + (n * holding - gain) / rate
        forbidden = n < model.min_batch_size
        value = at_cap if forbidden else launches[-1]
        values, waiting = [value], [forbidden]
        for i in range(len(stays) - 1, -1, -1):
            value = stays[i] * value + waits[i]
            wait = forbidden or (value < launches[i] and i < ages.capped)
            if not wait:
                value = launches[i]
            values.append(value)
            waiting.append(wait)
        region[n - 1] = ~np.array(waiting[::-1])
        above = np.where(region[n - 1], at_arrival[n - 1], np.array(values[::-1]))
    return region
