"""Predicted service times of each estimator."""

from collections.abc import Callable

import numpy as np
import pytest

from research.length_predictors import Affine, Estimator, Learned, Lengths, Online

TIMES = Affine(0.010, 0.001, 0.100)


def test_an_affine_time_uses_both_lengths() -> None:
    assert TIMES.at(5, 2) == pytest.approx(0.215)
    assert TIMES.at(5, 0) == pytest.approx(0.015)


@pytest.mark.parametrize("make", [Online, Learned])
def test_the_prediction_without_observations_is_the_limit(make: Callable[[Affine], Estimator]) -> None:
    assert make(TIMES).size(Lengths(5, 30)) == pytest.approx(TIMES.at(5, 30))


@pytest.mark.parametrize("make", [Online, Learned])
def test_the_prediction_is_the_observed_length_up_to_the_limit(make: Callable[[Affine], Estimator]) -> None:
    estimator = make(TIMES)
    for _ in range(50):
        estimator.observe(Lengths(5, 100, (1, 2, 3)), 20)
    assert estimator.size(Lengths(5, 100, (1, 2, 3))) == pytest.approx(TIMES.at(5, 20), rel=0.02)
    assert estimator.size(Lengths(5, 7, (1, 2, 3))) == pytest.approx(TIMES.at(5, 7))
    assert estimator.size(Lengths(5)) == pytest.approx(TIMES.at(5, 0))


def test_online_has_a_mean_per_prompt_length_and_one_of_all() -> None:
    estimator = Online(TIMES)
    for prompt, generated in ((5, 10), (6, 20), (40, 90)):
        estimator.observe(Lengths(prompt, 1000), generated)
    for prompt, expected in ((7, 15), (33, 90), (1000, 40)):
        assert estimator.size(Lengths(prompt, 1000)) == pytest.approx(TIMES.at(prompt, expected))


def test_online_follows_a_change() -> None:
    estimator = Online(TIMES)
    for generated in [10] * 5000 + [50] * 1500:
        estimator.observe(Lengths(5, 1000), generated)
    assert estimator.size(Lengths(5, 1000)) == pytest.approx(TIMES.at(5, 50), rel=0.01)


@pytest.mark.parametrize("prompt", [16, 100])
def test_learned_is_no_worse_than_online_for_uninformative_prompts(prompt: int) -> None:
    rng = np.random.default_rng(0)
    estimators: dict[str, Estimator] = {"online": Online(TIMES), "learned": Learned(TIMES)}
    errors: dict[str, list[float]] = {name: [] for name in estimators}
    for _ in range(500):
        lengths = Lengths(prompt, 1000, rng.integers(0, 259, prompt).tolist())
        for name, estimator in estimators.items():
            errors[name].append(abs(estimator.size(lengths) - TIMES.at(prompt, 100)) / TIMES.per_generated)
        generated = round(rng.normal(100, 20))
        for estimator in estimators.values():
            estimator.observe(lengths, generated)
    late = {name: float(np.mean(each[300:])) for name, each in errors.items()}
    assert late["learned"] < 1.1 * late["online"] < 3.0, "tokens"


def test_learned_uses_the_tokens_of_the_prompt() -> None:
    rng = np.random.default_rng(3)
    estimators: dict[str, Estimator] = {"online": Online(TIMES), "learned": Learned(TIMES)}
    errors: dict[str, list[float]] = {name: [] for name in estimators}
    for _ in range(3000):
        tokens = rng.integers(10, 500, 12)
        tokens[0] = word = int(rng.integers(3))  # asks for a line, a paragraph or a page
        lengths, generated = Lengths(12, 1000, tokens.tolist()), round((10, 60, 300)[word] * rng.uniform(0.8, 1.25))
        for name, estimator in estimators.items():
            errors[name].append(abs(estimator.size(lengths) - TIMES.at(12, generated)) / TIMES.at(12, generated))
            estimator.observe(lengths, generated)
    late = {name: float(np.mean(each[2000:])) for name, each in errors.items()}
    assert late["learned"] < 0.25 < 1.0 < late["online"]
