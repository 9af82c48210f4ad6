"""The distribution of the response time against simulation, exact means and closed forms."""

from dataclasses import replace
from functools import cache
from math import exp

import numpy as np
import pytest

from policies.objectives.frontier import MeanBound, choose_weight
from policies.objectives.trial import Trial
from policies.percentile.ages import ResponseBounds, solve_ages
from policies.percentile.response_law import ResponseLaw, has_response_law, response_law
from policies.profile import load_profile
from policies.queue.simulator import share_within
from policies.solver.distributions import Gamma
from policies.solver.model import Problem
from policies.solver.solver import Solution, evaluate, solve
from policies.types import SpecError

P4 = load_profile("googlenet-tesla-p4")
GREEDY, STATIC_8 = tuple(range(33)), (0,) * 8 + (8,)


def at_load(load: float, w2: float = 0.0) -> Problem:
    return Problem(P4, load * P4.capacity, w2=w2)


@cache
def cases() -> list[Solution]:
    return [
        solve(at_load(0.7, 1.6)),
        solve(at_load(0.9, 1.0)),
        evaluate(at_load(0.5), GREEDY),
        evaluate(at_load(0.5), STATIC_8),
        choose_weight(at_load(0.3), MeanBound(0.0053)),  # a mix
    ]


@cache
def law_of(case: int) -> ResponseLaw:
    solution = cases()[case]
    return response_law(at_load(solution.load), solution.batch_size, solution.mix)


@pytest.mark.parametrize("case", range(5))
def test_the_share_of_late_requests_agrees_with_simulation(case: int) -> None:
    solution = cases()[case]
    law = law_of(case)
    responses = Trial(at_load(solution.load), 300_000, 11).run(solution).responses
    for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 0.999):
        t = float(np.quantile(responses, share)) * 1.000_001  # beside an atom, not on it
        simulated = share_within(responses, t)
        found = float(law.late([t])[0])
        assert found == pytest.approx(1.0 - simulated.value, abs=5e-4 + 4.0 * simulated.standard_error), share


@pytest.mark.parametrize("case", range(5))
def test_its_mean_is_the_exact_mean(case: int) -> None:
    times = np.linspace(1e-5, 0.08, 8001)
    late = law_of(case).late(times.tolist())
    mean = 1e-5 + float(np.sum((late[1:] + late[:-1]) / 2.0 * np.diff(times)))  # before 1e-5 all are late
    assert mean == pytest.approx(cases()[case].mean_response_time, rel=1e-3)


def test_a_request_alone_takes_one_service_time() -> None:
    law = response_law(at_load(1e-6), GREEDY)
    assert law.percentile(0.5) == P4.service_time(1)
    assert law.late([P4.service_time(1) * 0.999, P4.service_time(1)]).tolist() == pytest.approx([1.0, 0.0], abs=1e-5)


def test_a_pair_waits_for_its_second_request() -> None:
    problem, pair = at_load(1e-4), (0, 0, 2)
    rate, t = problem.arrival_rate, P4.service_time(2)
    law = response_law(problem, pair)
    for wait in (0.1 / rate, 0.5 / rate, 2.0 / rate):  # half of the requests are first and wait for the other
        assert float(law.late([t + wait])[0]) == pytest.approx(0.5 * exp(-rate * wait), abs=1e-3)


def test_percentiles_are_where_the_share_is_reached() -> None:
    law = response_law(at_load(0.7), solve(at_load(0.7, 1.6)).batch_size)
    assert [1e3 * law.percentile(share) for share in (0.9, 0.95)] == pytest.approx([9.23, 9.96], abs=0.01)  # Table I
    for share in (0.5, 0.9, 0.99):
        assert float(law.late([law.percentile(share)])[0]) == pytest.approx(1.0 - share, abs=1e-6)


def test_random_service_times_are_refused() -> None:
    with pytest.raises(SpecError, match="add --simulate"):
        response_law(replace(at_load(0.5), service=Gamma((0.3,))), GREEDY)


def test_near_saturation_the_law_ends_although_queues_are_cut() -> None:
    law = response_law(Problem(P4, 0.98 * P4.capacity), range(33))
    assert law.percentile(0.5) < law.percentile(0.99) < 1.0


def test_above_the_largest_load_nothing_is_computed_in_which_longer_queues_are_missing() -> None:
    problem = Problem(P4, 0.985 * P4.capacity)
    assert not has_response_law(problem)
    with pytest.raises(SpecError, match=r"loads up to 0\.98; add --simulate"):
        response_law(problem, range(33))
    with pytest.raises(SpecError, match=r"a load above 0\.98 is too high for a table of maximum ages"):
        solve_ages(problem, ResponseBounds(((0.03, 0.95), (0.06, 0.99))))
