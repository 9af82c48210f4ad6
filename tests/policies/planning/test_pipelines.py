"""Capacity planning of pipelines."""

from itertools import product

import numpy as np
import pytest

from policies.percentile.ages import ResponseBounds
from policies.planning.devices import CapacityProblem, evaluate_devices
from policies.planning.pipeline_bounds import PARTS, ModelBound
from policies.planning.pipelines import PipelineStep, StepPlan, parse_steps, plan_pipeline, simulate_pipeline
from policies.planning.prices import Price
from policies.profile import Profile
from policies.solver.model import Problem
from policies.types import SpecError

FIXED = Profile("fixed", tuple(0.010 + 0.001 * b for b in range(1, 9)), energies=tuple(0.5 + b for b in range(1, 9)))
LINEAR = Profile("linear", tuple(0.002 * b for b in range(1, 9)), energies=tuple(0.1 * b for b in range(1, 9)))
DEVICES = Price(1.0, 0.0, "devices", 0.0)


def step(profile: Profile, calls: float, requests: float, spare: int = 0) -> PipelineStep:
    problem = Problem(profile, calls * requests)
    return PipelineStep(CapacityProblem(problem, ResponseBounds(()), DEVICES, True, 1000, 0, spare), requests)


def fewest(model: PipelineStep, response_time: float, share: float) -> int:
    problem = model.planning.problem
    bound = ResponseBounds(((response_time, share),))
    planning = CapacityProblem(problem, bound, DEVICES, True, 1000, 0)
    least = int(problem.arrival_rate / problem.profile.capacity) + 1
    return next((n for n in range(least, 20) if evaluate_devices(planning, n).kept), 1000)


@pytest.mark.slow
def test_the_models_together_get_the_fewest_devices() -> None:
    steps = {"a": step(FIXED, 900.0, 1.0), "b": step(LINEAR, 900.0, 2.0)}
    found = plan_pipeline(steps, 0.06, 0.95)
    by_parts = {
        name: [fewest(each, 0.06 * n / PARTS, 1 - 0.025 / each.requests) for n in range(1, PARTS - 1)]
        for name, each in steps.items()
    }
    least = min(
        one + two
        for (i, one), (j, two) in product(enumerate(by_parts["a"], 1), enumerate(by_parts["b"], 1))
        if i + j <= PARTS - 1
    )
    assert sum(each.fleet.devices for each in found.values()) == least
    assert all(each.fleet.kept for each in found.values())
    assert sum(each.bound.response_time for each in found.values()) <= 15 / 16 * 0.06 + 1e-12


def test_of_the_splits_with_these_devices_the_one_that_uses_least_is_chosen() -> None:
    steps = {"a": step(FIXED, 100.0, 1.0), "b": step(LINEAR, 100.0, 1.0)}
    found = plan_pipeline(steps, 0.2, 0.95)
    assert [each.fleet.devices for each in found.values()] == [1, 1]
    assert found["a"].bound.response_time > 2 * found["b"].bound.response_time, "its batches take less"


@pytest.mark.slow
def test_spare_devices_are_those_of_each_model() -> None:
    plain, spare = (
        plan_pipeline({"a": step(FIXED, 500.0, 1.0, n), "b": step(LINEAR, 500.0, 1.0, n)}, 0.1, 0.95) for n in (0, 1)
    )
    for name, each in spare.items():
        assert each.fleet.devices == plain[name].fleet.devices + 1


def test_a_model_that_is_too_slow_is_named() -> None:
    with pytest.raises(SpecError, match="b: no number of devices is enough: one request alone takes 11 ms"):
        plan_pipeline({"a": step(LINEAR, 10.0, 1.0), "b": step(FIXED, 10.0, 1.0)}, 0.0109, 0.95)


def planned(model: PipelineStep, devices: int) -> StepPlan:
    problem = model.planning.problem
    planning = CapacityProblem(problem, ResponseBounds(((0.011, 0.5),)), DEVICES, True, 1000, 0)
    return StepPlan(ModelBound(0.011, 0.5, 0.0), planning, evaluate_devices(planning, devices))


def test_calls_that_never_meet_take_the_sum_of_their_steps() -> None:
    steps = [step(LINEAR, 0.001, 1.0), step(LINEAR, 0.001, 3.0)]
    runs = simulate_pipeline([planned(each, 1) for each in steps], [1.0, 3.0], 0.001, 200, 0)
    for responses in runs.values():
        # the second model launches the first of three at once, and the others in one batch, or all three together
        assert np.all((responses > 0.0079) & (responses < 0.025))
        assert len(responses) == 200


def test_the_next_model_waits_for_the_last_request_of_the_call() -> None:
    one, two = (
        simulate_pipeline([planned(step(LINEAR, 50.0, number), 2)], [number], 50.0, 4000, 0)["random"].mean()
        for number in (1.0, 1.5)
    )
    more = simulate_pipeline([planned(step(LINEAR, 50.0, 2.0), 2)], [2.0], 50.0, 4000, 0)["random"].mean()
    assert one < two < more


def test_steps_are_parsed() -> None:
    assert parse_steps("det.json:1,/models/rec.json:6.5") == [("det.json", 1.0), ("/models/rec.json", 6.5)]
    assert parse_steps("googlenet-tesla-p4") == []


@pytest.mark.parametrize("text", ["a:1,b", "a:0", "a:x", ":1", "a:inf", "a,b"])
def test_malformed_steps_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"is not the models of a pipeline; write PROFILE:REQUESTS"):
        parse_steps(text)
