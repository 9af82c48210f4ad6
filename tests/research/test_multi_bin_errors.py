"""Bins under wrong predictions: theory against the simulated queue, and edges that allow for the errors."""

import numpy as np
import pytest

from policies.queue.central import serve
from policies.sizing.bins import batch_time, optimised_edges
from research.papers.multi_bin_errors import (
    confused_batch_time,
    edges_of_predictions,
    edges_under_errors,
    neighbour_errors,
)
from research.papers.multi_bin_theory import Uniform

SIZES, BATCH = Uniform(1.0, 20.0), 128


def test_neighbours_are_predicted_with_the_given_probability() -> None:
    assert neighbour_errors(3, 0.1).tolist() == [[0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.0, 0.1, 0.9]]


@pytest.mark.parametrize("bins", [1, 2, 4])
def test_without_errors_the_time_is_that_of_equation_4(bins: int) -> None:
    found = confused_batch_time(SIZES, SIZES.edges(bins), neighbour_errors(bins, 0.0), BATCH)
    assert found == pytest.approx(SIZES.batch_time(bins, BATCH), rel=1e-4)


def test_one_request_in_a_hundred_halves_the_gain_of_two_bins() -> None:
    one = SIZES.batch_time(1, BATCH)
    right, wrong = (
        one / confused_batch_time(SIZES, SIZES.edges(2), neighbour_errors(2, error), BATCH) for error in (0.0, 0.01)
    )
    assert right == pytest.approx(1.31, abs=0.005)
    assert wrong == pytest.approx(1.15, abs=0.005)


def test_the_time_under_errors_is_that_of_the_simulated_queue() -> None:
    rng = np.random.default_rng(3)
    sizes = rng.uniform(1.0, 20.0, 200_000)
    true = np.searchsorted(SIZES.edges(2), sizes, side="right")
    predicted = np.where(rng.random(len(sizes)) < 0.02, 1 - true, true)
    found = serve(np.zeros(len(sizes)), sizes, predicted, 16)
    expected = confused_batch_time(SIZES, SIZES.edges(2), neighbour_errors(2, 0.02), 16)
    assert found.batch_times.mean() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("bins", [2, 4])
def test_edges_for_known_errors_are_better_than_equal_ones(bins: int) -> None:
    confusion = neighbour_errors(bins, 0.05)
    edges = edges_under_errors(SIZES, confusion, BATCH)
    equal = confused_batch_time(SIZES, SIZES.edges(bins), confusion, BATCH)
    assert confused_batch_time(SIZES, edges, confusion, BATCH) < 0.98 * equal
    assert list(edges) == sorted(edges)


def test_edges_of_exact_predictions_are_those_of_the_sizes() -> None:
    sizes = np.random.default_rng(1).exponential(10.0, 4000)
    ours = edges_of_predictions(sizes, sizes, 4, 8)
    assert len(ours) == 3
    assert batch_time(sizes, ours, 8) == pytest.approx(batch_time(sizes, optimised_edges(sizes, 4, 8), 8), rel=0.02)


def test_edges_of_predictions_separate_what_differs() -> None:
    predicted = np.repeat([1.0, 2.0, 3.0, 4.0], 200)
    sizes = np.repeat([5.0, 5.0, 50.0, 50.0], 200)
    (edge,) = edges_of_predictions(predicted, sizes, 2, 8)
    assert 2.0 < edge <= 3.0
