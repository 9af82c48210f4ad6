"""The solver against the reference numbers of exact-tail.md and against closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.solver import long_truncation
from policies.profile import Profile, load_profile
from policies.solver.distributions import Gamma, distribution
from policies.solver.model import Problem
from policies.solver.solver import evaluate, solve
from policies.types import Mix, SpecError

P4 = load_profile("googlenet-tesla-p4")
SIZES = np.arange(1, 33)
STAIRCASE = Profile("staircase", tuple((1.0524e-3 + 0.3051e-3 * 8 * np.ceil(SIZES / 8)).tolist()))
PROPORTIONAL = Profile("proportional", tuple((0.3e-3 * SIZES).tolist()))


def at_load(load: float, w2: float = 0.0, profile: Profile = P4, w1: float = 1.0) -> Problem:
    return Problem(profile, load * profile.capacity, w1, w2)


def greedy(largest: int) -> list[int]:
    return list(range(largest + 1))


def static(size: int) -> list[int]:
    return [0] * size + [size]


def control_limit(limit: int, largest: int) -> list[int]:
    return [0] * limit + list(range(limit, largest + 1))


@pytest.mark.parametrize(
    ("load", "w2", "gain"),
    [
        (0.1, 1.0, 12.168155),
        (0.5, 1.0, 38.859948),
        (0.5, 500.0, 15193.151615),
        (0.9, 0.0, 9.694381),
        (0.9, 1.0, 66.130724),
        (0.9, 15.0, 836.741224),
        (0.99, 1.0, 88.632833),
    ],
)
def test_gains_of_the_reference_table(load: float, w2: float, gain: float) -> None:
    solution = solve(at_load(load, w2))
    assert solution.gain == pytest.approx(gain, abs=5.1e-7)  # half of the last printed digit
    assert solution.change <= 1e-10  # what the solver promises
    assert solution.load == pytest.approx(load, rel=1e-12)


def test_table_iii_of_the_journal_paper() -> None:
    assert solve(at_load(0.5, 1.0)).gain == pytest.approx(38.86, abs=0.005)  # half of the last printed digit


@pytest.mark.parametrize(
    ("table", "response_ms", "power"),
    [
        (static(8), 6.852, 46.287),
        (static(16), 9.770, 43.750),
        (static(32), 18.328, 42.481),
        (greedy(32), 4.954, 48.040),
    ],
)
def test_exact_means_of_the_benchmark_policies_at_load_07(table: list[int], response_ms: float, power: float) -> None:
    value = evaluate(at_load(0.7, 1.0), table)
    # half of the last printed digit
    assert 1e3 * value.mean_response_time == pytest.approx(response_ms, abs=5.1e-4)
    assert value.mean_power == pytest.approx(power, abs=5.1e-4)
    assert value.batch_size == tuple(table)


@pytest.mark.parametrize(("w2", "response_ms", "power"), [(1.6, 6.898, 44.950)])
def test_the_weight_of_table_i(w2: float, response_ms: float, power: float) -> None:
    solution = solve(at_load(0.7, w2))
    assert 1e3 * solution.mean_response_time == pytest.approx(response_ms, abs=5.1e-4)  # last printed digit
    assert solution.mean_power == pytest.approx(power, abs=5.1e-4)


@pytest.mark.parametrize("w2", [1.1, 1.2, 1.3, 1.4, 1.5])
def test_weights_from_11_to_15_are_one_point_at_load_03(w2: float) -> None:
    solution = solve(at_load(0.3, w2))
    assert 1e3 * solution.mean_response_time == pytest.approx(4.882, abs=5.1e-4)  # half of the last printed digit
    assert solution.mean_power == pytest.approx(21.113, abs=5.1e-4)


def test_the_next_weight_is_the_next_point() -> None:
    assert 1e3 * solve(at_load(0.3, 1.6)).mean_response_time == pytest.approx(5.725, abs=5.1e-4)


def test_static_8_is_rejected_where_it_is_unstable() -> None:
    with pytest.raises(SpecError, match=r"batches of 8.*\(load 0\.774\).*load 0\.900") as rejected:
        evaluate(at_load(0.9), static(8))
    assert f"{8 / P4.service_time(8):.6g} requests per second" in str(rejected.value)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize("load", [1.0, 1.3])
def test_overload_is_rejected_with_load_and_capacity(load: float) -> None:
    with pytest.raises(SpecError, match=f"load {load:g} is 1 or more.*capacity 2958.69") as rejected:
        solve(at_load(load))
    assert "\n" not in str(rejected.value)


def test_w1_of_0_is_rejected_by_the_solver_only() -> None:
    with pytest.raises(SpecError, match="w1=0 does not limit"):
        solve(at_load(0.5, 1.0, w1=0.0))
    value = evaluate(at_load(0.5, 2.0, w1=0.0), static(8))
    assert value.mean_power is not None
    assert value.gain == 2.0 * value.mean_power


def test_averages_do_not_depend_on_the_weights() -> None:
    one, other = (evaluate(at_load(0.6, w2, w1=w1), static(16)) for w1, w2 in ((1.0, 0.0), (0.3, 500.0)))
    assert one.mean_response_time == other.mean_response_time
    assert one.mean_power == other.mean_power


def test_static_batches_have_known_averages() -> None:
    value = evaluate(at_load(0.6, 1.0), static(16))
    joules = P4.energy(16)
    assert joules is not None
    # 1e-10: the solver's own tolerance
    assert value.mean_batch_size == pytest.approx(16.0, rel=1e-10)
    assert value.energy_per_request == pytest.approx(joules / 16, rel=1e-10)
    assert value.mean_power == pytest.approx(value.arrival_rate * joules / 16, rel=1e-10)


@pytest.mark.parametrize("load", [0.05, 0.5, 0.9, 0.99, 0.999])
def test_one_at_a_time_is_the_md1_queue(load: float) -> None:
    profile = Profile("single", (0.004,))
    rate = load / 0.004
    # Pollaczek and Khinchine: W = l + lambda l^2 / (2 (1 - rho)). 1e-10: the solver's own tolerance
    expected = 0.004 + rate * 0.004**2 / (2.0 * (1.0 - load))
    assert solve(Problem(profile, rate)).mean_response_time == pytest.approx(expected, rel=1e-10)
    # and so it is with larger batches at hand that the policy does not use
    value = evaluate(Problem(P4, load / P4.service_time(1)), [0, 1])
    single = P4.service_time(1) * (1.0 + load / (2.0 * (1.0 - load)))
    assert value.mean_response_time == pytest.approx(single, rel=1e-10)


@pytest.mark.parametrize("load", [0.1, 0.9, 0.99])
def test_another_distribution_gives_the_mm1_queue(load: float) -> None:
    problem = Problem(Profile("single", (0.004,)), load / 0.004, service=Gamma((1.0,)))
    # W = l / (1 - rho). 1e-10: the solver's own tolerance
    assert solve(problem).mean_response_time == pytest.approx(0.004 / (1.0 - load), rel=1e-10)


@pytest.mark.parametrize("profile", [P4, STAIRCASE, PROPORTIONAL], ids=lambda p: p.name)
@pytest.mark.parametrize("load", [0.5, 0.9, 0.97])
def test_the_state_space_is_long_enough(profile: Profile, load: float) -> None:
    problem = at_load(load, profile=profile)
    # 1e-10: the relative change at which the solver stops. The error left is smaller still, for it falls geometrically
    assert solve(problem).gain == pytest.approx(long_truncation(problem, 600), rel=1e-10)


def test_one_at_a_time_is_optimal_for_proportional_service_times() -> None:
    load, service_time = 0.97, PROPORTIONAL.service_time(1)
    solution = solve(at_load(load, profile=PROPORTIONAL))
    # M/D/1 again, which batches only delay; 1e-10: the solver's own tolerance
    expected = service_time * (1.0 + load / (2.0 * (1.0 - load)))
    assert solution.mean_response_time <= expected * (1.0 + 1e-10)
    assert solution.batch_size[-1] == 1


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_large_batches_keep_their_digits(load: float) -> None:
    sizes = np.arange(1, 129)
    profile = Profile(
        "large", tuple((1.0524e-3 + 0.3051e-3 * sizes).tolist()), energies=tuple((0.02 * (sizes + 1)).tolist())
    )
    solution = solve(at_load(load, 1.0, profile))
    # elimination on a badly chosen reference state loses all digits here; 1e-10: the solver's own tolerance
    assert solution.gain == pytest.approx(evaluate(at_load(load, 1.0, profile), solution.batch_size).gain, rel=1e-10)
    assert solution.gain < evaluate(at_load(load, 1.0, profile), greedy(128)).gain


def test_the_table_ends_where_the_tail_begins() -> None:
    table = solve(at_load(0.9, 1.0)).batch_size
    assert table[-1] == 32
    assert table[-2] != 32


def test_a_minimum_batch_size_is_kept() -> None:
    problem = Problem(P4, 0.3 * P4.capacity, 1.0, 0.5, min_batch_size=6, max_batch_size=16)
    solution = solve(problem)
    assert all(action == 0 or 6 <= action <= 16 for action in solution.batch_size)
    assert solution.gain <= evaluate(problem, control_limit(6, 16)).gain
    with pytest.raises(SpecError, match=r"neither 0 nor a batch size 6\.\.16"):
        evaluate(problem, greedy(16))


def test_without_energies_the_busy_share_takes_the_place_of_power() -> None:
    solution = solve(at_load(0.5, profile=STAIRCASE))
    assert 0.0 < solution.mean_power < 1.0
    assert solution.energy_per_request == pytest.approx(solution.mean_power / solution.arrival_rate)
    assert solution.gain == 1e3 * solution.mean_response_time


@pytest.mark.parametrize("w2", [100.0, 1e4, 1e6])
def test_heavy_weights_of_power_find_the_batch_of_least_energy(w2: float) -> None:
    profile = Profile("uneven", (1 / 256, 1 / 128, 1 / 256, 1 / 128), energies=(0.25, 1.0, 0.5, 1.0))
    solution = solve(Problem(profile, 48.0, 1.0, w2))
    assert solution.mean_power == pytest.approx(48.0 * 0.5 / 3, rel=1e-9)  # batches of 3, 0.5 J each


def test_a_cheaper_size_of_lower_throughput_can_be_the_tail() -> None:
    # 3 has the largest throughput and 2 an eighth of the energy: at this weight 3 is not worth it in any queue that is
    # ever seen, while 2 alone is loaded to 0.9976
    profile = Profile("cheap pairs", (1.185e-3,) * 3, energies=(1.0, 0.125, 0.5))
    problem = Problem(profile, 0.66506 * profile.capacity, 1.0, 1e4, service=Gamma((1.0,)))
    assert solve(problem).gain <= evaluate(problem, [0, 0, 2]).gain * (1.0 + 1e-10)


@pytest.mark.parametrize(("probability", "pure"), [(0.0, 4), (1.0, 8)])
def test_a_mix_of_probability_0_or_1_is_one_of_its_tables(probability: float, pure: int) -> None:
    four, eight = control_limit(4, 32), control_limit(8, 32)
    mixed = evaluate(at_load(0.3, 1.0), four, Mix(probability, eight))
    assert mixed.gain == pytest.approx(evaluate(at_load(0.3, 1.0), control_limit(pure, 32)).gain, rel=1e-12)


def test_a_mix_of_two_waits_is_exact() -> None:
    # one request at a time; an arrival at an idle device is launched with probability 1 - q, else waits for the next:
    # with l so short that there are no arrivals during a service, a pair of arrivals waits 1 / lambda with probability
    # q, and a launched single leaves the next arrival the first again: a fraction q / (1 + q) of the requests waits
    profile = Profile("instant", (1e-12, 1e-12))
    mixed = evaluate(Problem(profile, 1.0), [0, 1, 2], Mix(0.25, [0, 0, 2]))
    assert mixed.mean_response_time == pytest.approx(0.25 / 1.25, rel=1e-9)
    assert mixed.mean_batch_size == pytest.approx(1.25, rel=1e-9)


def test_tables_with_different_last_actions_cannot_be_mixed() -> None:
    with pytest.raises(SpecError, match="end in batches of 8 and 4"):
        evaluate(at_load(0.3), static(8), Mix(0.5, static(4)))


ENERGIES = tuple((0.019899 * SIZES + 0.019603).tolist())
ODD_PROFILES = [
    Profile("logarithmic", tuple((1.36e-3 + 2.5e-3 * np.log(SIZES)).tolist()), energies=ENERGIES),
    Profile("constant", (6.0859e-3,) * 32, energies=tuple((0.105 * np.log(SIZES) + 0.06).tolist())),
    Profile("staircase", STAIRCASE.service_times, energies=ENERGIES),
]


@pytest.mark.parametrize("service", ["deterministic", "erlang2", "hyperexponential"])
@pytest.mark.parametrize("profile", ODD_PROFILES, ids=lambda profile: profile.name)
@pytest.mark.parametrize(("load", "w2"), [(0.5, 500.0), (0.995, 1.0)])
def test_gains_agree_with_a_long_truncation(service: str, profile: Profile, load: float, w2: float) -> None:
    problem = replace(at_load(load, w2, profile), service=distribution(service, profile))
    assert solve(problem).gain == pytest.approx(long_truncation(problem, 400), rel=1e-9)


def test_a_minimum_batch_size_increases_the_cost() -> None:
    free, bound = solve(at_load(0.3, 1.0)), solve(replace(at_load(0.3, 1.0), min_batch_size=6))
    assert min(action for action in bound.batch_size if action) == 6
    assert bound.gain > free.gain
    assert bound.gain == pytest.approx(evaluate(at_load(0.3, 1.0), bound.batch_size).gain, rel=1e-10)
