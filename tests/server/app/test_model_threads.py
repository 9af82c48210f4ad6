"""The choice of the number of threads, by times of one batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.app.exploration import KnownTimes, better_threads, have_changed


@pytest.mark.parametrize(
    ("times", "present", "better"),
    [
        ({1: [19.0, 20.0, 21.0], 2: [14.0, 75.0, 90.0]}, 2, 1),  # a processor is taken
        ({1: [19.0, 20.0, 21.0], 2: [14.0, 75.0, 90.0]}, 1, 1),
        ({1: [75.0, 76.0, 78.0], 2: [47.0, 50.0, 79.0]}, 1, 2),  # two were as slow as one when the model was loaded
        ({1: [75.0, 76.0, 78.0], 2: [50.0, 79.0, 80.0]}, 2, 2),  # other work of a moment,
        ({1: [19.0, 20.0, 21.0], 2: [12.0, 13.0, 120.0]}, 1, 2),  # it is free again
        ({1: [19.0, 20.0, 21.0], 2: [18.0, 28.0, 29.0]}, 2, 2),  # too little for a change
        ({1: [0.9e-3, 1.0e-3, 1.1e-3], 2: [0.6e-3, 0.7e-3, 0.8e-3]}, 1, 1),  # a wait of the threads would take longer
        ({1: [0.9e-3, 1.0e-3, 1.1e-3], 2: [0.5e-3, 0.6e-3, 0.8e-3]}, 1, 2),  # large batches gain more than a wait
    ],
)
def test_the_number_of_threads_changes_where_it_pays(times: dict[int, list[float]], present: int, better: int) -> None:
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
    assert have_changed(KnownTimes(*before), KnownTimes(*now)) == changed


@given(st.dictionaries(st.integers(1, 64), st.floats(0.001, 10.0), min_size=1), st.data())
def test_the_number_of_threads_does_not_go_back_for_the_same_times(
    times: dict[int, float], data: st.DataObject
) -> None:
    measured = {count: [time] for count, time in times.items()}
    seen = [data.draw(st.sampled_from(sorted(times)))]
    while (following := better_threads(measured, seen[-1])) != seen[-1]:
        assert following not in seen
        seen.append(following)
