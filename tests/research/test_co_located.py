"""Models that share a device: the proposed rules on one model, and the record."""

import numpy as np
import pytest

from benchmarks.support.harness import load_record
from policies.profile import Profile, load_profile
from policies.solver.model import Problem
from policies.solver.several_bins import BinnedProblem, solve_bins
from policies.solver.solver import solve
from policies.types import BatchKey, Launch, Policy, Request, State
from research import co_located
from research.co_located import System, Valued, policy_of, system_of


def alone(w2: float, load: float) -> System:
    both = system_of("two", load, w2)
    return System(both.profiles[:1], (load * both.profiles[0].capacity,), w2)


def launched(policy: Policy, system: System, *queues: int) -> list[tuple[str, int]]:
    """Model and size of the launch with these queues; empty for a wait."""
    names = [profile.name for profile in system.profiles]
    waiting = [Request(i, 0.0, BatchKey(name)) for name, queue in zip(names, queues, strict=True) for i in range(queue)]
    action = policy.decide(State(1.0, tuple(waiting), (), {}, {}))
    return [(action.requests[0].kind.model, len(action.requests))] if isinstance(action, Launch) else []


@pytest.mark.parametrize("w2", [0.0, 2.0, 16.0])
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_of_one_model_the_least_value_is_the_policy_of_least_cost(w2: float, load: float) -> None:
    system = alone(w2, load)
    table = solve(Problem(system.profiles[0], system.rates[0], 1.0, w2)).batch_size
    policy = Valued(system)
    for queue in range(1, 40):
        size = table[min(queue, len(table) - 1)]
        expected = [(system.profiles[0].name, size)] if size else []
        assert launched(policy, system, queue) == expected, queue


def test_the_baseline_launches_the_batch_that_was_formed_first_and_the_server_the_largest_product() -> None:
    system = system_of("two", 0.6, 0.0)
    first, second = (profile.name for profile in system.profiles)
    for name, expected in (("greedy, first formed", first), ("greedy", second)):
        policy, _ = policy_of(name, system)
        assert launched(policy, system, 5, 9)[0][0] == expected


def test_models_of_one_load_have_slowed_devices_of_the_load_of_all() -> None:
    system = system_of("four", 0.6, 2.0)
    loads = [problem.arrival_rate / problem.profile.capacity for problem in system.slowed]
    assert loads == pytest.approx([0.6] * 4)
    assert sum(problem.w1 for problem in system.slowed) == pytest.approx(1.0)


def test_the_average_cost_of_a_table_is_that_of_the_exact_solver_and_longer_queues_cost_more() -> None:
    (problem,) = alone(2.0, 0.5).slowed
    solution = solve(problem)
    values, gain = co_located._relative_values(problem, solution.batch_size)
    assert gain == pytest.approx(solution.gain, rel=1e-6)
    assert (np.diff(values[:200]) > 0).all()


@pytest.mark.parametrize(
    ("w2", "most", "first_formed", "requests"), [(0.0, 1.08, 1.1, 5_000), (2.0, 1.02, 0.99, 20_000)]
)
def test_two_models_cost_nearly_as_little_as_the_best_decision_for_both_queues(
    w2: float, most: float, first_formed: float, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bins that are never mixed are models: one SMDP over both queues has the least average cost."""
    monkeypatch.setattr(co_located, "REQUESTS", requests)
    fast = load_profile("googlenet-tesla-p4").truncated(4)
    times, energies = np.array(fast.service_times), np.array(fast.energies)
    slow = Profile("slow", tuple(4 * times), energies=tuple(4 * energies))
    rates = (0.3 * fast.capacity, 0.3 * slow.capacity)
    joint = BinnedProblem(
        (np.array([1.0]), np.array([4.0])),
        rates,
        4,
        lambda size, factor: times[size - 1] * factor,
        tuple(energies / times),
        w2=w2,
        mixing=False,
    )
    best = solve_bins(joint, settled=1e-3).gain
    system = System((fast, slow), rates, w2)
    served, before = (
        np.mean([co_located.simulate(system, *policy_of(name, system), seed) for seed in range(2)]) / best
        for name in ("smdp", "smdp, first formed")
    )
    assert 0.99 < served < most
    assert before > first_formed


def test_the_servers_rules_gain_where_energy_has_no_weight_and_lose_nowhere_clearly_half_a_per_cent() -> None:
    record = load_record("co_located")
    assert len(record) == len(co_located.SYSTEMS) * len(co_located.LOADS) * len(co_located.WEIGHTS)
    for key, found in record.items():
        changes = (*found["to_first_formed"].values(), found["to_best"]["smdp"])
        assert max(mean - half for mean, half in changes) < 0.25, key
        assert max(mean for mean, _ in changes) < 0.6, key
        if key.endswith("; 0"):
            rarely = key in ("two, one very rare; 0.3; 0", "two, one very rare; 0.6; 0")
            assert rarely or all(mean + half < 0.0 for mean, half in changes), key
            assert found["cost"]["smdp"][0] == pytest.approx(found["cost"]["greedy"][0], rel=1e-3)
        if "; 0.9; " in key:
            assert found["to_best"]["valued"][0] > 0.0, key


@pytest.mark.parametrize("name", ["fast and slow", "three", "four"])
def test_with_a_small_weight_of_power_unequal_models_gain_at_high_load(name: str) -> None:
    mean, half = load_record("co_located")[f"{name}; 0.9; 2"]["to_best"]["smdp"]
    assert mean + half < 0.0
