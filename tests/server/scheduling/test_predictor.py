"""Predicted beside measured response times, on a virtual clock."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from policies.catalog import choose
from policies.planning.prediction import Prediction, Traffic, predict
from policies.profile import Profile
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.levels import Levels
from server.scheduling.predictor import Comparison, Predictor
from server.telemetry.metrics import Metrics
from tests.server.scheduling.test_controller import Inline
from tests.support.fakes import UNLIMITED, FakeExecutor, submit
from tests.support.virtual_clock import virtual_loop

ASSUMED = Profile("assumed", (0.01, 0.015, 0.02, 0.025))


class Counting:
    """Predicts, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, models: Mapping[str, Traffic]) -> Mapping[str, Prediction]:
        self.calls += 1
        return predict(models)


def compare(
    truth: Profile, gaps: Callable[[np.random.Generator], float], duration: float = 130.0, levels: int = 1
) -> tuple[Comparison | None, int, str]:
    """The last comparison, the number of predictions, and the metrics, of a device that serves by `truth`.

    One of `levels` requests is of the first level, all others are of the last one.
    """
    loop, rng, counting = virtual_loop(), np.random.default_rng(0), Counting()

    async def main() -> tuple[Comparison | None, str]:
        metrics = Metrics()
        chosen = {"m": choose("greedy", ASSUMED), "idle": choose("greedy", ASSUMED)}
        known = {"m": Levels(levels)}
        dispatcher = Dispatcher(FakeExecutor(truth), chosen, metrics, loop.time, UNLIMITED, levels=known)
        predictor = Predictor(dispatcher, metrics, counting, Inline())
        metrics.observe_batches("fake", predictor.completed)
        tasks = [asyncio.ensure_future(dispatcher.run()), asyncio.ensure_future(predictor.run())]
        while loop.time() < duration:
            await asyncio.sleep(gaps(rng))
            submit(dispatcher, "m", [1.0], level=1 if rng.integers(levels) == 0 else levels)
        for task in tasks:
            task.cancel()
        return predictor.comparison("m"), metrics.render().decode()

    try:
        comparison, metrics = loop.run_until_complete(main())
    finally:
        loop.close()
    return comparison, counting.calls, metrics


def poisson(rng: np.random.Generator) -> float:
    return float(rng.exponential(1 / 60))


@pytest.mark.slow
def test_predicted_is_measured_on_a_device_that_keeps_its_profile(caplog: pytest.LogCaptureFixture) -> None:
    found, calls, metrics = compare(ASSUMED, poisson)
    assert found is not None
    assert found.rate == pytest.approx(60.0, rel=0.1)
    assert found.predicted.mean == pytest.approx(found.measured.mean, rel=0.1)
    assert found.predicted.p95 == pytest.approx(found.measured.p95, rel=0.15)
    assert found.predicted.batch_size == pytest.approx(found.measured.batch_size, rel=0.1)
    assert found.neighbours == {}
    assert calls <= 7, "not at each comparison"
    assert 'batchwright_predicted_response_seconds{device="fake",model="m",statistic="p95"}' in metrics
    assert "is predicted" not in caplog.text


@pytest.mark.slow
def test_each_level_is_predicted_beside_what_is_measured() -> None:
    found, calls, _ = compare(ASSUMED, lambda rng: float(rng.exponential(1 / 140)), levels=2)
    assert found is not None
    assert found.predicted.levels.keys() == found.measured.levels.keys() == {1, 2}
    for level, (mean, _) in found.predicted.levels.items():
        assert mean == pytest.approx(found.measured.levels[level][0], rel=0.15)
    assert found.predicted.levels[1][0] < 0.9 * found.predicted.levels[2][0]
    assert calls <= 7, "not at each comparison"


@pytest.mark.slow
def test_a_lasting_difference_is_logged_once_with_contention_as_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    slower = Profile("slower", tuple(1.5 * t for t in ASSUMED.service_times))
    with caplog.at_level(logging.WARNING):
        found, *_ = compare(slower, poisson)  # without a controller nothing is learned
    assert found is not None
    assert found.measured.mean > 1.3 * found.predicted.mean
    (line,) = [record.message for record in caplog.records if "is predicted" in record.message]
    assert "1.50 times as long as learned" in line


def test_arrivals_that_are_not_poisson_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def bursts(rng: np.random.Generator) -> float:
        return 0.0 if rng.random() < 0.9 else float(rng.exponential(10 / 60))

    with caplog.at_level(logging.WARNING):
        compare(ASSUMED, bursts)
    assert "arrivals are not Poisson" in caplog.text


@pytest.mark.parametrize(("factor", "again"), [(1.0, 0), (1.03, 0), (1.4, 1)])
def test_a_prediction_is_made_again_within_seconds_when_the_device_is_slower(factor: float, again: int) -> None:
    loop, counting, learned = virtual_loop(), Counting(), [ASSUMED]

    async def main() -> int:
        metrics = Metrics()
        dispatcher = Dispatcher(FakeExecutor(ASSUMED), {"m": choose("greedy", ASSUMED)}, metrics, loop.time, UNLIMITED)
        dispatcher.learned = lambda _: learned[0]
        predictor = Predictor(dispatcher, metrics, counting, Inline())
        metrics.observe_batches("fake", predictor.completed)
        tasks = [asyncio.ensure_future(dispatcher.run()), asyncio.ensure_future(predictor.run())]
        counts = []
        for end in (66.0, 81.0):
            while loop.time() < end:
                await asyncio.sleep(1 / 60)
                submit(dispatcher, "m", [1.0])
            counts.append(counting.calls)
            learned[0] = replace(ASSUMED, service_times=tuple(factor * t for t in ASSUMED.service_times))
        for task in tasks:
            task.cancel()
        return counts[1] - counts[0]

    try:
        assert loop.run_until_complete(main()) == again
    finally:
        loop.close()


def test_few_requests_are_not_compared() -> None:
    found, *_ = compare(ASSUMED, lambda _: 2.0)
    assert found is None


def test_the_share_within_a_bound_is_simulated_for_slower_batches_at_the_latest_rate() -> None:
    loop, rng = virtual_loop(), np.random.default_rng(0)

    async def main() -> list[float | None]:
        metrics, bounded = Metrics(), replace(choose("timeout:30", ASSUMED), slo=0.05)
        dispatcher = Dispatcher(FakeExecutor(ASSUMED), {"m": bounded}, metrics, loop.time, UNLIMITED)
        predictor = Predictor(dispatcher, metrics, predict, Inline())
        metrics.observe_batches("fake", predictor.completed)
        task = asyncio.ensure_future(dispatcher.run())
        shares = [await predictor.share_without_waiting("m", 1.0)]
        while loop.time() < 10.0:
            await asyncio.sleep(poisson(rng))
            submit(dispatcher, "m", [1.0])
        shares += [await predictor.share_without_waiting("m", slower) for slower in (1.0, 2.5)]
        dispatcher.mean_rate = lambda _: 400.0  # a burst, of which few answers are known
        shares.append(await predictor.share_without_waiting("m", 1.0))
        task.cancel()
        measured = predictor.share_within("m", 0.035, 5.0)
        assert measured is not None
        assert 0.1 < measured < 0.9, "it waits for up to 30 ms"
        assert predictor.share_within("m", 0.035, 9.9) is None
        return shares

    try:
        none, now, slower, burst = loop.run_until_complete(main())
    finally:
        loop.close()
    assert none is None
    assert now is not None
    assert slower is not None
    assert burst is not None
    assert now > 0.95, "the policy in use waits, and is not what is simulated"
    assert slower < 0.8
    assert burst < 0.1
