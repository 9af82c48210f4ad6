"""Distributions of the service time around the profile's mean l(b), with the moments that the SMDP needs.

Arrivals during a service of random length G are Poisson given the length (equation 4), so their probabilities are the
Taylor coefficients of the Laplace transform at lambda (1 - z), equations (5) and (6). For a gamma distribution these
are the negative binomial probabilities, whose limits are the Poisson (no variation) and the geometric (exponential).

The journal calls 0.5 and 2 the coefficients of variation of its Erlang and hyper-exponential distributions; they are
the squares: its transforms have 0.707 and 1.414.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf, lgamma, sqrt
from typing import Protocol

import numpy as np
import scipy
from numpy.typing import NDArray

from policies.profile import Profile
from policies.types import SpecError

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
_BLOCK = 1024  # service times drawn at once
_LEAST_CV = 0.1  # below which the policies for deterministic times are optimal to a thousandth
DISTRIBUTIONS_USAGE = "deterministic, erlang2, exponential, hyperexponential, gamma:CV, measured"


class ServiceDistribution(Protocol):
    """The distribution of the service times for given means l(1..B_max), as the SMDP and the simulation use it."""

    def second_moments(self, service_times: Floats) -> Floats:
        """Return E[G_b^2], s^2, for each mean l(b), s; (B_max,)."""
        ...

    def arrival_probabilities(self, arrival_rate: float, service_times: Floats, counts: int) -> Floats:
        """Return p_k^[b] for k < counts, equation (4); row b - 1, column k."""
        ...

    def tail(self, service_times: Floats, sizes: Ints, times: Floats) -> tuple[Floats, Floats]:
        """Return P(G_b > z) and E[max(G_b - z, 0)], s, for each batch size b and time z, s; these are broadcast."""
        ...

    def quiet_tail(self, arrival_rate: float, service_times: Floats, sizes: Ints, ages: Floats) -> Floats:
        """Return E[exp(-lambda (G_b - x)); G_b > x] for each batch size b and age x, s; these are broadcast.

        It is the probability that a service lasts longer than x and that no request arrives more than x before its end.
        """
        ...

    def sampler(self, service_times: Floats, rng: np.random.Generator) -> Callable[[int], float]:
        """Return a function that draws the service time of a batch of b, s."""
        ...


@lru_cache(maxsize=64)
def _log_factorials(counts: int) -> Floats:
    """Return log k! for k < counts, without scipy.special, whose import takes longer than solving a policy."""
    found = np.array([lgamma(k + 1.0) for k in range(counts)])
    found.setflags(write=False)  # it is shared
    return found


@dataclass(frozen=True)
class Gamma:
    """Gamma distributed service times; deterministic, Erlang-2 and exponential ones are members.

    Attributes:
        cvs: coefficients of variation (standard deviation over mean): one for all batch sizes, or one per size.
    """

    cvs: tuple[float, ...]

    def second_moments(self, service_times: Floats) -> Floats:
        """Return E[G_b^2] = l(b)^2 (1 + cv^2), s^2."""
        return np.asarray(np.square(service_times) * (1.0 + np.square(self._cvs_by_size(len(service_times)))))

    def arrival_probabilities(self, arrival_rate: float, service_times: Floats, counts: int) -> Floats:
        """Return negative binomial probabilities, r = 1 / cv^2, by logarithms because p_0 underflows for large batches.

        log p_k = k log m - log k! - r log(1 + m / r) + the sum over i < k of log((r + i) / (r + m)), m = lambda l(b).
        In this form the last two terms tend to -m and 0 as cv goes to 0, without a loss of digits.
        """
        mean = (arrival_rate * service_times)[:, None]
        k = np.arange(counts)
        logarithm = k * np.log(mean) - _log_factorials(counts)
        cvs = self._cvs_by_size(len(service_times))[:, None]
        if not cvs.any():
            return np.asarray(np.exp(logarithm - mean))
        inverse = np.square(cvs)  # 1 / r
        falling = np.log1p(inverse * (k[:-1] - mean) / (1.0 + inverse * mean))
        logarithm[:, 1:] += np.cumsum(falling, axis=1)
        empty = np.where(inverse > 0.0, np.log1p(inverse * mean) / np.where(inverse > 0.0, inverse, 1.0), mean)
        return np.asarray(np.exp(logarithm - empty))

    def tail(self, service_times: Floats, sizes: Ints, times: Floats) -> tuple[Floats, Floats]:
        """Return upper incomplete gamma functions: with r = 1 / cv^2, Q(r, z / theta) and its integral."""
        if not any(self.cvs):
            fixed = service_times[sizes - 1]
            return np.where(times < fixed, 1.0, 0.0), np.maximum(fixed - times, 0.0)
        mean, cv, late = (
            service_times[sizes - 1],
            self._cvs_by_size(len(service_times))[sizes - 1],
            np.maximum(times, 0.0),
        )
        shape = 1.0 / np.square(np.where(cv > 0.0, cv, 1.0))
        scaled = late * shape / mean
        survival = np.where(cv > 0.0, scipy.special.gammaincc(shape, scaled), mean > late)
        excess = np.where(
            cv > 0.0,
            mean * scipy.special.gammaincc(shape + 1.0, scaled) - late * survival,
            np.maximum(mean - late, 0.0),
        )
        return np.where(times < 0.0, 1.0, survival), np.where(times < 0.0, mean - times, excess)

    def quiet_tail(self, arrival_rate: float, service_times: Floats, sizes: Ints, ages: Floats) -> Floats:
        """Return (1 + lambda theta)^-r Q(r, x / theta + lambda x) exp(lambda x), by logarithms."""
        mean, cv = service_times[sizes - 1], self._cvs_by_size(len(service_times))[sizes - 1]
        if not any(self.cvs):
            return np.where(mean > ages, np.exp(-arrival_rate * np.maximum(mean - ages, 0.0)), 0.0)
        shape = 1.0 / np.square(np.where(cv > 0.0, cv, 1.0))
        rate = shape / mean + arrival_rate
        with np.errstate(divide="ignore"):
            logarithm = np.log(scipy.special.gammaincc(shape, rate * ages)) + arrival_rate * ages
        logarithm = logarithm - shape * np.log1p(arrival_rate * mean / shape)
        fixed = np.where(mean > ages, np.exp(-arrival_rate * np.maximum(mean - ages, 0.0)), 0.0)
        return np.where(cv > 0.0, np.exp(np.minimum(logarithm, 0.0)), fixed)

    def sampler(self, service_times: Floats, rng: np.random.Generator) -> Callable[[int], float]:
        """Return a sampler that draws in blocks."""
        if not any(self.cvs):
            return [0.0, *service_times.tolist()].__getitem__

        cvs = self._cvs_by_size(len(service_times))

        def block(index: int) -> Floats:
            cv = float(cvs[index])
            shape = 1.0 / cv**2 if cv > 0.0 else inf
            drawn = np.ones(_BLOCK) if shape == inf else rng.gamma(shape, 1.0 / shape, _BLOCK)
            return float(service_times[index]) * drawn

        return _in_blocks(len(service_times), block)

    def _cvs_by_size(self, sizes: int) -> Floats:
        return np.resize(self.cvs, sizes) if len(self.cvs) == 1 else np.array(self.cvs[:sizes])


DETERMINISTIC = Gamma((0.0,))


@dataclass(frozen=True)
class Hyperexponential:
    """The journal's distribution (section VII-C): exponential with half the mean (2/3 of batches) or twice."""

    def second_moments(self, service_times: Floats) -> Floats:
        """Return E[G_b^2] = 3 l(b)^2, s^2."""
        return 3.0 * np.square(service_times)

    def arrival_probabilities(self, arrival_rate: float, service_times: Floats, counts: int) -> Floats:
        """Return the mixture of two geometric distributions."""
        exponential = Gamma((1.0,))
        fast = exponential.arrival_probabilities(arrival_rate, 0.5 * service_times, counts)
        slow = exponential.arrival_probabilities(arrival_rate, 2.0 * service_times, counts)
        return np.asarray((2.0 * fast + slow) / 3.0)

    def tail(self, service_times: Floats, sizes: Ints, times: Floats) -> tuple[Floats, Floats]:
        """Return the mixtures of those of two exponential distributions."""
        exponential = Gamma((1.0,))
        fast = exponential.tail(0.5 * service_times, sizes, times)
        slow = exponential.tail(2.0 * service_times, sizes, times)
        return (2.0 * fast[0] + slow[0]) / 3.0, (2.0 * fast[1] + slow[1]) / 3.0

    def quiet_tail(self, arrival_rate: float, service_times: Floats, sizes: Ints, ages: Floats) -> Floats:
        """Return the mixture of those of two exponential distributions."""
        exponential = Gamma((1.0,))
        fast = exponential.quiet_tail(arrival_rate, 0.5 * service_times, sizes, ages)
        slow = exponential.quiet_tail(arrival_rate, 2.0 * service_times, sizes, ages)
        return np.asarray((2.0 * fast + slow) / 3.0)

    def sampler(self, service_times: Floats, rng: np.random.Generator) -> Callable[[int], float]:
        """Return a sampler that draws in blocks."""

        def block(index: int) -> Floats:
            scale = np.where(rng.random(_BLOCK) < 2.0 / 3.0, 0.5, 2.0)
            return float(service_times[index]) * scale * rng.exponential(1.0, _BLOCK)

        return _in_blocks(len(service_times), block)


def measured_service(profile: Profile) -> ServiceDistribution:
    """Return the distribution by the profile's coefficients of variation; deterministic if small or unknown."""
    return Gamma(profile.cvs) if profile.cvs is not None and max(profile.cvs) >= _LEAST_CV else DETERMINISTIC


def distribution(text: str, profile: Profile) -> ServiceDistribution:
    """Return a distribution by name: deterministic, erlang2, exponential, hyperexponential, gamma:CV or measured.

    Raises:
        SpecError: the name is unknown, CV is not a number from 0 to 10, or the profile has no measured CVs.
    """
    name, _, parameter = text.partition(":")
    if name == "gamma":
        return Gamma((_cv(text, parameter),))
    if text == "measured":
        if profile.cvs is None:
            raise SpecError(f"profile {profile.name!r} has no service_time_cv for 'measured'; give gamma:CV")
        return Gamma(profile.cvs)
    known: dict[str, ServiceDistribution] = {
        "deterministic": DETERMINISTIC,
        "erlang2": Gamma((sqrt(0.5),)),
        "exponential": Gamma((1.0,)),
        "hyperexponential": Hyperexponential(),
    }
    if text not in known:
        raise SpecError(f"unknown service distribution {text!r}: choose one of {DISTRIBUTIONS_USAGE}")
    return known[text]


def _cv(text: str, parameter: str) -> float:
    try:
        cv = float(parameter)
    except ValueError:
        raise SpecError(f"service distribution {text!r}: CV is not a number; write for example gamma:0.3") from None
    if not 0.0 <= cv <= 10.0:
        raise SpecError(f"service distribution {text!r}: CV is not within 0..10; write for example gamma:0.3")
    return cv


def _in_blocks(sizes: int, block: Callable[[int], Floats]) -> Callable[[int], float]:
    """Return a sampler by batch size; `block` draws service times, s, for the size at an index."""
    blocks: list[list[float]] = [[] for _ in range(sizes)]

    def draw(batch_size: int) -> float:
        drawn = blocks[batch_size - 1]
        if not drawn:
            drawn.extend(block(batch_size - 1).tolist())
        return drawn.pop()

    return draw
