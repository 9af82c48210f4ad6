"""Accuracy and confusion of predicted bins."""

import numpy as np
import pytest

from research import predicted_bins
from research.length_predictors import Affine, Online
from research.predicted_bins import accuracy, confusion_matrix, errors, predictions, predictors


def test_the_confusion_matrix_has_true_bins_in_rows() -> None:
    true, predicted = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    assert confusion_matrix(true, predicted, 2).tolist() == [[0.75, 0.25], [0.0, 1.0]]


def test_accuracy_counts_neighbours_if_asked() -> None:
    true, predicted = np.array([0, 1, 2, 3]), np.array([0, 2, 0, 3])
    assert accuracy(true, predicted) == 0.5
    assert accuracy(true, predicted, 1) == 0.75


def test_a_request_is_predicted_before_it_is_observed() -> None:
    found = predictions(Online(Affine(0.0, 0.0, 1.0)), np.array([8.0, 8.0, 8.0]), np.array([10.0, 30.0, 50.0]))
    assert found.tolist() == [50.0, 10.0, 20.0]  # the first by the limit


def test_prompts_that_tell_the_length_make_bins_worth_while() -> None:
    rng = np.random.default_rng(0)
    prompts = np.where(rng.random(3000) < 0.5, 10.0, 1000.0)
    generated = np.where(prompts < 100.0, 20.0, 400.0) + rng.integers(0, 10, 3000).astype(float)
    cell = predictors(prompts, generated)["online"]["2"]
    assert cell["accuracy"] > 0.98
    assert cell["gain_optimised_for_errors"] > 1.5
    assert cell["gain_optimised_for_errors"] <= 1.02 * cell["gain_of_true_lengths"]


def test_the_recorded_gain_under_errors_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted_bins, "BINS", (2,))
    cells = errors()["2"]
    assert [cell["gain_equal"] for cell in cells[:2]] == [1.3081, 1.1491]
    assert all(cell["gain_optimised"] >= cell["gain_equal"] for cell in cells)
