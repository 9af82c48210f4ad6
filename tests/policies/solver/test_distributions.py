"""The distributions of service times against their integrals."""

from collections.abc import Callable
from math import exp, factorial, gamma, sqrt

import numpy as np
import pytest
from scipy.integrate import quad

from policies.profile import Profile
from policies.solver.distributions import DETERMINISTIC, Gamma, distribution
from policies.types import SpecError

TIMES = np.array([0.7, 2.0])  # s
RATE = 1.5  # 1/s
MEASURED = Profile("measured", tuple(TIMES), cvs=(0.2, 0.9))
STOCHASTIC = ["erlang2", "exponential", "hyperexponential", "gamma:0.3", "gamma:1.7", "measured"]


def gamma_density(cv: float, mean: float) -> Callable[[float], float]:
    shape, scale = 1 / cv**2, mean * cv**2
    return lambda x: x ** (shape - 1) * exp(-x / scale) / (gamma(shape) * scale**shape)


def density(name: str, batch_size: int) -> Callable[[float], float]:
    """Of the service time, from the definitions in the journal, section VII-C."""
    mean = TIMES[batch_size - 1]
    if name == "hyperexponential":
        return lambda x: 2 / 3 * exp(-2 * x / mean) * 2 / mean + 1 / 3 * exp(-x / (2 * mean)) / (2 * mean)
    cv = {"erlang2": sqrt(0.5), "exponential": 1.0, "measured": (0.2, 0.9)[batch_size - 1]}
    return gamma_density(float(name[6:]) if name.startswith("gamma") else float(cv[name]), mean)


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_arrival_probabilities_are_the_integral_of_equation_4(name: str, batch_size: int) -> None:
    found = distribution(name, MEASURED).arrival_probabilities(RATE, TIMES, 12)[batch_size - 1]
    pdf = density(name, batch_size)
    for k in (0, 1, 2, 5, 11):
        # substituting x = u^4 takes the singularity out of the densities with cv above 1
        integral, error = quad(
            lambda u, k=k: exp(-RATE * u**4) * (RATE * u**4) ** k / factorial(k) * pdf(u**4) * 4 * u**3, 0, 3.5
        )
        assert found[k] == pytest.approx(integral, abs=10 * error + 1e-9)


@pytest.mark.parametrize("name", ["deterministic", *STOCHASTIC])
def test_probabilities_and_moments_agree(name: str) -> None:
    service = distribution(name, MEASURED)
    p = service.arrival_probabilities(RATE, TIMES, 2000)
    k = np.arange(2000)
    mean, second = RATE * TIMES, RATE * TIMES + RATE**2 * service.second_moments(TIMES)  # of the number of arrivals
    assert p.sum(axis=1) == pytest.approx(1.0, rel=1e-12)
    assert p @ k == pytest.approx(mean, rel=1e-10)
    assert p @ k**2 == pytest.approx(second, rel=1e-10)


@pytest.mark.parametrize("cv", [1e-9, 1e-6, 1e-4])
def test_small_variation_converges_to_deterministic_without_a_loss_of_digits(cv: float) -> None:
    times = np.array([1.0, 40.0])
    limit = DETERMINISTIC.arrival_probabilities(RATE, times, 200)
    near = Gamma((cv,)).arrival_probabilities(RATE, times, 200)
    # the first correction to a Poisson probability is cv^2 / 2 times a polynomial in k - m, at most (5 sd)^2 and m here
    assert near == pytest.approx(limit, abs=1e-13 + 1000 * cv**2)


def test_a_squared_coefficient_of_variation_of_the_journal() -> None:
    for name, squared in (("erlang2", 0.5), ("exponential", 1.0), ("hyperexponential", 2.0)):
        second = distribution(name, MEASURED).second_moments(TIMES)
        assert second / TIMES**2 - 1 == pytest.approx(squared)


@pytest.mark.parametrize("name", ["deterministic", *STOCHASTIC])
def test_draws_have_the_moments(name: str) -> None:
    service = distribution(name, MEASURED)
    draw = service.sampler(TIMES, np.random.default_rng(1))
    drawn = np.array([draw(2) for _ in range(100_000)])
    second = service.second_moments(TIMES)[1]
    # five standard errors; the fourth moment of the widest, gamma:1.7, is below 120 squares of the mean squared
    assert drawn.mean() == pytest.approx(TIMES[1], abs=5 * sqrt(max(second - 4.0, 0.0) / 100_000) + 1e-12)
    assert np.square(drawn).mean() == pytest.approx(second, rel=5 * sqrt(120 / 100_000))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("normal", "choose one of deterministic"),
        ("gamma", "CV is not a number"),
        ("gamma:wide", "write for example gamma:0.3"),
        ("gamma:-1", "within 0..10;"),
        ("gamma:10.1", "within 0..10;"),
        ("exponential:2", "unknown service distribution 'exponential:2'"),
    ],
)
def test_an_invalid_distribution_is_rejected(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        distribution(name, MEASURED)


def test_measured_needs_measurements() -> None:
    with pytest.raises(SpecError, match="no service_time_cv"):
        distribution("measured", Profile("bare", (1.0,)))
