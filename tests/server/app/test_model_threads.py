"""The choice of the number of threads, by times of one batch."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.app.model_threads import Known, better_threads, calls_have_changed, cheapest_threads, have_changed
from server.backends.worker_device import Cost


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
