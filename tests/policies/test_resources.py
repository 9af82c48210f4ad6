"""The resource that goals save: energy, CPU time or busy time."""

import json
from dataclasses import replace

import numpy as np
import pytest

from policies.adaptation.drift import DriftDetector
from policies.catalog import choose
from policies.objectives.bounds import solve_within
from policies.objectives.frontier import PowerBound
from policies.objectives.table import parse_table, solve_table, to_json
from policies.percentile.ages import ResponseBounds
from policies.planning.savings import savings
from policies.profile import RESOURCES, Profile, load_profile, parse_profile, resource_of, shipped_profiles
from policies.solver.model import Problem
from policies.solver.solver import solve
from policies.types import ParameterError, SpecError

TIMES = tuple(0.010 + 0.004 * b for b in range(1, 9))
CPU_TIMES = tuple(0.020 + 0.006 * b for b in range(1, 9))
BUSY = Profile("busy", TIMES)
CPU = replace(BUSY, name="cpu", cpu_times=CPU_TIMES)
METERED = replace(CPU, name="metered", energies=tuple(0.5 + 0.1 * b for b in range(1, 9)))


def test_the_first_known_resource_is_saved_unless_another_is_chosen() -> None:
    assert [each.saved for each in (METERED, CPU, BUSY)] == list(RESOURCES)
    assert [each.rate_unit for each in (METERED, CPU, BUSY)] == ["W", "cores", "busy share"]
    assert [each.costs for each in (METERED, CPU, BUSY)] == [METERED.energies, CPU_TIMES, TIMES]
    assert METERED.saving("busy_time").costs == TIMES
    assert METERED.saving(None) is METERED
    assert METERED.saving("cpu_time").truncated(3).costs == CPU_TIMES[:3]


@pytest.mark.parametrize(
    ("profile", "resource", "key"), [(CPU, "energy", "energy_j"), (BUSY, "cpu_time", "cpu_time_s")]
)
def test_a_resource_that_a_profile_lacks_is_an_error_with_the_remedy(profile: Profile, resource: str, key: str) -> None:
    with pytest.raises(ParameterError, match=f"resource={resource} is not in profile '{profile.name}'; .*{key}"):
        profile.saving(resource_of(resource))
    with pytest.raises(ParameterError, match=r"resource='money' is none of energy, cpu_time, busy_time"):
        resource_of("money")


def test_a_profile_file_keeps_cpu_times_and_the_resource() -> None:
    chosen = CPU.saving("busy_time")
    assert parse_profile(chosen.to_json(), "file") == chosen
    assert parse_profile(BUSY.to_json(), "file") == BUSY
    broken = json.loads(BUSY.to_json()) | {"resource": "cpu_time"}
    with pytest.raises(SpecError, match="resource is cpu_time, but there is no cpu_time_s"):
        parse_profile(json.dumps(broken), "file")


@pytest.mark.parametrize("profile", [CPU, BUSY])
def test_any_resource_is_solved_for_as_energy_is(profile: Profile) -> None:
    as_energy = Problem(profile.charged, 80.0, w2=3.0)
    ours = replace(as_energy, profile=profile)
    assert solve(ours) == solve(as_energy)
    for bound in (ResponseBounds(((0.08, 0.95),)), PowerBound(0.9 * solve(replace(ours, w2=0.0)).mean_power)):
        assert solve_within(ours, bound) == solve_within(as_energy, bound)


def test_the_busy_share_of_the_fastest_policy_is_its_batches_times_their_length() -> None:
    found = solve(Problem(BUSY, 80.0))
    assert found.mean_power == pytest.approx(80.0 / found.mean_batch_size * 0.010 + 80.0 * 0.004, rel=1e-9)


def test_a_policy_file_keeps_the_resource_and_its_figures() -> None:
    table = solve_table(Problem(CPU, 1.0, w2=5.0), [0.3, 0.6])
    text = to_json(table)
    assert '"mean_resource"' in text
    assert '"mean_power_w"' not in text
    assert parse_table(text, "file") == table


def observed(detector: DriftDetector, factor: float, batches: int) -> None:
    rng = np.random.default_rng(1)
    for size in rng.integers(1, 9, batches).tolist():
        detector.observe_batch(size, TIMES[size - 1] * float(rng.normal(1.0, 0.03)))
        detector.observe_cpu_time(size, factor * CPU_TIMES[size - 1] * float(rng.normal(1.0, 0.05)))


def test_cpu_times_are_learned_and_adopted_where_they_count() -> None:
    detector = DriftDetector(BUSY)
    observed(detector, 1.0, 64)
    assert detector.refit(costs=False) is None
    assert detector.learned.cpu_times == pytest.approx(CPU_TIMES, rel=0.1)
    assert detector.profile.saved == "busy_time"
    refit = detector.refit()
    assert refit is not None
    assert refit.profile.saved == "cpu_time"
    assert refit.profile.costs == pytest.approx(CPU_TIMES, rel=0.1)


def test_a_change_of_the_cpu_times_is_drift_and_noise_is_none() -> None:
    detector = DriftDetector(CPU)
    observed(detector, 1.0, 3000)
    assert detector.refit() is None
    observed(detector, 1.6, 3000)
    refit = detector.refit()
    assert refit is not None
    assert [drift.quantity for drift in refit.drifts] == ["CPU times"]
    assert refit.profile.costs[3] == pytest.approx(1.6 * CPU_TIMES[3], rel=0.1)


def test_cpu_times_are_refitted_where_they_are_saved() -> None:
    detector = DriftDetector(METERED)
    observed(detector, 2.0, 64)
    assert detector.refit() is None, "energy is saved"
    detector = DriftDetector(METERED.saving("cpu_time"))
    observed(detector, 2.0, 64)
    refit = detector.refit()
    assert refit is not None
    assert refit.profile.costs == pytest.approx([2.0 * t for t in CPU_TIMES], rel=0.15)


def test_a_weight_for_busy_time_is_not_one_for_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.3, 0.7])
    assert choose("smdp:slo_p95_ms=70", BUSY).weighs_costs
    assert not choose("smdp:w2=5", BUSY).weighs_costs, "its unit would change when CPU times become known"
    assert choose("smdp:w2=5", CPU).weighs_costs
    assert not choose("auto", CPU).weighs_costs
    with pytest.raises(SpecError, match="power_cap_w is in W, but profile 'cpu' saves cpu_time; give resource_cap"):
        choose("smdp:power_cap_w=40", CPU)


@pytest.mark.slow
def test_what_a_goal_would_save_is_computed_where_there_is_none() -> None:
    auto = choose("auto", CPU)
    found = savings(auto, 60.0)
    assert found is not None
    assert found.limit == pytest.approx(0.07)
    assert found.before == pytest.approx(solve(Problem(CPU, 60.0)).mean_power)
    assert found.after == solve_within(Problem(CPU, 60.0), ResponseBounds(((0.07, 0.95),))).mean_power
    assert f"{found.after:.2g} cores at the present rate instead of {found.before:.2g}" in str(found)
    for other in ("smdp:slo_p95_ms=70", "static:8", "greedy"):
        assert savings(choose(other, CPU), 60.0) is None, "not the policy that the line compares with"
    assert savings(auto, 0.1) is None
    assert savings(auto, 2.0 * CPU.capacity) is None


def test_the_shipped_profiles_save_energy_where_they_have_any() -> None:
    for profile in map(load_profile, shipped_profiles()):
        assert profile.saved == ("busy_time" if profile.energies is None else "energy")
