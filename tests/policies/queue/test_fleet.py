"""Simulation of several devices: routing, and agreement with a single device."""

from collections.abc import Sequence

import numpy as np
import pytest

from policies.catalog import ModelPolicy, choose, solved
from policies.profile import Profile, load_profile
from policies.queue.arrivals import poisson
from policies.queue.batcher import Batcher
from policies.queue.fleet import FleetRun, random_routing, run_fleet, shortest_expected_delay
from policies.queue.simulator import Run, Station, estimate, run
from policies.solver.model import Problem
from policies.solver.solver import solve
from policies.types import BatchKey, Launch, Request

M = BatchKey("m")
P4 = load_profile("googlenet-tesla-p4")
FAST = Profile("fast", (1.0, 1.5, 2.0, 2.5), energies=(4.0, 5.0, 6.0, 7.0))
SLOW = Profile("slow", (2.0, 3.0, 4.0, 5.0), energies=(1.0, 2.0, 3.0, 4.0))


def station(chosen: ModelPolicy) -> Station:
    profile = chosen.profile

    def service_time(launch: Launch) -> float:
        return profile.service_time(len(launch.requests))

    batcher = Batcher(chosen.policy, {"m": profile.max_batch_size}, chosen.monitor)
    return Station(batcher, service_time, lambda service: profile.energy(len(service.launch.requests)))


def arrived(instants: Sequence[float]) -> list[Request]:
    return [Request(i, at, M) for i, at in enumerate(instants)]


def expected(spec: str, profiles: Sequence[Profile], instants: Sequence[float]) -> FleetRun:
    stations = [station(choose(spec, profile)) for profile in profiles]
    return run_fleet(stations, arrived(instants), shortest_expected_delay(stations, [{"m": each} for each in profiles]))


def same(one: Run, other: Run) -> None:
    for name in ("responses", "arrivals", "waits", "batch_sizes", "finishes", "energies"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert (one.scheduled, one.elapsed) == (other.scheduled, other.elapsed)


@pytest.mark.parametrize("spec", ["greedy", "static:8", "timeout:2", "rate-matching", "smdp:w2=1"])
def test_a_fleet_of_one_equals_the_single_device(spec: str) -> None:
    instants = poisson(0.7 * P4.capacity, 2.0, np.random.default_rng(1)).tolist()
    alone = station(choose(spec, P4))
    single = run(alone.batcher, arrived(instants), alone.service_time, alone.energy)
    fleet = expected(spec, [P4], instants)
    same(fleet.whole, single)
    same(fleet.devices[0], single)


def test_each_request_is_routed_by_expected_delay_and_served_once() -> None:
    # at 0.6 the fast one has 0.4 to go and then two to serve, 1.9; the slow one 2; at 0.7 it is 0.3 and three, 2.3
    fleet = expected("greedy", [FAST, SLOW], [0.0, 0.5, 0.6, 0.7])
    fast, slow = fleet.devices
    assert fast.responses.tolist() == pytest.approx([1.0, 2.0, 1.9])
    assert slow.responses.tolist() == pytest.approx([2.0])
    assert fleet.whole.arrivals.tolist() == [0.0, 0.5, 0.6, 0.7]
    assert fleet.whole.batch_sizes.tolist() == [1, 2, 1]


def test_the_first_of_equal_idle_devices_is_used() -> None:
    fleet = expected("greedy", [FAST] * 3, [0.0, 0.1, 0.2, 5.0])
    assert [each.arrivals.tolist() for each in fleet.devices] == [[0.0, 5.0], [0.1], [0.2]]


def test_each_device_drains_after_the_last_arrival() -> None:
    fleet = expected("static:3,max_wait_ms=inf", [FAST, FAST], [0.0, 0.1])
    assert [each.responses.tolist() for each in fleet.devices] == [pytest.approx([1.1]), pytest.approx([1.0])]


def test_the_runs_of_the_devices_add_up_to_the_whole() -> None:
    fleet = expected("timeout:500", [FAST, SLOW], poisson(1.5, 200.0, np.random.default_rng(2)).tolist())
    assert sum(each.scheduled for each in fleet.devices) == fleet.whole.scheduled == len(fleet.whole.responses)
    assert all(each.scheduled > 20 for each in fleet.devices)
    together = np.sort(np.concatenate([each.responses for each in fleet.devices]))
    assert np.array_equal(together, np.sort(fleet.whole.responses))
    assert sum(each.mean_power or 0.0 for each in fleet.devices) == pytest.approx(fleet.whole.mean_power)
    assert (np.diff(fleet.whole.finishes) >= 0).all()


def test_devices_measure_the_rate_of_their_own_share() -> None:
    rate, seconds = 4000.0, 2.0
    stations = [station(choose("greedy", P4)) for _ in range(2)]
    instants = poisson(rate, seconds, np.random.default_rng(3)).tolist()
    run_fleet(stations, arrived(instants), random_routing(stations, [3.0, 1.0], np.random.default_rng(4)))
    measured = [each.batcher.monitor.mean_rates(seconds)[M] for each in stations]
    assert measured == pytest.approx([3000.0, 1000.0], rel=0.1)  # of 2,000 arrivals at least: 2.2 per cent


def test_random_routing_has_the_exact_averages_at_each_share() -> None:
    share = Problem(P4, 0.6 * P4.capacity, w2=1.0)
    exact = solve(share)
    stations = [station(solved(exact.batch_size, P4)) for _ in range(3)]
    instants = poisson(3 * share.arrival_rate, 12.0, np.random.default_rng(5)).tolist()
    fleet = run_fleet(stations, arrived(instants), random_routing(stations, [1.0] * 3, np.random.default_rng(6)))
    mean = estimate(fleet.whole.responses, lambda block: float(block.mean()))
    assert abs(mean.value - exact.mean_response_time) < 5 * mean.standard_error
    assert mean.standard_error < 0.01 * exact.mean_response_time  # so that the line above can fail
    assert fleet.whole.mean_power == pytest.approx(3 * (exact.mean_power or 0.0), rel=0.01)
    best = run_fleet(
        stations := [station(solved(exact.batch_size, P4)) for _ in range(3)],
        arrived(instants[: len(instants) // 4]),
        shortest_expected_delay(stations, [{"m": P4}] * 3),
    )
    assert best.whole.responses.mean() < mean.value - 5 * mean.standard_error, (
        "routing by expected delay is faster than at random"
    )
