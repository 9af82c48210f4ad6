"""Simulation of solved policies with common random numbers, for percentiles of the response time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from policies.percentile.ages import AgeSolution
from policies.queue.arrivals import Instants, poisson
from policies.queue.simulator import Run
from policies.queue.table_simulator import ServiceModel, simulate_ages, simulate_table
from policies.solver.model import Problem
from policies.solver.solver import Solution
from policies.traits import ActionTable


@dataclass(frozen=True)
class Trial:
    """Poisson arrivals at the problem's rate and its service times, the same for every policy.

    Attributes:
        problem: the system; its weights are ignored.
        requests: number of arrivals.
        seed: seed of the arrivals, and of random service times.
    """

    problem: Problem
    requests: int
    seed: int = 0

    @cached_property
    def instants(self) -> Instants:
        """Instants of arrival, s; (requests,)."""
        rate, n = self.problem.arrival_rate, self.requests
        return poisson(rate, (n + 10 * n**0.5 + 10) / rate, np.random.default_rng(self.seed))[:n]

    def service_time(self) -> Callable[[int], float]:
        """Return a new sampler of the service time of a batch of b, s; all samplers draw the same sequence."""
        times = np.array(self.problem.truncated_profile.service_times)
        return self.problem.service.sampler(times, np.random.default_rng([self.seed, 1]))

    def run(self, solution: Solution) -> Run:
        """Simulate a solved or evaluated policy."""
        profile = self.problem.truncated_profile
        device = ServiceModel(self.service_time(), profile.max_batch_size, profile.costs)
        if isinstance(solution, AgeSolution):
            return simulate_ages(solution.max_ages, device, self.instants)
        table = ActionTable(solution.batch_size, profile.max_batch_size, solution.mix)
        return simulate_table(table, device, self.instants)


def simulated_percentile(share: float, requests: int, seed: int) -> Callable[[Problem, Solution], float]:
    """Return a function that simulates a policy and returns this quantile of its response time, s."""

    def measure(problem: Problem, solution: Solution) -> float:
        return float(np.quantile(Trial(problem, requests, seed).run(solution).responses, share))

    return measure
