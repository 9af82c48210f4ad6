"""Closed forms of multi-bin batching against printed numbers, Monte Carlo and the simulated central queue."""

from math import log, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.queue.central import CentralRun, serve
from policies.sizing.bins import batch_time, least_response_time, optimised_edges
from policies.types import SpecError
from research.papers.multi_bin_theory import Exponential, Uniform, harmonic

PAPER = Uniform(1.0, 20.0)
SEED = 5


def simulated(sizes: np.ndarray, edges: tuple[float, ...], batch_size: int, rate: float) -> CentralRun:
    arrivals = np.cumsum(np.random.default_rng(SEED).exponential(1.0 / rate, len(sizes)))
    return serve(arrivals, sizes, np.searchsorted(edges, sizes, side="right"), batch_size)


def test_throughput_of_the_papers_setting() -> None:
    assert [PAPER.throughput(bins, 128) for bins in range(1, 6)] == pytest.approx(
        [6.45, 8.43, 9.40, 9.97, 10.35], abs=0.005
    )
    assert PAPER.capacity(128) == pytest.approx(12.19, abs=0.005)


@pytest.mark.parametrize("bins", [1, 2, 3, 4, 5])
def test_an_overloaded_queue_has_the_throughput_of_the_formula(bins: int) -> None:
    sizes = np.random.default_rng(SEED).uniform(1.0, 20.0, 256_000)
    # 2000 batches, whose times differ by at most 5.5 s of 12.2 about the mean: 0.3 per cent is one standard error
    found = simulated(sizes, PAPER.edges(bins), 128, 20.0).throughput
    assert found == pytest.approx(PAPER.throughput(bins, 128), rel=0.01)


@pytest.mark.parametrize(("bins", "rate"), [(1, 0.5), (1, 2.0), (2, 1.0), (3, 1.0), (5, 1.0)])
def test_the_response_time_at_low_load_is_that_of_the_formula(bins: int, rate: float) -> None:
    sizes = np.random.default_rng(SEED).uniform(1.0, 20.0, 256_000)
    found = simulated(sizes, PAPER.edges(bins), 128, rate).responses.mean()
    assert found == pytest.approx(PAPER.response_time(bins, 128, rate), rel=0.03)


def test_the_formula_is_a_lower_bound_for_unequal_bins() -> None:
    sizes = np.random.default_rng(SEED).exponential(10.0, 400_000)
    edges = (20.0,)  # seven in eight are below
    least = least_response_time(batch_time(sizes, edges, 16), 2, 16, 0.2)
    # 25,000 batches; the standard error of the mean is about 0.4 per cent
    assert simulated(sizes, edges, 16, 0.2).responses.mean() == pytest.approx(least, rel=0.03)
    assert simulated(sizes, edges, 16, 0.6).responses.mean() > 1.05 * least_response_time(
        batch_time(sizes, edges, 16), 2, 16, 0.6
    )


@given(st.floats(0.1, 50.0), st.floats(0.0, 50.0), st.integers(1, 200), st.integers(2, 256))
def test_the_least_number_of_bins_for_a_throughput(low: float, width: float, bins: int, batch_size: int) -> None:
    sizes = Uniform(low, low + width + 0.1)
    wanted = sizes.throughput(bins, batch_size)
    assert sizes.bins_for(wanted, batch_size) == bins
    assert sizes.bins_for(0.5 * (wanted + sizes.capacity(batch_size)), batch_size) > bins


@pytest.mark.parametrize("throughput", [0.0, -1.0, 128 / 10.5, 13.0])
def test_an_unreachable_throughput_is_rejected(throughput: float) -> None:
    with pytest.raises(SpecError, match=r"12\.19"):
        PAPER.bins_for(throughput, 128)


def test_exponential_batch_times_agree_with_sampling_and_the_bound() -> None:
    sizes, rng = Exponential(10.0), np.random.default_rng(SEED)
    drawn = rng.exponential(10.0, 400_000)
    for bins in range(1, 6):
        edges = sizes.edges(bins, 200)
        exact = sizes.batch_time(edges, 200)
        # the last bin's longest of 200 is drawn from 7000 to 400,000 sizes, its mean known to about 1 per cent
        assert exact == pytest.approx(batch_time(drawn, edges, 200), rel=0.01)
        assert exact <= sizes.batch_time_bound(edges, 200) + 1e-12


def test_one_exponential_bin_takes_the_harmonic_number_times_the_mean() -> None:
    assert harmonic(3) == pytest.approx(11 / 6)
    assert Exponential(10.0).batch_time((), 200) == pytest.approx(10.0 * harmonic(200))


@pytest.mark.parametrize("bins", [2, 3, 6])
def test_the_corrected_printed_bound_is_that_of_the_edges(bins: int) -> None:
    steps = [0.0, harmonic(200)]  # L_m at index m
    while len(steps) < bins:
        steps.append(1.0 + log(steps[-1]))
    total = sum(
        (steps[bins - i] - 1.0)
        / prod(steps[bins - j] for j in range(1, i + 1))
        * sum(log(steps[bins - j]) for j in range(1, i + 1))
        for i in range(1, bins)
    )
    last = sum(log(steps[bins - j]) for j in range(1, bins)) + steps[1]
    total += last / prod(steps[bins - j] for j in range(1, bins))
    assert Exponential(1.0).throughput_bound(bins, 200) == pytest.approx(200 / total)


def test_the_printed_exponential_edges_minimise_the_bound() -> None:
    sizes = Exponential(10.0)
    edges = sizes.edges(3, 200)
    for factor in (0.97, 1.03):
        for moved in ((factor * edges[0], edges[1]), (edges[0], factor * edges[1])):
            assert sizes.batch_time_bound(moved, 200) > sizes.batch_time_bound(edges, 200)
    best = optimised_edges(np.random.default_rng(SEED).exponential(10.0, 200_000), 3, 200)
    assert sizes.batch_time(best, 200) == pytest.approx(sizes.batch_time(edges, 200), rel=5e-3)
