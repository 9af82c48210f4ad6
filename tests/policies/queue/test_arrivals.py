"""Arrival processes: moments, order and reproducibility; reading of traces."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.queue.arrivals import Instants, backlog, constant, mmpp, poisson, ramp, steps, trace
from policies.types import SpecError

AZURE = Path(__file__).parents[3].parent / "shared" / "data" / "azure-llm-2023-conv.csv"
RANDOM: dict[str, Callable[[float, np.random.Generator], Instants]] = {
    "poisson": lambda duration, rng: poisson(100.0, duration, rng),
    "mmpp": lambda duration, rng: mmpp([150.0, 50.0], [0.2, 0.2], duration, rng),
    "steps": lambda duration, rng: steps([50.0, 0.0, 200.0], [1.0, 0.5, 1.0], duration, rng),
    "ramp up": lambda duration, rng: ramp(0.0, 200.0, duration, rng),
    "ramp down": lambda duration, rng: ramp(200.0, 0.0, duration, rng),
    "ramp level": lambda duration, rng: ramp(100.0, 100.0, duration, rng),
}


def write(folder: Path, text: str) -> str:
    path = folder / "trace.csv"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", RANDOM)
@given(duration=st.floats(0.01, 5.0), seed=st.integers(0, 2**32))
def test_instants_are_sorted_within_the_duration_and_repeat_with_the_seed(
    name: str, duration: float, seed: int
) -> None:
    instants = RANDOM[name](duration, np.random.default_rng(seed))
    assert (np.diff(instants) >= 0).all()
    assert ((instants >= 0) & (instants < duration)).all()
    assert np.array_equal(instants, RANDOM[name](duration, np.random.default_rng(seed)))


def test_poisson_has_its_mean_and_the_variance_of_its_gaps() -> None:
    rate, duration = 100.0, 1000.0
    instants = poisson(rate, duration, np.random.default_rng(1))
    assert abs(len(instants) - rate * duration) < 4 * (rate * duration) ** 0.5  # a count's deviation is its root
    gaps = np.diff(instants) * rate
    assert abs(gaps.std() - 1) < 4 * (2 / len(gaps)) ** 0.5  # kurtosis 9: the deviation's own is sqrt((9 - 1) / 4n)


def test_constant_starts_at_zero_and_has_equal_gaps() -> None:
    assert constant(4.0, 1.0).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_a_backlog_arrives_at_once() -> None:
    assert backlog(10.0, 0.5).tolist() == [0.0] * 5


def test_steps_have_their_rates_and_the_last_lasts() -> None:
    instants = steps([1000.0, 0.0, 500.0], [10.0, 10.0, 10.0], 40.0, np.random.default_rng(2))
    counts = np.histogram(instants, [0, 10, 20, 30, 40])[0]
    expected = np.array([10_000, 0, 5_000, 5_000])
    assert (np.abs(counts - expected) <= 4 * expected**0.5).all()


@settings(max_examples=50)
@given(first=st.floats(0.0, 2000.0), last=st.floats(0.0, 2000.0), seed=st.integers(0, 2**32))
def test_a_ramp_has_the_expected_count_in_each_part(first: float, last: float, seed: int) -> None:
    if first + last == 0:
        return
    duration, edges = 10.0, np.linspace(0.0, 10.0, 6)
    counts = np.histogram(ramp(first, last, duration, np.random.default_rng(seed)), edges)[0]
    expected = np.diff(first * edges + (last - first) * edges**2 / (2 * duration))
    # a Poisson count's deviation is its root; where few are expected its tail is longer, and the second term covers it
    assert (np.abs(counts - expected) <= 6 * expected**0.5 + 12).all()


def test_mmpp_has_the_mean_of_its_phases_and_more_than_poisson_variance() -> None:
    duration, phase = 2000.0, 0.5
    instants = mmpp([150.0, 50.0], [phase, phase], duration, np.random.default_rng(3))
    # The share of time in a phase has variance of about phase / (4 duration) for exponential phases of equal means.
    deviation = (100.0 * duration + (100.0 * duration) ** 2 * phase / (4 * duration)) ** 0.5
    assert abs(len(instants) - 100.0 * duration) < 4 * deviation
    counts = np.histogram(instants, np.arange(0, duration + 1))[0]
    assert counts.var() > 2 * counts.mean()


def test_many_short_phases_are_drawn_in_linear_time() -> None:
    assert len(mmpp([100.0, 0.0], [1e-4, 1e-4], 4.0, np.random.default_rng(4)))


def test_a_trace_of_seconds_starts_at_zero_and_is_sorted(tmp_path: Path) -> None:
    path = write(tmp_path, "TIMESTAMP,TOKENS\n12.5,1\n10.0,2\n11.0,3\n")
    assert trace(path, None, None).tolist() == [0.0, 1.0, 2.5]


def test_a_trace_of_dates_may_have_seven_digits(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900\n2023-11-16 18:15:46.6805901\n2023-11-16 18:15:50.9951690\n"
    instants = trace(write(tmp_path, "TIMESTAMP\n" + rows), None, None)
    assert instants.tolist() == pytest.approx([0.0, 1e-7, 4.314579], rel=1e-12)


def test_a_rate_stretches_a_trace_and_a_duration_cuts_it(tmp_path: Path) -> None:
    path = write(tmp_path, "TIMESTAMP\n0\n1\n3\n4\n")
    assert trace(path, 0.5, None).tolist() == pytest.approx([0.0, 1.5, 4.5, 6.0])
    assert trace(path, 0.5, 4.0).tolist() == pytest.approx([0.0, 1.5])


def test_a_byte_order_mark_and_empty_lines_are_ignored(tmp_path: Path) -> None:
    assert trace(write(tmp_path, "\ufeffTIMESTAMP\n0\n\n1\n"), None, None).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no TIMESTAMP column"),
        ("TIMESTAMP\n", "no TIMESTAMP column"),
        ("TIME\n1\n", "no TIMESTAMP column"),
        ("TIMESTAMP\nyesterday\n", "neither seconds nor ISO dates"),
        ("TIMESTAMP\n1\nnan\n", "not finite"),
        ("TIMESTAMP\n1\ninf\n", "not finite"),
        ("A,TIMESTAMP\n1,2\n1\n", "empty"),
        ("A,TIMESTAMP\n1,2023-11-16 18:15:46\n1,\n", "empty"),
    ],
)
def test_an_invalid_trace_is_rejected(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        trace(write(tmp_path, text), None, None)


def test_a_missing_trace_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no trace file .*nowhere\.csv"):
        trace(str(tmp_path / "nowhere.csv"), None, None)


@pytest.mark.skipif(not AZURE.is_file(), reason="the shared data are absent")
def test_the_azure_trace_is_replayed_as_recorded() -> None:
    instants = trace(str(AZURE), None, None)
    assert len(instants) == 19_366
    assert instants[-1] == pytest.approx(3502, abs=1)
    assert trace(str(AZURE), 100.0, None)[-1] == pytest.approx(193.65)
