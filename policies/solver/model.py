"""The batching SMDP: when to launch a batch, and how large, where requests arrive as a Poisson process.

Source: Xu, Zhou and Niu, "SMDP-Based Dynamic Batching for Improving Responsiveness and Energy Efficiency of Batch
Services" (arXiv 2501.02181), sections III and IV. A decision epoch is the completion of a batch, or an arrival at an
idle device. The state is the queue length; the action is the size of the batch to launch, 0 to wait for the next
arrival. The objective is the long-run average of w1 x response time + w2 x power.

| symbol       | name here                          | meaning, unit                                        | equation |
|--------------|------------------------------------|------------------------------------------------------|----------|
| lambda       | arrival_rate                       | requests per second                                  | III      |
| s            | queue length                       | requests that wait at a decision epoch               | IV       |
| a, b         | action, batch_size                 | size to launch; 0 waits                              | IV       |
| B_min, B_max | min_batch_size, max_batch_size     | smallest and largest batch                           | III      |
| G_b          | ServiceDistribution                | service time of a batch of b, a random variable      | (1)      |
| l(b), 1/mu   | service_time; sojourn_time         | E[G_b], s                                            | III, (9) |
| E[G_b^2]     | second_moments; half_second_moment | s^2                                                  | (11)     |
| p_k^[b]      | arrival_probabilities              | k arrivals during a batch of b                       | (4)      |
| m(j given s, a) | read from p_k                   | the queue moves to s - a + k                         | (7)      |
| y(s, a)      | sojourn_time                       | mean time to the next epoch, s; 1/lambda when idle   | (9)      |
| zeta(b)      | costs                              | of the resource per batch: J, CPU s or busy s        | III      |
| theta(b)     | throughput                         | b / l(b), 1/s                                        | III      |
| rho          | load                               | lambda over the largest theta(b)                     | III      |
| w1, w2       | w1, w2                             | weights: per ms of response time, per W of power     | (2)      |
| c(s, a)      | HOLDING, charges                   | cost until the next epoch                            | (11)     |
| g, h         | gain, bias                         | average cost per unit time; relative value function  | (17)     |

Waiting is an action like the others: its sojourn is 1/lambda, it charges nothing, and exactly one request arrives.
The holding cost of (11) follows from the same formula with half_second_moment 0, because the one arrival of a wait
comes at its end.

Times are seconds; only the weights refer to milliseconds. Power stands for the resource that the profile saves, per
second: W, or cores, or the busy share of the device (journal, remark 2: zeta may be any cost of a batch).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from policies.profile import Profile
from policies.solver.distributions import DETERMINISTIC, Floats, Ints, ServiceDistribution
from policies.types import ParameterError, SpecError

# Columns of the accumulated quantities: time spent by requests (s), energy (J), batches launched.
RESPONSE, POWER, LAUNCHES = range(3)
HOLDING: Floats = np.array([1.0, 0.0, 0.0])  # per request in the system, per second, times lambda

_MIN_RATE = 1e-12  # 1/s; lower rates are lost in rounding
_MAX_WEIGHT = 1e9  # above, the other term of the objective is lost in rounding
LARGEST_LOAD = 0.98  # up to it the longest queues, which percentiles and tables of maximum ages leave out, are rare


@dataclass(frozen=True)
class Problem:
    """The system and the objective for which a policy is solved or evaluated.

    Attributes:
        profile: service time and energy by batch size.
        arrival_rate: lambda, 1/s.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W, or of another resource in its unit per second.
        min_batch_size: B_min.
        max_batch_size: B_max; None: the profile's.
        service: distribution of the service times around the profile's means.
    """

    profile: Profile
    arrival_rate: float
    w1: float = 1.0
    w2: float = 0.0
    min_batch_size: int = 1
    max_batch_size: int | None = None
    service: ServiceDistribution = DETERMINISTIC

    @property
    def truncated_profile(self) -> Profile:
        """The profile for batches up to B_max."""
        return self.profile.truncated(self.max_batch_size)


@dataclass(frozen=True, eq=False)
class Model:
    """The SMDP in arrays indexed by action, 0 (wait) to B_max.

    Attributes:
        arrival_rate: lambda, 1/s.
        min_batch_size: B_min; the arrays include the actions between 0 and B_min, which are not allowed.
        service_times: l(1..B_max), s.
        half_second_moment: E[G_a^2] / 2, s^2; 0 for a wait.
        mean_arrivals: E[N_a], requests that arrive until the next epoch.
        arrivals_variance: Var[N_a].
        charges: immediate charges of an action, (B_max + 1, 3): columns RESPONSE (0), POWER (J), LAUNCHES (1).
        service: distribution of the service times.
    """

    arrival_rate: float
    min_batch_size: int
    service_times: Floats
    half_second_moment: Floats
    mean_arrivals: Floats
    arrivals_variance: Floats
    charges: Floats
    service: ServiceDistribution

    @property
    def max_batch_size(self) -> int:
        """B_max."""
        return len(self.service_times)

    @cached_property
    def actions(self) -> Ints:
        """0..B_max."""
        return np.arange(self.max_batch_size + 1)

    @cached_property
    def sojourn_time(self) -> Floats:
        """y(a), s, equation (9)."""
        return np.concatenate([[1.0 / self.arrival_rate], self.service_times])

    @cached_property
    def drain(self) -> Floats:
        """d(a) = a - E[N_a], the mean decrease of the queue length under an action; -1 for a wait."""
        return self.actions - self.mean_arrivals

    @cached_property
    def squared_move(self) -> Floats:
        """E[(N_a - a)^2], the second moment of the change of the queue length."""
        return self.arrivals_variance + self.drain**2

    @cached_property
    def throughput(self) -> Floats:
        """theta(a) = a / l(a), 1/s; 0 for actions that are not allowed."""
        return np.where(self.allowed, self.actions / self.sojourn_time, 0.0)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Whether an action is in the action space, 0 and B_min..B_max."""
        return np.asarray((self.actions == 0) | (self.actions >= self.min_batch_size))

    @property
    def capacity(self) -> float:
        """The largest throughput of an allowed size, 1/s."""
        return float(self.throughput.max())

    @property
    def load(self) -> float:
        """The load rho: arrival rate over capacity."""
        return self.arrival_rate / self.capacity

    def arrival_probabilities(self, counts: int) -> Floats:
        """Return p_k^[a] for k < counts, (B_max + 1, counts); in a wait exactly one request arrives."""
        launched = self.service.arrival_probabilities(self.arrival_rate, self.service_times, counts)
        return np.vstack([np.arange(counts) == 1, launched])


def build_model(problem: Problem) -> Model:
    """Build the arrays of a problem.

    Raises:
        SpecError: an invalid arrival rate, weight or batch size.
    """
    _check(problem)
    profile = problem.truncated_profile
    _check_min_batch_size(problem.min_batch_size, profile.max_batch_size)
    rate, times = problem.arrival_rate, np.array(profile.service_times)
    second = problem.service.second_moments(times)
    counted = np.zeros((len(times) + 1, 3))
    counted[1:, POWER] = profile.costs
    counted[1:, LAUNCHES] = 1.0
    return Model(
        arrival_rate=rate,
        min_batch_size=problem.min_batch_size,
        service_times=times,
        half_second_moment=np.concatenate([[0.0], second / 2.0]),
        mean_arrivals=np.concatenate([[1.0], rate * times]),
        arrivals_variance=np.concatenate([[0.0], rate * times + rate**2 * (second - times**2)]),
        charges=counted,
        service=problem.service,
    )


def objective_weights(problem: Problem) -> Floats:
    """Return the weights of the columns RESPONSE (s), POWER (W) and LAUNCHES in the objective; (3,)."""
    return np.array([1e3 * problem.w1, problem.w2, 0.0])


def check_actions(batch_size: Sequence[int], min_batch_size: int, max_batch_size: int) -> None:
    """Check a table of actions for queue length 0, 1, 2, ..., of which the last repeats.

    Raises:
        SpecError: it is empty, launches more than waits or a size that is not allowed, or ends in a wait.
    """
    if not batch_size:
        raise SpecError("the action table is empty; give an action for queue length 0, 1, 2, ...")
    for length, action in enumerate(batch_size):
        if action != 0 and not min_batch_size <= action <= max_batch_size:
            raise SpecError(
                f"action {action} at queue length {length} is neither 0 nor a batch size "
                f"{min_batch_size}..{max_batch_size}; choose one of those"
            )
        if action > length:
            raise SpecError(
                f"action {action} at queue length {length} launches more than waits; launch at most {length}"
            )
    if batch_size[-1] == 0:
        raise SpecError(
            f"the last action, at queue length {len(batch_size) - 1}, is 0 and would wait forever; "
            "end the table with a batch size"
        )


def check_solvable(problem: Problem, model: Model) -> None:
    """Check that an optimal policy exists.

    Raises:
        SpecError: the load is 1 or more, or w1 is 0.
    """
    if model.load >= 1.0:
        raise SpecError(
            f"load {model.load:.4g} is 1 or more: arrival rate {problem.arrival_rate:g} per second, capacity "
            f"{model.capacity:.6g} per second; lower the rate, allow larger batches, or plan several devices"
        )
    if problem.w1 == 0.0:
        raise ParameterError("w1", "0", "does not limit response times; give a positive weight")


def is_within_largest_load(problem: Problem) -> bool:
    """Return whether the load is at most LARGEST_LOAD."""
    return problem.arrival_rate <= (LARGEST_LOAD + 1e-6) * problem.truncated_profile.capacity


def check_limit(response_time: float, share: float | None = None) -> None:
    """Check a bound on the response time, s: on its mean, or on the share of the requests within it.

    Raises:
        SpecError: the time is not positive and finite, or the share is not between 0 and 1.
    """
    if not 0.0 < response_time < inf:
        raise SpecError(f"a bound of {1e3 * response_time:g} ms is invalid; give a positive number")
    if share is not None and not 0.0 < share < 1.0:
        raise SpecError(f"a share of {share:g} of the requests is not between 0 and 1; give for example 0.95")


def _check(problem: Problem) -> None:
    if not _MIN_RATE <= problem.arrival_rate < inf:
        raise SpecError(
            f"arrival rate {problem.arrival_rate:g} is not positive; give requests per second, at least {_MIN_RATE:g}"
        )
    for name, weight in (("w1", problem.w1), ("w2", problem.w2)):
        if not 0.0 <= weight <= _MAX_WEIGHT:
            raise ParameterError(name, f"{weight:g}", f"is not a weight; give a number from 0 to {_MAX_WEIGHT:g}")


def _check_min_batch_size(smallest: int, largest: int) -> None:
    if not 1 <= smallest <= largest:
        raise ParameterError("min_batch_size", f"{smallest}", f"is outside 1..{largest}; choose one of those")
