"""Edges of bins against an exhaustive search and against the paper's edges."""

import csv
from bisect import bisect_right
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.profile import Profile
from policies.sizing.bins import batch_time, bin_times, equal_edges, lengths_of, optimised_edges

TRACE = Path(__file__).parents[4] / "shared" / "data" / "azure-llm-2023-conv.csv"
some_sizes = st.lists(st.integers(1, 12).map(float), min_size=1, max_size=40)


def longest_of(sizes: list[float], batch_size: int) -> float:
    """E[max], from the distribution function at each value."""
    total, mean, before = len(sizes), 0.0, 0.0
    for value in sorted(set(sizes)):
        upto = (sum(size <= value for size in sizes) / total) ** batch_size
        mean, before = mean + value * (upto - before), upto
    return mean


def time_with(sizes: list[float], edges: tuple[float, ...], batch_size: int) -> float:
    bins: dict[int, list[float]] = {}
    for size in sizes:
        bins.setdefault(bisect_right(edges, size), []).append(size)
    return sum(len(each) / len(sizes) * longest_of(each, batch_size) for each in bins.values())


@given(some_sizes, st.integers(1, 5), st.sampled_from([1, 2, 8, 128]))
def test_optimised_edges_agree_with_an_exhaustive_search(sizes: list[float], bins: int, batch_size: int) -> None:
    values = sorted(set(sizes))
    edges = optimised_edges(sizes, bins, batch_size)
    assert len(edges) == min(bins, len(values)) - 1
    every = combinations(values[1:], len(edges))
    best = min(time_with(sizes, cuts, batch_size) for cuts in every)
    assert time_with(sizes, edges, batch_size) == pytest.approx(best, rel=1e-9)


@given(some_sizes, st.integers(1, 5), st.sampled_from([1, 3, 64]))
def test_the_mean_batch_time_is_the_mean_over_bins(sizes: list[float], bins: int, batch_size: int) -> None:
    edges = equal_edges(sizes, bins)
    found = bin_times(sizes, edges, batch_size)
    assert sum(share for share, _ in found) == pytest.approx(1.0)
    assert batch_time(sizes, edges, batch_size) == pytest.approx(time_with(sizes, edges, batch_size), rel=1e-9)


@given(some_sizes, st.integers(1, 9))
def test_edges_ascend_and_leave_no_bin_empty(sizes: list[float], bins: int) -> None:
    for edges in (equal_edges(sizes, bins), optimised_edges(sizes, bins, 4)):
        assert len(edges) <= bins - 1
        assert {bisect_right(edges, size) for size in sizes} == set(range(len(edges) + 1))


def test_equal_edges_are_nearest_to_equal_probability() -> None:
    assert equal_edges([1.0, 2.0, 3.0, 4.0], 2) == (3.0,)
    assert equal_edges([1.0, 1.0, 1.0, 5.0], 2) == (5.0,)
    assert equal_edges([1.0, 5.0, 5.0, 5.0], 2) == (5.0,)
    assert equal_edges([7.0], 3) == ()


def test_an_edge_is_the_smallest_size_of_the_bin_above() -> None:
    assert optimised_edges([1.0, 2.0, 10.0, 11.0], 2, 8) == (10.0,)


def test_grouping_of_many_sizes_is_nearly_optimal() -> None:
    # the longest of 200 exponential sizes lie where few are: groups of equal probability alone lose 0.3 per cent
    sizes = np.random.default_rng(1).exponential(10.0, 100_000)
    hand = (5.3224, 12.3499, 22.5428, 40.2550)  # equation 28 for K = 5, B = 200
    assert batch_time(sizes, optimised_edges(sizes, 5, 200), 200) < 1.0005 * batch_time(sizes, hand, 200)


def test_many_sizes_are_grouped() -> None:
    sizes = np.random.default_rng(1).exponential(10.0, 4096)
    assert len(optimised_edges(sizes, len(sizes), 8)) < 256


def test_for_uniform_sizes_equal_probability_is_best() -> None:
    sizes = np.linspace(1.0, 20.0, 400)
    assert optimised_edges(sizes, 4, 128) == pytest.approx((5.75, 10.5, 15.25), abs=0.1)
    assert equal_edges(sizes, 4) == pytest.approx((5.75, 10.5, 15.25), abs=0.1)


@pytest.mark.skipif(not TRACE.is_file(), reason="no trace of lengths here")
def test_on_recorded_lengths_optimised_edges_gain_more_than_equal_ones() -> None:
    with TRACE.open() as lines:
        lengths = [float(row["GeneratedTokens"]) for row in csv.DictReader(lines)]
    one = batch_time(lengths, (), 8)
    optimised = [one / batch_time(lengths, optimised_edges(lengths, bins, 8), 8) for bins in (2, 4, 8)]
    equal = [one / batch_time(lengths, equal_edges(lengths, bins), 8) for bins in (2, 4, 8)]
    assert optimised == pytest.approx([1.54, 1.81, 1.96], abs=0.005)
    assert equal == pytest.approx([1.47, 1.59, 1.84], abs=0.005)
    assert one / np.mean(lengths) == pytest.approx(2.16, abs=0.005)


def test_the_lengths_of_sizes_are_finite_where_the_time_does_not_vary() -> None:
    measured = Profile("lines", (0.5, 0.6), lengths=(10, 20), length_service_times=((1.0, 1.5), (1.2, 1.9)))
    flat = Profile("flat", (0.5,), lengths=(1, 2), length_service_times=((0.5, 0.5),))
    assert np.isfinite(lengths_of([0.4, 0.5, 0.6], flat)).all()
    assert lengths_of([1.25, 2.0], measured).tolist() == pytest.approx([15.0, 30.0]), "also above the greatest"
