"""The policy of least power that keeps percentiles of the response time: a table of maximum ages.

Source: this project's own derivation; research/papers.md, section "Beyond the papers". The model is age_model.py.

**Prices.** With a price mu_i >= 0 of a late request for each limit t_i, and a holding cost h of a request in the system
per second for a bound on the mean, policy iteration gives the launch region of least cost

    g(mu, h) = min over policies of  power + sum of mu_i lambda P(T > t_i) + h lambda E[T].

**Lower bound.** By weak duality no policy of this model that keeps the bounds takes less power than

    g(mu, h) - sum of mu_i lambda (1 - share_i) - h lambda (bound on E[T])

for any prices. The policies of this model decide by the queue length and the age of the oldest request, and launch once
it is twice the largest limit, or the longest service time, old.

**Search.** A linear program mixes the tables found so far to the least power within the bounds. Its dual variables are
the next prices, whose table is added, until the program's value and the lower bound agree (column generation). With one
bound this is the search along the tangents of the frontier of power and late requests. The tables are thresholds
tau(n) of the regions. The result is one table, or two of them mixed with the probability that meets the bounds exactly,
drawn once for each launch. Where waiting saves less than a given share, it is the table that never waits, if that keeps
the bounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np
import scipy

from policies.percentile.age_model import (
    LATE,
    AgeModel,
    Chain,
    Region,
    averages_of,
    build_age_model,
    chain_of,
    improved,
)
from policies.solver.distributions import Floats, Ints
from policies.solver.model import (
    LARGEST_LOAD,
    LAUNCHES,
    POWER,
    RESPONSE,
    Problem,
    build_model,
    check_limit,
    check_solvable,
    is_within_largest_load,
)
from policies.solver.solver import Solution
from policies.types import MaxAges, SpecError

_SETTLED = 1e-10  # least relative decrease of the cost by a step of policy iteration
_STEPS = 30  # of policy iteration, at most; four are usual
_TABLES = 32  # of a search, at most
_GAP = 1e-3  # between the power found and the lower bound at which the search ends, as a share
_HIGHEST = 1e4  # price, in energies of the largest batch, of all late requests that are allowed: only these matter
_EXACT = 1e-9  # a bound counts as kept if it is exceeded by less than this share of what may be late


@dataclass(frozen=True, slots=True)
class ResponseBounds:
    """Bounds on the response time that have to be kept together.

    Attributes:
        shares: pairs of a response time, s, and the share of the requests to be answered within it; at least one.
        mean: the mean response time is at most this, s.
    """

    shares: tuple[tuple[float, float], ...]
    mean: float = inf

    @property
    def limits(self) -> tuple[float, ...]:
        """The response times of the shares, s."""
        return tuple(limit for limit, _ in self.shares)

    @property
    def allowed(self) -> Floats:
        """The shares of late requests that are allowed, then the mean response time, s; (limits + 1,)."""
        return np.array([*(1.0 - share for _, share in self.shares), self.mean])

    def excess(self, bounded: Floats) -> float:
        """Return by how much quantities as in `allowed` exceed the bounds, as a share of the one exceeded most."""
        finite = np.isfinite(self.allowed)
        return float(np.max(bounded[finite] / self.allowed[finite])) - 1.0


@dataclass(frozen=True, slots=True)
class AgeSolution(Solution):
    """A table of maximum ages and its averages; `batch_size` has its actions for requests that have just arrived.

    Attributes:
        max_ages: the policy.
        share_within: the share of the requests that is answered within each limit.
        power_lower_bound: W; no policy that decides by queue length and age of the oldest request and keeps the bounds
            takes less, in the model with this largest batch. Infinite if none keeps them.
    """

    max_ages: MaxAges = MaxAges((0.0, 0.0))  # noqa: RUF009  (immutable)
    share_within: tuple[float, ...] = ()
    power_lower_bound: float = inf

    @property
    def bounded(self) -> Floats:
        """The quantities of `ResponseBounds.allowed`."""
        return np.array([*(1.0 - share for share in self.share_within), self.mean_response_time])


class Table(NamedTuple):
    """A table of maximum ages in the search.

    Attributes:
        first: index of the age tau(n), by n - 1.
        chain: its chain of launches.
        average: its averages, see `averages_of`.
    """

    first: Ints
    chain: Chain
    average: Floats

    @property
    def bounded(self) -> Floats:
        """The quantities of `ResponseBounds.allowed`."""
        return np.append(self.average[LATE:], self.average[RESPONSE])


class _Evaluated(NamedTuple):
    """A launch region, its chain, and the averages and relative values of `averages_of`."""

    region: Region
    chain: Chain
    average: Floats
    bias: Floats


def solve_ages(
    problem: Problem, bounds: ResponseBounds, mixed: bool = True, least_saving: float = 0.0
) -> tuple[AgeSolution, bool]:
    """Return the table of maximum ages of least power within bounds, and whether it keeps them.

    If it does not, it is the table nearest to the bounds.

    Args:
        problem: the system; its weights only count in the gain of the result.
        bounds: the bounds.
        mixed: whether two tables may be mixed.
        least_saving: where waiting saves less than this share of the power, the table that never waits is returned, if
            it keeps the bounds. Fewer requests than the smallest batch always wait.

    Raises:
        SpecError: the load is 1 or more, or the problem or a bound is malformed.
    """
    _check(problem, bounds)
    search = _Search(build_age_model(problem, bounds.limits), bounds)
    search.run()
    table, other, probability = search.best(mixed, least_saving)
    return _solution(problem, search, table, other, probability), search.kept(table)


class _Search:
    """Column generation: the tables found so far and the best lower bound."""

    def __init__(self, ages: AgeModel, bounds: ResponseBounds) -> None:
        self.ages, self.bounds = ages, bounds
        self.tables: list[Table] = []
        self.lower_bound = 0.0
        self.steps = 0
        self._known: list[_Evaluated] = []
        region = np.ones((ages.model.max_batch_size, len(ages.ages)), dtype=np.bool_)
        region[: ages.model.min_batch_size - 1] = False
        self._evaluated(region)

    def run(self) -> None:
        """Find tables until a mix of two is within `_GAP` of the lower bound."""
        model, prices = self.ages.model, np.zeros(len(self.bounds.limits) + 1)
        highest = _HIGHEST * (float(model.charges[:, POWER].max()) or 1.0)
        per_second = highest / self.bounds.allowed
        per_second[-1] = highest / float(model.service_times.max()) if self.bounds.mean < inf else 0.0
        for given in (prices, per_second):
            self._add(given)
            powers = [float(table.average[POWER]) for table in self.tables if self.kept(table)]
            if min(powers, default=inf) - self.lower_bound <= _GAP * self.lower_bound:
                return
        while len(self.tables) < _TABLES:
            value, prices = self._mix(per_second)
            if value - self.lower_bound <= _GAP * value:
                return
            count = len(self.tables)
            self._add(prices)
            if len(self.tables) == count:
                return

    def kept(self, table: Table) -> bool:
        """Return whether a table keeps the bounds."""
        return self.bounds.excess(table.bounded) <= _EXACT

    def _mix(self, highest: Floats) -> tuple[float, Floats]:
        """Mix the tables to the least power within the bounds; return it and the prices, of lateness and holding.

        The linear program is in units of the bounds and of the largest power, because its tolerances are absolute.
        """
        finite = np.isfinite(self.bounds.allowed)
        allowed = self.bounds.allowed[finite]
        amounts = np.array([table.bounded[finite] / allowed for table in self.tables]).T
        powers = np.array([table.average[POWER] for table in self.tables])
        unit = float(powers.max()) or 1.0
        price_unit = unit / (self.ages.model.arrival_rate * allowed)
        found = scipy.optimize.linprog(
            [*(powers / unit), *(highest[finite] / price_unit)],
            A_ub=np.hstack([amounts, -np.eye(len(amounts))]),
            b_ub=np.ones(len(amounts)),
            A_eq=[[1.0] * len(powers) + [0.0] * len(amounts)],
            b_eq=[1.0],
            method="highs",
        )
        prices = np.zeros(len(highest))
        prices[finite] = np.maximum(-found.ineqlin.marginals, 0.0) * price_unit
        return unit * float(found.fun), prices

    def _add(self, prices: Floats) -> None:
        """Solve for prices of a late request, by limit, and of a second in the system; add the table if it is new."""
        gain, found = self._solve(prices)
        rate, allowed = self.ages.model.arrival_rate, self.bounds.allowed
        finite = np.isfinite(allowed)
        self.lower_bound = max(self.lower_bound, gain - rate * float(prices[finite] @ allowed[finite]))
        for first in _thresholds(found.region):
            if any(np.array_equal(first, table.first) for table in self.tables):
                continue
            self.tables.append(self._table(first, found))

    def _solve(self, prices: Floats) -> tuple[float, "_Evaluated"]:
        """Return the least cost, W, and its policy: policy iteration from the best one that is known."""
        weights = np.zeros(LATE + len(prices) - 1)
        weights[RESPONSE], weights[POWER], weights[LATE:] = prices[-1], 1.0, prices[:-1]
        rate = self.ages.model.arrival_rate
        per_time = weights * np.where(np.arange(len(weights)) < LATE, 1.0, rate)
        per_time[RESPONSE] *= rate
        best = min(self._known, key=lambda each: float(each.average @ per_time))
        gain = float(best.average @ per_time)
        for _ in range(_STEPS):
            region = improved(self.ages, best.bias @ weights, gain, prices[-1], prices[:-1])
            if np.array_equal(region, best.region):
                break
            found = self._evaluated(region)
            cost = float(found.average @ per_time)
            if cost > gain - _SETTLED * abs(gain):
                break
            best, gain = found, cost
        return gain, best

    def _table(self, first: Ints, found: "_Evaluated") -> Table:
        """The table with these thresholds of a region."""
        launches = np.arange(len(self.ages.ages)) >= first[:, None]
        evaluated = found if np.array_equal(launches, found.region) else self._evaluated(launches)
        return Table(first, evaluated.chain, evaluated.average)

    def _evaluated(self, region: Region) -> "_Evaluated":
        chain = chain_of(self.ages, region)
        self._known.append(_Evaluated(region, chain, *averages_of(self.ages, chain)))
        self.steps += 1
        return self._known[-1]

    def best(self, mixed: bool, least_saving: float) -> tuple[Table, Table, float]:
        """Return the two tables of the best mix and the probability of the second; the first one keeps the bounds.

        If no table keeps them, it is the nearest one, alone. If the mix saves less than `least_saving` over the table
        that never waits, and that keeps the bounds, it is that one, alone.
        """
        inside = [table for table in self.tables if self.kept(table)]
        if not inside:
            nearest = min(self.tables, key=lambda table: self.bounds.excess(table.bounded))
            return nearest, nearest, 0.0
        alone = min(inside, key=lambda table: float(table.average[POWER]))
        pairs = [(self._chord(one, two), one, two) for one, two in self._pairs(inside)] if mixed else []
        power, one, two = min(pairs, key=lambda pair: pair[0], default=(inf, alone, alone))
        if power >= alone.average[POWER]:
            power, one, two = float(alone.average[POWER]), alone, alone
        if least_saving > 0.0:
            at_once = self._table(_thresholds(self._known[0].region)[1], self._known[0])
            if self.kept(at_once) and power > (1.0 - least_saving) * at_once.average[POWER]:
                return at_once, at_once, 0.0
        return one, two, 0.0 if one is two else self._probability(one, two)

    def _pairs(self, inside: Sequence[Table]) -> Iterator[tuple[Table, Table]]:
        return ((one, two) for one in inside for two in self.tables if not self.kept(two))

    def _chord(self, inside: Table, outside: Table) -> float:
        """Return the least power of a mix within the bounds, as if averages mixed linearly."""
        room, wider = self.bounds.allowed - inside.bounded, outside.bounded - inside.bounded
        part = min((float(r / w) for r, w in zip(room, wider, strict=True) if w > 0.0 and r < inf), default=0.0)
        return float(
            inside.average[POWER] + min(max(part, 0.0), 1.0) * (outside.average[POWER] - inside.average[POWER])
        )

    def _probability(self, inside: Table, outside: Table) -> float:
        """Return the largest probability of the outside table that keeps the bounds."""

        def excess(probability: float) -> float:
            averages = mixed_average(self.ages, inside.chain, outside.chain, probability)
            return self.bounds.excess(np.append(averages[LATE:], averages[RESPONSE]))

        if excess(0.0) >= 0.0:
            return 0.0
        return max(float(scipy.optimize.brentq(excess, 0.0, 1.0, xtol=1e-10)) - 1e-9, 0.0)


def actions_of_ages(ages: MaxAges, max_batch_size: int) -> tuple[int, ...]:
    """Return the actions of a table of maximum ages for 0, 1, 2, ... requests that have just arrived."""
    table, largest = ages.max_age, ages.largest(max_batch_size)
    return tuple(0 if table[min(n, len(table) - 1)] > 0.0 else min(n, largest) for n in range(max_batch_size + 1))


def mixed_average(ages: AgeModel, one: Chain, two: Chain, probability: float) -> Floats:
    """Return the averages if each launch follows the second chain's table with this probability."""
    mixed = Chain(*((1.0 - probability) * x + probability * y for x, y in zip(one, two, strict=True)))
    return averages_of(ages, mixed)[0]


def _thresholds(region: Region) -> tuple[Ints, Ints]:
    """Return the indices of the first ages at which each number is launched, none larger for more requests.

    Where the age of more requests is larger in the region, the first table lowers it to that of fewer, and the second
    table raises that of fewer. With concave service times the region launches a few requests early, at ages that so few
    hardly ever reach. Only the second table is near such a region.
    """
    first = np.where(region.any(axis=1), region.argmax(axis=1), region.shape[1] - 1)
    return np.minimum.accumulate(first), np.maximum.accumulate(first[::-1])[::-1]


def _solution(problem: Problem, search: _Search, table: Table, other: Table, probability: float) -> AgeSolution:
    ages, model = search.ages, search.ages.model
    average = table.average if probability == 0.0 else mixed_average(ages, table.chain, other.chain, probability)
    forbidden = [inf] * (model.min_batch_size - 1)
    max_age, others = ((0.0, *forbidden, *ages.ages[each.first[len(forbidden) :]].tolist()) for each in (table, other))
    found = _averages(problem, ages, average, MaxAges(max_age, probability, others if probability > 0.0 else ()))
    lower_bound = min(search.lower_bound, float(average[POWER])) if search.kept(table) else inf
    return replace(found, iterations=search.steps, power_lower_bound=lower_bound)


def evaluate_ages(problem: Problem, table: MaxAges, limits: tuple[float, ...]) -> AgeSolution:
    """Return the averages of a table of maximum ages, and the shares within limits, s; without a lower bound.

    Ages between those of the model's grid are rounded up. All ages of solved tables are in it.

    Raises:
        SpecError: the load is 1 or more, the table waits for longer than the model.
    """
    problem = replace(problem, max_batch_size=table.largest(problem.truncated_profile.max_batch_size))
    _check(problem, ResponseBounds(tuple((limit, 0.5) for limit in limits)))
    ages = build_age_model(problem, limits)
    longest = float(ages.ages[ages.capped])
    chains = []
    for each in (table.max_age, table.others or table.max_age):
        tau = np.array([each[min(n, len(each) - 1)] for n in range(1, ages.model.max_batch_size + 1)])
        if ages.model.min_batch_size > 1 or tau.max() > longest * (1.0 + _EXACT):
            raise SpecError(f"a maximum age is above {1e3 * longest:g} ms, the longest in the model: add --simulate N")
        chains.append(chain_of(ages, ages.ages >= tau[:, None] * (1.0 - _EXACT)))
    return _averages(problem, ages, mixed_average(ages, chains[0], chains[1], table.probability), table)


def _averages(problem: Problem, ages: AgeModel, average: Floats, table: MaxAges) -> AgeSolution:
    """Return a table with its averages."""
    model = ages.model
    response, power, launches = (float(average[i]) for i in (RESPONSE, POWER, LAUNCHES))
    return AgeSolution(
        batch_size=actions_of_ages(table, model.max_batch_size),
        gain=1e3 * problem.w1 * response + problem.w2 * power,
        mean_response_time=response,
        mean_power=power,
        energy_per_request=power / model.arrival_rate,
        mean_batch_size=model.arrival_rate / launches,
        iterations=0,
        change=0.0,
        arrival_rate=model.arrival_rate,
        load=model.load,
        w1=problem.w1,
        w2=problem.w2,
        max_ages=table,
        share_within=tuple((1.0 - average[LATE:]).tolist()),
    )


def _check(problem: Problem, bounds: ResponseBounds) -> None:
    check_solvable(replace(problem, w1=1.0), build_model(problem))
    if not is_within_largest_load(problem):
        raise SpecError(
            f"a load above {LARGEST_LOAD:g} is too high for a table of maximum ages; lower the arrival rate, or keep "
            "one percentile alone, which a table of batch sizes then does"
        )
    for limit, share in bounds.shares:
        check_limit(limit, share)
    if bounds.mean != inf:
        check_limit(bounds.mean)
