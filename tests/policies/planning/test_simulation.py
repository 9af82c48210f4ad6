"""Tests of simulated runs: against queueing theory, reproducibility, stages and several devices."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from loadgen.report import Record, RunObjective, make_report, outcome_from_records, outcome_from_run, simulated_records
from loadgen.schedule import make_schedule
from policies.catalog import ModelPolicy, choose, solved
from policies.planning.simulation import RequestLevels, RequestSizes, Simulation, simulate_policy
from policies.profile import Profile
from policies.queue.arrivals import Instants
from policies.rules.maximum_wait import MaximumWait
from policies.solver.distributions import Gamma
from policies.solver.levels import LevelProblem, evaluate_levels, greedy_by_level, solve_levels
from policies.types import Mix, SpecError

DEVICE = Profile(
    "device", tuple(0.004 + 0.001 * b for b in range(1, 9)), energies=tuple(0.01 * b for b in range(2, 10))
)
BY_ONE_LENGTH = tuple((time,) for time in DEVICE.service_times)


def test_one_server_without_batching_is_the_md1_queue() -> None:
    """Pollaczek and Khinchin: l + rho l / (2 (1 - rho)) = 5 + 2.5 ms at l = 5 ms, 100/s."""
    run = Simulation(DEVICE, "serial").run(make_schedule("poisson", 100.0, 500.0, 5).instants)
    # Consecutive response times are correlated; the means of 25 stretches of 2,000 requests nearly independent.
    stretches = run.responses[: len(run.responses) // 25 * 25].reshape(25, -1).mean(axis=1)
    assert abs(run.responses.mean() - 0.0075) < 4 * stretches.std(ddof=1) / 25**0.5
    assert stretches.std(ddof=1) < 0.0005  # small enough for the line above to be a test


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "weights"), [("greedy", None), ("smdp", "8:1"), ("multi-bin:2,inner=greedy", None)])
def test_levels_have_the_means_that_the_solver_computes(spec: str, weights: str | None) -> None:
    """smdp has tables at some loads, so that its means are not those of the exact rate, but nearly their sum."""
    instants = make_schedule("poisson", 400.0, 200.0, 5).instants
    levels = 1 + (np.random.default_rng(1).random(len(instants)) > 0.2).astype(int)
    known = RequestLevels(levels.tolist(), (0.2, 0.8), weights)
    sizes = RequestSizes(np.ones(len(instants))) if spec.startswith("multi") else None
    device = DEVICE if sizes is None else replace(DEVICE, lengths=(1,), length_service_times=BY_ONE_LENGTH)
    run = Simulation(device, spec, levels=known, sizes=sizes).run(instants)
    assert run.levels is not None
    assert sorted(run.levels.tolist()) == sorted(levels.tolist())
    means = [run.responses[run.levels == level].mean() for level in (1, 2)]
    problem = LevelProblem(DEVICE, (80.0, 320.0), (8.0, 1.0))
    greedy, best = evaluate_levels(problem, greedy_by_level(8)), solve_levels(problem)
    if weights is None:
        assert means == pytest.approx(greedy.mean_response_times, rel=0.03)
    else:
        assert 1e3 * np.dot((1.6, 0.8), means) == pytest.approx(best.average_cost, rel=0.03)
        assert means[0] < 0.99 * greedy.mean_response_times[0]


def test_the_same_seed_gives_the_same_run() -> None:
    def responses(seed: int) -> Instants:
        return (
            Simulation(DEVICE, "static:4").run(make_schedule("mmpp:1.5,0.5,1,1", 300.0, 5.0, seed).instants).responses
        )

    assert np.array_equal(responses(1), responses(1))
    assert not np.array_equal(responses(1), responses(2))


def test_a_batch_has_the_service_time_and_energy_of_the_profile() -> None:
    run = Simulation(DEVICE, "greedy").run(np.zeros(11))
    assert run.batch_sizes.tolist() == [8, 3]
    assert run.responses.tolist() == pytest.approx([0.012] * 8 + [0.019] * 3)
    assert run.energies is not None
    assert run.energies.tolist() == pytest.approx([0.09, 0.04])


@pytest.mark.parametrize("spec", ["greedy", "static:4", "timeout:10"])
def test_the_records_of_a_run_give_the_same_report(spec: str) -> None:
    arrivals = make_schedule("poisson", 400.0, 5.0, 3)
    simulation = Simulation(DEVICE, spec, "net")
    from_each: dict[str, Any] = {
        **make_report(
            outcome_from_records(list(simulated_records(simulation.services(arrivals.instants)))),
            5.0,
            RunObjective(0.02),
        )
    }
    from_whole: dict[str, Any] = {
        **make_report(outcome_from_run(simulation.run(arrivals.instants)), 5.0, RunObjective(0.02))
    }
    assert from_each.pop("errors") == from_whole.pop("errors") == {}
    assert from_each == pytest.approx(from_whole | {"send_lag_p99_ms": 0.0})


def test_the_response_time_is_waiting_time_plus_service_time() -> None:
    def difference(record: Record) -> float:
        assert record.waiting is not None
        assert record.service is not None
        return record.finished - record.scheduled - record.waiting - record.service

    records = simulated_records(
        Simulation(DEVICE, "static:4").services(make_schedule("poisson", 400.0, 1.0, 3).instants)
    )
    assert max(abs(difference(record)) for record in records) < 1e-12


def test_the_slo_of_the_policy_sets_the_deadlines() -> None:
    device = Profile("exact in binary", (0.125, 0.1875, 0.25))
    run = simulate_policy(choose("max-under-deadline:slo_ms=500", device), np.array([0.0, 0.25]))
    assert run.batch_sizes.tolist() == [2]
    assert run.responses.tolist() == [0.5, 0.25]  # launched at 0.5 - l(2)


def test_a_profile_without_energies_gives_a_run_without_energies() -> None:
    run = Simulation(Profile("plain", (0.005,)), "greedy").run(np.zeros(2))
    assert run.energies is None


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(SpecError, match="unknown policy"):
        Simulation(DEVICE, "clever").run(np.zeros(1))


@pytest.mark.parametrize("cv", [0.0, 1.0])
@pytest.mark.parametrize(
    "chosen",
    [
        choose("static:4,max_wait_ms=inf", DEVICE),
        choose("greedy,max_wait_ms=inf", DEVICE),
        solved((0, 0, 2, 0, 3), DEVICE),
        solved((0, 0, 2), DEVICE, Mix(0.3, (0, 0, 0, 0, 4, 0, 6))),
    ],
    ids=["static", "greedy", "table", "mix"],
)
def test_the_fast_simulation_of_a_policy_of_the_queue_length_gives_the_same_run(chosen: ModelPolicy, cv: float) -> None:
    arrivals = make_schedule("poisson", 400.0, 5.0, 3).instants
    # an infinite maximum wait changes no action, but prevents the table lookup
    slow = replace(chosen, policy=MaximumWait(chosen.policy, DEVICE.max_batch_size, inf))
    assert chosen.fixed_action_table() is not None
    assert slow.fixed_action_table() is None
    a, b = (simulate_policy(each, arrivals, "net", sampler(cv)) for each in (chosen, slow))
    assert np.array_equal(a.batch_sizes, b.batch_sizes)
    assert np.array_equal(a.responses, b.responses)
    assert np.array_equal(a.waits, b.waits)
    assert np.array_equal(a.arrivals, b.arrivals)
    assert np.array_equal(a.finishes, b.finishes)
    assert a.energies is not None
    assert b.energies is not None
    assert np.array_equal(a.energies, b.energies)
    assert a.elapsed == b.elapsed


def sampler(cv: float) -> Callable[[int], float]:
    return Gamma((cv,)).sampler(np.array(DEVICE.service_times), np.random.default_rng(6))


@pytest.mark.parametrize("spec", ["static:4", "timeout:10,max_wait_ms=inf", "rate-matching,max_wait_ms=inf"])
def test_a_policy_of_time_or_rate_has_no_table(spec: str) -> None:
    assert choose(spec, DEVICE).fixed_action_table() is None


@pytest.mark.parametrize("spec", ["static:1,max_wait_ms=inf", "timeout:0"])
def test_service_times_can_be_drawn_in_both_simulations(spec: str) -> None:
    run = simulate_policy(choose(spec, DEVICE), np.array([0.0, 1.0]), service_time=lambda b: 0.25 * b)
    assert run.responses.tolist() == [0.25, 0.25]


def test_a_policy_that_measures_the_rate_has_no_table() -> None:
    chosen = choose("smdp,max_wait_ms=inf", DEVICE)
    assert chosen.fixed_action_table() is None
    assert simulate_policy(chosen, np.zeros(11)).scheduled == 11


BY_STAGES = Profile(
    "by stages",
    (1.0, 1.5),
    energies=(8.0, 12.0),
    stage_service_times=((0.25, 0.75), (0.5, 1.5)),  # by stages, a batch of 2 takes a third longer
)


def test_a_launch_of_some_stages_has_their_service_time_and_share_of_the_energy() -> None:
    run = simulate_policy(choose("lazy:slo_ms=100000", BY_STAGES), np.array([0.0, 0.125]), "net")
    assert run.batch_sizes.tolist() == [1, 1, 2]
    assert run.finishes.tolist() == [0.25, 0.5, 2.0]  # the second request catches up, then both run as one batch
    assert run.responses.tolist() == [2.0, 1.875], "one response per request, after its last stage"
    assert run.waits.tolist() == [0.0, 0.125]
    assert run.energies is not None
    assert run.energies.tolist() == [2.0, 2.0, 9.0]


def test_a_batch_through_all_stages_takes_the_service_time_of_the_whole() -> None:
    assert simulate_policy(choose("greedy", BY_STAGES), np.zeros(2)).responses.tolist() == [1.5, 1.5]
    assert simulate_policy(choose("greedy,max_wait_ms=inf", BY_STAGES), np.zeros(2)).responses.tolist() == [1.5, 1.5]


def test_a_record_by_stages_starts_at_the_first_launch_and_sums_the_energy() -> None:
    records = list(simulated_records(Simulation(BY_STAGES, "lazy:slo_ms=100000").services(np.array([0.0, 0.125]))))
    assert [(r.waiting, r.service, r.batch_size, r.energy) for r in records] == [
        (0.0, 2.0, 2, 6.5),
        (0.125, 1.75, 2, 6.5),
    ]


def test_drawn_service_times_are_split_over_the_stages() -> None:
    run = simulate_policy(choose("lazy:slo_ms=9", BY_STAGES), np.zeros(1), service_time=lambda _: 3.0)
    assert run.finishes.tolist() == [0.75, 3.0]


def test_the_number_of_stages_can_be_given() -> None:
    assert len(Simulation(DEVICE, "catch-up:slo_ms=50").run(np.zeros(1)).batch_sizes) == 10
    assert len(Simulation(DEVICE, "catch-up:slo_ms=50", stages=3).run(np.zeros(1)).batch_sizes) == 3


SLOWER = replace(DEVICE, name="slower", service_times=tuple(2 * t for t in DEVICE.service_times))


@pytest.mark.parametrize("spec", ["greedy", "timeout:10", "rate-matching", "multi-bin:2", "catch-up:slo_ms=50"])
def test_the_records_of_a_fleet_give_the_same_report(spec: str) -> None:
    arrivals = make_schedule("poisson", 700.0, 3.0, 3)
    simulation = Simulation(DEVICE, spec, "net", others=(SLOWER,))
    from_each: dict[str, Any] = {
        **make_report(
            outcome_from_records(list(simulated_records(simulation.services(arrivals.instants)))), 3.0, RunObjective()
        )
    }
    from_whole: dict[str, Any] = {
        **make_report(outcome_from_run(simulation.run(arrivals.instants)), 3.0, RunObjective())
    }
    assert from_each["ok"] == len(arrivals.instants)
    for key in ("mean_ms", "p95_ms", "max_ms", "throughput_hz", "energy_per_request_mj"):
        assert from_each[key] == pytest.approx(from_whole[key]), key


def test_each_device_of_a_fleet_measures_its_own_arrival_rate() -> None:
    """Each of two devices gets half the rate; rate-matching then launches smaller batches."""
    arrivals = make_schedule("poisson", 600.0, 20.0, 3).instants
    alone = Simulation(DEVICE, "rate-matching").run(arrivals[::2])
    beside = Simulation(DEVICE, "rate-matching", others=(DEVICE,)).run(arrivals)
    whole = Simulation(DEVICE, "rate-matching").run(arrivals)
    assert beside.batch_sizes.mean() == pytest.approx(alone.batch_sizes.mean(), rel=0.1)
    assert whole.batch_sizes.mean() > 1.5 * beside.batch_sizes.mean()


def test_profiles_that_cannot_be_combined_are_an_error() -> None:
    with pytest.raises(SpecError, match="leave --sizes out"):
        Simulation(DEVICE, "greedy", sizes=RequestSizes(np.ones(1)), others=(DEVICE,)).run(np.zeros(1))
    with pytest.raises(SpecError, match="one profile has 1 stages, another 2: give the number for all with --stages"):
        Simulation(DEVICE, "greedy", others=(BY_STAGES,)).run(np.zeros(1))
    assert Simulation(DEVICE, "lazy:slo_ms=9", stages=2, others=(BY_STAGES,)).run(np.zeros(3)).scheduled == 3
