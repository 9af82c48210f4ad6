"""Solved policies under the same simulated arrivals: percentiles of the response time, which no closed form gives."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from policies.queue.arrivals import Instants, poisson
from policies.queue.counting import CountTable, Device, run_table
from policies.queue.simulator import Run
from policies.smdp.model import Problem
from policies.smdp.solver import Solution


@dataclass(frozen=True)
class Trial:
    """So many Poisson arrivals at the problem's rate, and its service times; each policy meets the same arrivals.

    Attributes:
        problem: the system; its weights are not looked at.
        requests: how many arrive.
        seed: of the arrivals, and of the service times where they vary.
    """

    problem: Problem
    requests: int
    seed: int = 0

    @cached_property
    def instants(self) -> Instants:
        """Of arrival, s; (requests,)."""
        rate, n = self.problem.arrival_rate, self.requests
        return poisson(rate, (n + 10 * n**0.5 + 10) / rate, np.random.default_rng(self.seed))[:n]

    def service_time(self) -> Callable[[int], float]:
        """Draws a service time, s, of a batch of b at each call; each sampler draws the same."""
        times = np.array(self.problem.profile.truncated(self.problem.max_batch_size).service_times)
        return self.problem.service.sampler(times, np.random.default_rng([self.seed, 1]))

    def run(self, solution: Solution) -> Run:
        """Serve them by a solved, or evaluated, policy."""
        profile = self.problem.profile.truncated(self.problem.max_batch_size)
        table = CountTable(solution.batch_size, profile.max_batch_size, solution.mix)
        return run_table(table, Device(self.service_time(), profile.max_batch_size, profile.energies), self.instants)


def simulated_percentile(share: float, requests: int, seed: int) -> Callable[[Problem, Solution], float]:
    """Measures the time, s, within which a policy answers this share of so many requests."""

    def measure(problem: Problem, solution: Solution) -> float:
        return float(np.quantile(Trial(problem, requests, seed).run(solution).responses, share))

    return measure
