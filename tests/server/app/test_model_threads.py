"""The choice of the number of threads, by times of one batch."""

import asyncio
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.app.model_threads import (
    Known,
    ModelThreads,
    better_threads,
    calls_have_changed,
    cheapest_threads,
    have_changed,
)
from server.backends.worker_device import Cost, WorkerDevice


@pytest.mark.parametrize(
    ("times", "present", "better"),
    [
        ({1: 20.0, 2: 75.0}, 2, 1),  # a processor is taken
        ({1: 20.0, 2: 75.0}, 1, 1),
        ({1: 76.0, 2: 50.0}, 1, 2),  # two were as slow as one when the model was loaded
        ({1: 76.0, 2: 79.0}, 2, 2),  # other work of a moment,
        ({1: 20.0, 2: 13.0}, 1, 2),  # it is free again
        ({1: 20.0, 2: 28.0}, 2, 2),  # too little for a change
        ({1: 1.0e-3, 2: 0.7e-3}, 1, 1),  # a wait of the threads would take longer
        ({1: 1.0e-3, 2: 0.6e-3}, 1, 2),  # large batches gain more than a wait
    ],
)
def test_the_number_of_threads_changes_where_it_pays(times: dict[int, float], present: int, better: int) -> None:
    assert better_threads(times, present) == better


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ((0.02, 1.0), (0.02, 1.2), False),
        ((0.02, 1.0), (0.04, 1.0), True),  # it was learned
        ((0.02, 1.0), (0.012, 1.0), True),
        ((0.02, 1.0), (0.02, 2.0), True),  # the latest batches, before it is learned
        ((0.02, 1.0), (0.02, 0.5), True),
        ((0.02, 2.0), (0.02, 2.0), False),  # no batches since the comparison
        ((0.02, 2.0), (0.02, 2.1), True),
    ],
)
def test_threads_are_compared_when_service_times_have_changed(
    before: tuple[float, float], now: tuple[float, float], changed: bool
) -> None:
    assert have_changed(Known(*before), Known(*now)) == changed


@given(st.dictionaries(st.integers(1, 64), st.floats(0.001, 10.0), min_size=1), st.data())
def test_the_number_of_threads_does_not_go_back_for_the_same_times(
    times: dict[int, float], data: st.DataObject
) -> None:
    seen = [data.draw(st.sampled_from(sorted(times)))]
    while (following := better_threads(times, seen[-1])) != seen[-1]:
        assert following not in seen
        seen.append(following)


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ((0.0, 0.1), (0.0, 0.1), False),
        ((0.0, 0.1), (5.0, 0.1), True),  # it is known now
        ((5.0, 0.1), (6.0, 0.1), False),
        ((5.0, 0.1), (7.2, 0.1), True),
        ((8.0, 0.1), (5.0, 0.1), True),
        ((1.0, 0.1), (1.9, 0.1), False),  # as the few requests of ten seconds vary
        ((5.0, 0.1), (5.0, 0.2), True),  # another bound
    ],
)
def test_it_is_decided_again_when_the_rate_or_the_bound_has_changed(
    before: tuple[float, float], now: tuple[float, float], changed: bool
) -> None:
    assert calls_have_changed(Known(0.02, 1.0, *before), Known(0.02, 1.0, *now)) == changed


COSTS = {1: Cost(0.036, 0.036), 2: Cost(0.022, 0.048), 4: Cost(0.012, 0.050)}


@pytest.mark.parametrize(
    ("present", "kept", "chosen"),
    [
        (4, lambda slower: 0.99, 1),
        (4, lambda slower: 0.99 if slower < 2.0 else 0.90, 4),  # two save too little,
        (2, lambda slower: 0.99 if slower < 1.1 else 0.90, 2),  # but are kept
        (4, lambda slower: 0.96, 4),  # with one it would soon be missed,
        (1, lambda slower: 0.96, 1),  # but is kept
        (1, lambda slower: 0.94 if slower == 1.0 else 0.90, 4),
        (1, lambda slower: 0.94 if slower == 1.0 else 0.99, 4),
        (1, lambda slower: None, 1),  # no requests
    ],
)
def test_cpu_time_is_saved_while_the_bound_is_kept(
    present: int, kept: Callable[[float], float | None], chosen: int
) -> None:
    async def predict(slower: float) -> float | None:
        return kept(slower)

    assert asyncio.run(cheapest_threads(COSTS, 4, present, 0.95, predict)) == chosen


class Threaded(WorkerDevice):
    """A device that uses as many threads as it is told to."""

    def __init__(self) -> None:
        self.threads = 4

    def use_threads(self, count: int) -> bool:
        self.threads = count
        return True


class Machine(ModelThreads):
    """A model with a bound on four processors, one request of which gains too little from them for a change back."""

    def __init__(self) -> None:
        self.device, self.rate, self.predicted, self.measured, self.compared = Threaded(), 100.0, 0.99, 0.99, 0
        profile = SimpleNamespace(saved="cpu_time")
        chosen: Any = SimpleNamespace(bounds_share=True, parameters={}, profile=profile, slo=0.1, share=0.95)
        learned = SimpleNamespace(service_times=[0.0012])
        dispatcher: Any = SimpleNamespace(device="d", chosen={"m": chosen}, learned=lambda _: learned)
        dispatcher.latest_ratio, dispatcher.mean_rate = lambda _: 1.0, lambda _: self.rate
        predictor = SimpleNamespace(share_without_waiting=self._predict, share_within=lambda *_: self.measured)
        inference: Any = SimpleNamespace(models={"m": SimpleNamespace(id="m")}, predictors={"d": predictor})
        backend: Any = SimpleNamespace(devices=SimpleNamespace(of=lambda _: self.device))
        super().__init__("m", dispatcher, backend, inference, asyncio.Lock())

    async def _predict(self, *_: object) -> float:
        return self.predicted

    async def _compare(self, device: WorkerDevice) -> None:
        self.compared += 1
        self._costs = {1: Cost(0.0017, 0.0017), 4: Cost(0.0012, 0.0048)}

    async def _between(self, work: Callable[[], Any]) -> Any:
        return work()

    def after(self, rate: float, predicted: float = 0.99, measured: float = 0.99, settled: bool = True) -> int:
        """The number of threads after a look."""
        self.rate, self.predicted, self.measured = rate, predicted, measured
        self._settled = 0.0 if settled else inf
        asyncio.run(self._look())
        return self.device.threads or 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("server.app.model_threads.available_cpus", lambda: 4)
    made = Machine()
    assert made.after(100.0) == 4, "nothing has changed"
    assert made.after(200.0) == 1
    return made


def test_threads_that_save_cpu_time_are_left_when_the_rate_is_too_high_for_them(machine: Machine) -> None:
    assert machine.after(600.0, predicted=0.90) == 4
    assert machine.after(200.0) == 1
    assert machine.compared == 1, "a rate is no reason to time batches again"


def test_no_cpu_time_is_saved_for_some_minutes_after_the_bound_was_missed(machine: Machine) -> None:
    assert machine.after(200.0, measured=0.90) == 4
    assert machine.after(50.0) == 4


def test_a_change_is_looked_at_once_times_are_learned_with_the_threads_in_use(machine: Machine) -> None:
    assert machine.after(600.0, predicted=0.90, settled=False) == 1
    assert machine.after(600.0, predicted=0.90) == 4


def test_a_model_that_is_loaded_again_is_compared_anew(machine: Machine) -> None:
    machine.device = Threaded()
    assert machine.after(600.0) == 1
    assert machine.compared == 2
