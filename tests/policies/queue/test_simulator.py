from math import inf

import numpy as np
import pytest

from policies.profile import load_profile
from policies.queue.arrivals import poisson
from policies.queue.batcher import Batcher
from policies.queue.monitor import NoMonitor
from policies.queue.simulator import Service, run, simulate
from policies.rules.control_limit import ControlLimit, greedy, serial, static
from policies.types import BatchKey, Launch, Request

M = BatchKey("m")
P4 = load_profile("googlenet-tesla-p4")


def arrived(*instants: float, **fields: float) -> list[Request]:
    return [Request(i, at, M, **fields) for i, at in enumerate(instants)]  # type: ignore[arg-type]


def batcher(policy: ControlLimit) -> Batcher:
    return Batcher(policy, {"m": 32}, NoMonitor())


def launches(policy: ControlLimit, requests: list[Request], service: float) -> list[tuple[float, float, list[int]]]:
    return [
        (s.start, s.finish, [r.id for r in s.launch.requests])
        for s in simulate(batcher(policy), requests, lambda _: service)
    ]


def test_arrivals_during_a_service_form_the_next_batch() -> None:
    assert launches(greedy(32), arrived(1.0, 1.2, 1.5, 4.0), 1.0) == [
        (1.0, 2.0, [0]),
        (2.0, 3.0, [1, 2]),
        (4.0, 5.0, [3]),
    ]


def test_the_queue_is_drained_after_the_last_arrival() -> None:
    assert launches(static(2), arrived(1.0, 1.2, 1.5), 1.0) == [(1.2, 2.2, [0, 1]), (2.2, 3.2, [2])]


def test_the_time_out_counts_from_arrival_while_the_device_is_busy() -> None:
    policy = ControlLimit(4, 4, timeout=0.5)
    assert launches(policy, arrived(0.0, 0.6, 1.4), 1.0) == [(0.5, 1.5, [0]), (1.5, 2.5, [1, 2])]


def test_expired_requests_are_never_run() -> None:
    requests = arrived(0.0, 0.1, 0.2)
    requests[1].expires = 0.9
    assert launches(greedy(32), requests, 1.0) == [(0.0, 1.0, [0]), (1.0, 2.0, [2])]


def test_serial_service_of_poisson_arrivals_is_an_m_d_1_queue() -> None:
    # Pollaczek-Khinchine: l + lambda l^2 / (2 (1 - rho)) = 7.5 ms
    instants = poisson(100.0, 400.0, np.random.default_rng(3)).tolist()
    result = run(batcher(serial()), arrived(*instants), lambda _: 0.005, lambda _: None)
    batches = result.responses[: len(result.responses) // 100 * 100].reshape(100, -1).mean(axis=1)
    error = batches.std() / 10  # standard error from a hundred batch means
    assert result.responses.mean() == pytest.approx(0.0075, abs=4 * error)
    assert error < 0.0001


def test_static_and_greedy_agree_with_the_exact_means_of_the_p4() -> None:
    # exact-tail: at rho 0.7 static 8 6.852 ms / 46.287 W, greedy 4.954 ms / 48.040 W
    for policy, response, power in ((static(8), 6.852e-3, 46.287), (greedy(32), 4.954e-3, 48.040)):
        rate = 0.7 * P4.capacity
        instants = poisson(rate, 60_000 / rate, np.random.default_rng(5)).tolist()
        result = run(batcher(policy), arrived(*instants), service_time, energy)
        assert result.mean_power is not None
        assert result.responses.mean() == pytest.approx(response, rel=0.02)  # about 0.5% standard error at this length
        assert result.mean_power == pytest.approx(power, rel=0.01)


def service_time(launch: Launch) -> float:
    return P4.service_time(len(launch.requests))


def energy(service: Service) -> float | None:
    return P4.energy(len(service.launch.requests))


def test_the_result_of_a_run() -> None:
    result = run(batcher(static(2)), arrived(1.0, 1.2, 1.5, 1.6), lambda _: 1.0, lambda _: 3.0)
    assert result.scheduled == 4
    assert result.responses == pytest.approx([1.2, 1.0, 1.7, 1.6])
    assert result.waits == pytest.approx([0.2, 0.0, 0.7, 0.6])
    assert result.batch_sizes.tolist() == [2, 2]
    assert result.elapsed == pytest.approx(2.2)
    assert result.mean_power == pytest.approx(6.0 / 2.2)


def test_a_profile_without_energies_has_no_power() -> None:
    result = run(batcher(greedy(4)), arrived(0.0), lambda _: 1.0, lambda _: None)
    assert result.mean_power is None


def test_an_expired_request_is_not_served() -> None:
    requests = arrived(0.0, expires=0.5)
    assert launches(ControlLimit(2, 2, inf), requests, 1.0) == []
