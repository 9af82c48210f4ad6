"""Tests of measuring service times, with an executor whose service times are known exactly."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import isinf

import numpy as np
import pytest

from policies.profile import parse_profile
from policies.types import SpecError
from profiler.measure import Measurement, MeasurementPlan, Subject, full_plan, measure_service_times, quick_plan
from server.backends.executor import Batch, Completion
from server.energy.meters import CountingMeter, NoMeter
from tests.support.timeline import Timeline

ServiceTime = Callable[[int, int], float]  # batch size, number of earlier batches of that size -> s


class KnownExecutor:
    """Completes every batch with a given service time, and starts the one that is offered after it."""

    name = "known"

    def __init__(self, service_time: ServiceTime, meter: CountingMeter | None = None, handover: float = 0.0) -> None:
        self.sizes: list[int] = []
        self.inputs: list[object] = []
        self._service_time = service_time
        self._meter = meter
        self._timeline = Timeline(handover)

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._start(batch, done)
        return done

    def _start(self, batch: Batch, done: asyncio.Future[Completion]) -> None:
        size = len(batch.inputs)
        seconds = self._service_time(size, self.sizes.count(size))
        self.sizes.append(size)
        self.inputs += batch.inputs
        if self._meter is not None:
            self._meter.add(0.5 + 0.25 * size)
        completion = self._timeline.completed([None] * size, seconds).result()
        asyncio.get_running_loop().call_soon(self._complete, batch, completion, done)

    def _complete(self, batch: Batch, completion: Completion, done: asyncio.Future[Completion]) -> None:
        taken = None if batch.standby is None else batch.standby.take(completion.outputs)
        done.set_result(completion if taken is None else replace(completion, next_started=self._timeline.now))
        if taken is not None:
            self._start(*taken)


def run(
    executor: KnownExecutor, plan: MeasurementPlan, seed: int = 0, meter: CountingMeter | None = None
) -> Measurement:
    subject = Subject(executor, "net", ["a", "b", "c"], meter or NoMeter())
    return asyncio.run(measure_service_times(subject, plan, np.random.default_rng(seed), lambda share: None))


def affine(size: int, _: int) -> float:
    return 0.25 * size + 0.5  # exact in binary, so that means are exact too


def test_known_service_times_are_recovered_exactly() -> None:
    profile = run(KnownExecutor(affine), full_plan(6)).profile("n", "net", "here", "about")
    assert profile.service_times == tuple(affine(b, 0) for b in range(1, 7))
    assert profile.cvs == (0.0,) * 6
    assert (profile.name, profile.model, profile.device, profile.source) == ("n", "net", "here", "measured")
    assert profile.note.endswith("; about")
    assert parse_profile(profile.to_json(), "written") == profile


def test_a_quick_profile_has_every_size_by_linear_interpolation() -> None:
    plan = quick_plan(20, autotunes=False)
    profile = run(KnownExecutor(affine), plan).profile("n", "net", "here")
    assert plan.sizes == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    assert profile.service_times == pytest.approx([affine(b, 0) for b in range(1, 21)], rel=1e-12)
    assert "linear between them" in profile.note


@pytest.mark.parametrize(
    ("max_batch_size", "sizes"),
    [
        (1, (1,)),
        (5, (1, 2, 3, 4, 5)),
        (32, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)),
        (128, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)),
        (100, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100)),
    ],
)
def test_the_quick_plan_has_two_sizes_per_octave(max_batch_size: int, sizes: tuple[int, ...]) -> None:
    assert quick_plan(max_batch_size, autotunes=True).sizes == sizes
    assert quick_plan(max_batch_size, autotunes=True).warm_ups == sizes[::-1]


def test_the_full_plan_has_every_size() -> None:
    assert full_plan(40).sizes == tuple(range(1, 41))


def test_warm_ups_run_first_from_the_largest_and_do_not_count() -> None:
    executor = KnownExecutor(lambda size, earlier: 100.0 if size in (1, 8) and earlier == 0 else affine(size, 0))
    profile = run(executor, quick_plan(8, autotunes=False)).profile("n", "net", "here")
    assert executor.sizes[:5] == [8, 4, 3, 2, 1]
    assert profile.service_times[0] == affine(1, 0)
    assert profile.service_times[7] == affine(8, 0)


def test_small_batches_are_repeated_more_often() -> None:
    plan = quick_plan(16, autotunes=False)
    assert [plan.required_repeats(b) for b in (1, 2, 3, 8, 16)] == [8, 4, 3, 1, 1]


def test_the_order_is_random_but_reproducible() -> None:
    orders = []
    for seed in (1, 1, 2):
        executor = KnownExecutor(affine)
        run(executor, full_plan(8), seed)
        orders.append(executor.sizes[16:24])  # after two warm-ups of each size
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(1, 9))
    assert orders[0] != sorted(orders[0])


def test_samples_are_used_in_rotation() -> None:
    executor = KnownExecutor(affine)
    run(executor, MeasurementPlan((5,), (), min_repeats=2, max_repeats=2))
    assert executor.sizes == [5, 1, 5, 1]  # the launch of a batch of 1 ends the cycle of each pass
    assert executor.inputs == [*"abcab", "c", *"abcab", "c"]


def test_each_batch_takes_the_samples_after_those_of_the_one_before() -> None:
    executor = KnownExecutor(affine)
    run(executor, MeasurementPlan((2,), (2,), min_repeats=1, max_repeats=1))
    assert executor.inputs == [*"ab", *"ca", "b"]


def test_the_handover_to_the_next_batch_is_part_of_the_service_time() -> None:
    profile = run(KnownExecutor(affine, handover=0.125), full_plan(6)).profile("n", "net", "here")
    assert profile.service_times == tuple(affine(b, 0) + 0.125 for b in range(1, 7))


def test_batches_whose_energy_is_counted_run_alone() -> None:
    executor = KnownExecutor(affine, CountingMeter(), handover=0.125)
    profile = run(executor, full_plan(3), meter=CountingMeter()).profile("n", "net", "here")
    assert profile.service_times == tuple(affine(b, 0) for b in range(1, 4))


def test_a_noisy_size_is_repeated_until_its_mean_is_known() -> None:
    noise = np.random.default_rng(4).normal(1.0, 0.05, 1000)
    executor = KnownExecutor(lambda size, earlier: 1.0 if size == 1 else 2.0 * float(noise[earlier]))
    plan = MeasurementPlan((1, 2), (), min_repeats=5, max_repeats=500)
    calm, noisy = run(executor, plan).estimates
    assert calm.repeats == 5
    # (1.96 x 0.05 / 0.02)^2 = 24 repeats for 2 %, a few more or less in a small sample
    assert 10 < noisy.repeats + noisy.outliers < 60
    assert noisy.half_width <= 0.02
    assert noisy.mean == pytest.approx(2.0, rel=0.04)
    assert noisy.cv == pytest.approx(0.05, rel=0.5)


def test_repeats_end_at_their_maximum() -> None:
    noise = np.random.default_rng(4).uniform(0.5, 1.5, 100)
    (estimate,) = run(
        KnownExecutor(lambda size, k: float(noise[k])), MeasurementPlan((1,), (), max_repeats=12)
    ).estimates
    assert estimate.repeats + estimate.outliers == 12


def test_only_the_required_repeats_run_when_time_is_up() -> None:
    executor = KnownExecutor(lambda size, k: 1.0 + k % 2)
    (estimate,) = run(executor, MeasurementPlan((1,), (), min_repeats=3, max_time=0.0)).estimates
    assert estimate.repeats == 3


def test_an_outlier_is_dropped_and_noted() -> None:
    executor = KnownExecutor(lambda size, k: 9.0 if k == 2 else 1.0)
    measurement = run(executor, MeasurementPlan((1,), (), min_repeats=5))
    (estimate,) = measurement.estimates
    assert (estimate.mean, estimate.repeats, estimate.outliers) == (1.0, 4, 1)
    assert "1 outliers of 5 repeats dropped" in measurement.profile("n", "net", "here").note


def test_a_bimodal_device_has_no_outliers() -> None:
    executor = KnownExecutor(lambda size, k: 1.0 if k % 4 else 2.0)  # every other batch only ends a cycle
    (estimate,) = run(executor, MeasurementPlan((1,), (), min_repeats=10, max_repeats=10)).estimates
    assert (estimate.mean, estimate.outliers) == (1.5, 0)


def test_fewer_than_five_repeats_are_all_kept() -> None:
    executor = KnownExecutor(lambda size, k: 7.0 if k == 0 else 1.0)
    (estimate,) = run(executor, MeasurementPlan((1,), (), min_repeats=3, max_repeats=3)).estimates
    assert (estimate.mean, estimate.repeats) == (3.0, 3)


def test_the_spread_of_a_single_repeat_is_interpolated_from_its_neighbours() -> None:
    plan = MeasurementPlan((1, 2, 3), (), min_repeats=1, max_repeats=2, half_width=0.0)
    estimates = run(KnownExecutor(lambda size, k: size * (1.0 + k // (2 if size == 1 else 1))), plan).estimates
    middle = replace(estimates[1], cv=None, half_width=float("inf"), repeats=1)
    profile = Measurement((estimates[0], middle, estimates[2]), "none").profile("n", "net", "here")
    assert profile.cvs is not None
    assert profile.cvs[1] == pytest.approx(profile.cvs[0])
    assert "single repeats have no confidence interval" in profile.note


def test_single_repeats_of_all_sizes_have_no_spread() -> None:
    measurement = run(KnownExecutor(affine), MeasurementPlan((1, 2), (), min_repeats=1, max_repeats=1))
    assert isinf(measurement.estimates[0].half_width)
    assert measurement.profile("n", "net", "here").cvs is None


def test_counted_energy_is_recorded_as_modelled() -> None:
    meter = CountingMeter()
    profile = run(KnownExecutor(affine, meter), full_plan(4), meter=meter).profile("n", "net", "here")
    assert profile.energies == (0.75, 1.0, 1.25, 1.5)
    assert profile.energy_source == "modelled"


class Sensor(NoMeter):
    """Increases by one joule at every reading."""

    source = "nvml"
    scope = "board"

    def __init__(self) -> None:
        super().__init__()
        self.readings = 0

    def read(self) -> float | None:
        self.readings += 1
        return float(self.readings)


def test_a_sensor_is_not_read_for_single_batches() -> None:
    sensor = Sensor()
    subject = Subject(KnownExecutor(affine), "net", ["a"], sensor)
    measurement = asyncio.run(
        measure_service_times(subject, full_plan(3), np.random.default_rng(0), lambda share: None)
    )
    assert sensor.readings == 0
    assert measurement.profile("n", "net", "here").energies is None


@pytest.mark.parametrize("meter", [None, CountingMeter()])
def test_a_profile_without_a_meter_has_no_energy(meter: CountingMeter | None) -> None:
    profile = run(KnownExecutor(affine), full_plan(3), meter=meter).profile("n", "net", "here")
    assert profile.energies is None
    assert profile.energy_source == "none"


def test_a_failing_device_fails_the_measurement() -> None:
    def broken(size: int, earlier: int) -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(SpecError, match="net: a batch of 2 failed: RuntimeError: out of memory"):
        run(KnownExecutor(broken), full_plan(2))


def test_progress_increases_to_one() -> None:
    shares: list[float] = []
    noise = np.random.default_rng(4).normal(1.0, 0.05, 1000)
    subject = Subject(KnownExecutor(lambda size, k: float(noise[k])), "net", ["a"], NoMeter())
    asyncio.run(measure_service_times(subject, full_plan(5), np.random.default_rng(0), shares.append))
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < shares[-1] == 1.0
