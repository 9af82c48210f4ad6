"""The model's arrays against the paper's formulas, and checks of problems and tables."""

from math import inf, nan

import numpy as np
import pytest

from policies.profile import Profile
from policies.solver.model import HOLDING, POWER, Problem, build_model, check_actions
from policies.types import SpecError

PROFILE = Profile("two sizes", (0.002, 0.003), energies=(0.05, 0.08))
RATE = 400.0


def test_waiting_is_an_action_with_one_certain_arrival() -> None:
    model = build_model(Problem(PROFILE, RATE))
    assert model.sojourn_time[0] == 1.0 / RATE
    assert model.drain[0] == -1.0
    assert model.squared_move[0] == 1.0
    assert model.arrival_probabilities(4)[0].tolist() == [0.0, 1.0, 0.0, 0.0]


def test_arrival_probabilities_have_the_moments_of_equation_4() -> None:
    model = build_model(Problem(PROFILE, RATE))
    counts = np.arange(40)  # a Poisson variable of mean 1.2 exceeds 40 with probability 1e-46
    probability = model.arrival_probabilities(40)
    # 1e-13: forty logarithms of size up to 100, each rounded to 1e-16 of its size
    assert probability.sum(axis=1) == pytest.approx(np.ones(3), abs=1e-13)
    assert probability @ counts == pytest.approx(model.mean_arrivals, abs=1e-13)
    second = model.arrivals_variance + model.mean_arrivals**2
    assert probability @ counts**2 == pytest.approx(second, abs=1e-12)


def test_large_batches_do_not_lose_their_arrivals_to_underflow() -> None:
    model = build_model(Problem(Profile("slow", (2.0,)), 0.45e3))
    # 900 arrivals in the mean: exp(-900) is 0 in a double. 1e-11: exponents near 6000, rounded to 1e-12
    assert model.arrival_probabilities(1300)[1].sum() == pytest.approx(1.0, abs=1e-11)


def test_cost_of_a_launch_is_equation_11() -> None:
    model = build_model(Problem(PROFILE, RATE, w1=1.0, w2=1.0))
    # three wait, two are launched: w1 (s l / lambda + l^2 / 2), in s^2, and zeta(2)
    held = (HOLDING * (3 / RATE * model.sojourn_time[2] + model.half_second_moment[2])).sum()
    assert held == pytest.approx(3 * 0.003 / RATE + 0.003**2 / 2, rel=1e-15)
    assert model.charges[2, POWER] == 0.08


def test_capacity_includes_allowed_sizes_only() -> None:
    falling = Profile("best alone", (0.001, 0.004, 0.005))
    assert build_model(Problem(falling, 1.0)).capacity == pytest.approx(1000.0)
    assert build_model(Problem(falling, 1.0, min_batch_size=2)).capacity == pytest.approx(600.0)
    assert build_model(Problem(falling, 1.0, max_batch_size=2, min_batch_size=2)).capacity == pytest.approx(500.0)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem(PROFILE, 0.0), "arrival rate 0 is not positive"),
        (Problem(PROFILE, nan), "arrival rate nan"),
        (Problem(PROFILE, inf), "arrival rate inf"),
        (Problem(PROFILE, RATE, w1=-1.0), "w1=-1 is not a weight"),
        (Problem(PROFILE, RATE, w2=nan), "w2=nan"),
        (Problem(PROFILE, RATE, min_batch_size=3), "min_batch_size=3 is outside 1..2"),
        (Problem(PROFILE, RATE, min_batch_size=0), "min_batch_size=0"),
        (Problem(PROFILE, RATE, max_batch_size=3), "max_batch_size=3"),
    ],
)
def test_malformed_problems_are_rejected_in_one_line(problem: Problem, message: str) -> None:
    with pytest.raises(SpecError, match=message) as rejected:
        build_model(problem)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([], "empty"),
        ([0, 2], "action 2 at queue length 1 launches more than waits"),
        ([0, -1], "action -1"),
        ([0, 0, 0, 3], "neither 0 nor a batch size 1..2"),
        ([0, 1, 0], "would wait forever"),
    ],
)
def test_invalid_tables_are_rejected(actions: list[int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_actions(actions, 1, 2)
