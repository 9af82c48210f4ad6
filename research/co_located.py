"""Models that share a device: rules of which model is launched next, simulated with intervals.

Each policy has a table for each model, and a rule for the model whose batch is launched.

- `greedy` and `smdp`: as the server does it. The model with the largest product of queue, service rate and waiting time
  of the oldest request is launched (policies/rules/per_kind.py). The tables of `smdp` are those of a device that the
  other models slow down (policies/queue/lookup.py).
- `greedy, first formed` and `smdp, first formed`: the batch that was formed first is launched, and the tables of `smdp`
  are those of a device that serves one model alone.
- `valued`: the launch for which the energy, the waiting until its end, and the values of all models' queues at its end
  on their slowed devices, less the average cost in that time, are least in sum. The slowed device of a model takes
  l_i(b) rho / rho_i, with its load rho_i and the load rho of all models. This is like a step of policy iteration, but
  the slowed devices serve all models at once, which the real one cannot. The arrival rates are given to it; `smdp`
  measures them.

The cost is w1 x the mean response time of all requests in ms + w2 x the mean power in W, w1 = 1. In that cost a model
with a part p of the requests has the weight p for its own mean response time, and so `smdp` has w2 / p for each model.
All see the same arrivals in each run; the interval of a difference is that of the differences by run. No batch becomes
overdue, since there is no maximum wait. The settings were fixed before the first run but for the system with a very
rare model, which was added to see how the least frequent model fares. The weight n b W / l(b) was chosen among several
by runs in these settings, with fewer repetitions; it has no parameter that was fitted to them.

The record is written after each cell, and cells in it are not measured again; delete it to start over.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf
from typing import Any

import numpy as np
import scipy

from benchmarks.support.harness import argument_parser, fill_record, markdown_table
from policies.catalog import choose, combine
from policies.profile import Profile, load_profile
from policies.queue import simulator
from policies.queue.batcher import Batcher
from policies.queue.monitor import NoMonitor
from policies.queue.simulator import Service
from policies.solver.distributions import Floats
from policies.solver.model import Problem
from policies.solver.solver import solve
from policies.types import Action, BatchKey, Launch, Policy, Request, State, Wait
from research.smdp_bins import RUNS, interval

NAME = "co_located"
REQUESTS, SETTLING = 20_000, 1_000
LOADS, WEIGHTS = (0.3, 0.6, 0.9), (0.0, 2.0, 16.0)  # w2, ms/W
SYSTEMS: dict[
    str, Sequence[tuple[str, float, float]]
] = {  # profile, factor on its times and energies, share of the load
    "two": (("googlenet", 1, 0.5), ("resnet", 1, 0.5)),
    "two, one very rare": (("googlenet", 1, 0.01), ("resnet", 1, 0.99)),
    "two, one rare": (("googlenet", 1, 0.2), ("resnet", 1, 0.8)),
    "fast and slow": (("googlenet", 1, 0.5), ("googlenet", 4, 0.5)),
    "three": (("googlenet", 1, 1 / 3), ("resnet", 1, 1 / 3), ("googlenet", 4, 1 / 3)),
    "four": (("googlenet", 1, 0.25), ("resnet", 1, 0.25), ("googlenet", 4, 0.25), ("resnet", 3, 0.25)),
}
SHIPPED = {"googlenet": "googlenet-tesla-p4", "resnet": "resnet50-p4-int8"}
LARGEST_BATCH = 32
FIRST_FORMED = {"greedy": "greedy, first formed", "smdp": "smdp, first formed"}
POLICIES = (*FIRST_FORMED.values(), *FIRST_FORMED, "valued")
_LONGEST = 400  # queue in the value functions


@dataclass(frozen=True)
class System:
    """Models that share a device.

    Attributes:
        profiles: of each model.
        rates: of arrivals, 1/s.
        w2: weight of the mean power, ms/W.
    """

    profiles: tuple[Profile, ...]
    rates: tuple[float, ...]
    w2: float

    @property
    def alone(self) -> list[Problem]:
        """The problem of each model as if the device were its own, with its part of the cost."""
        return [
            Problem(profile, rate, rate / sum(self.rates), self.w2)
            for profile, rate in zip(self.profiles, self.rates, strict=True)
        ]

    @property
    def slowed(self) -> list[Problem]:
        """The problem of each model on a device that is slowed by the others, with its part of the cost."""
        loads = [rate / profile.capacity for rate, profile in zip(self.rates, self.profiles, strict=True)]
        problems = []
        for problem, load in zip(self.alone, loads, strict=True):
            times = tuple(t * sum(loads) / load for t in problem.profile.service_times)
            problems.append(replace(problem, profile=replace(problem.profile, service_times=times)))
        return problems

    def waiting_by_model(self, state: State) -> list[list[Request]]:
        """The waiting requests of each model, in order of arrival."""
        return [[r for r in state.waiting if r.kind.model == profile.name] for profile in self.profiles]


@dataclass(frozen=True)
class FirstFormed:
    """A policy for each model, as if the device were its own; the batch that was formed first is launched."""

    policies: Mapping[str, Policy]

    def decide(self, state: State, /) -> Action:
        """Return the launch that was formed first, else the shortest wait."""
        actions = [self.policies[kind.model].decide(part) for kind, part in state.by_kind().items()]
        launches = [action for action in actions if isinstance(action, Launch)]
        if launches:
            return min(launches, key=lambda launch: launch.requests[0].arrival)
        return Wait(min(action.until for action in actions if isinstance(action, Wait)))


@dataclass(frozen=True)
class Valued:
    """The launch of least cost by the value functions of the slowed devices."""

    system: System

    @cached_property
    def values(self) -> list[tuple[Floats, float]]:
        """Relative values by queue length, and average cost, of each model on its slowed device."""
        return [_relative_values(problem, solve(problem).batch_size) for problem in self.system.slowed]

    @cached_property
    def gain(self) -> float:
        """Average cost of all slowed devices."""
        return sum(gain for _, gain in self.values)

    @cached_property
    def at_ends(self) -> list[Floats]:
        """By launched model: expected values of each model at the end, (models, B, queue left at the launch)."""
        return [
            np.stack(
                [
                    _after(values, _poisson(rate * np.array(profile.service_times), _LONGEST + 1))
                    for (values, _), rate in zip(self.values, self.system.rates, strict=True)
                ]
            )
            for profile in self.system.profiles
        ]

    def decide(self, state: State, /) -> Action:
        """Return the launch, or the wait, of least cost."""
        requests = self.system.waiting_by_model(state)
        queues = np.minimum([len(each) for each in requests], _LONGEST)
        total = sum(self.system.rates)
        best, action = self._wait(queues), Launch([], reason="policy")
        for i, profile in enumerate(self.system.profiles):
            largest = min(int(queues[i]), profile.max_batch_size)
            times = np.array(profile.service_times[:largest])
            cost = self.system.w2 * np.array((profile.energies or ())[:largest]) - self.gain * times
            cost += 1e3 / total * (queues.sum() * times + total * times**2 / 2)
            sizes = np.arange(1, largest + 1)
            for j, queue in enumerate(queues):
                cost += self.at_ends[i][j, sizes - 1, queue - sizes if i == j else queue]
            if largest and cost.min() < best:
                best, action = float(cost.min()), Launch(requests[i][: int(cost.argmin()) + 1], reason="policy")
        return action if action.requests else Wait(inf)

    def _wait(self, queues: Any) -> float:
        """Cost of a wait for the next arrival; inf if a batch is full."""
        if any(queue >= each.max_batch_size for queue, each in zip(queues, self.system.profiles, strict=True)):
            return inf
        rates = np.array(self.system.rates)
        now = np.array([values[queue] for (values, _), queue in zip(self.values, queues, strict=True)])
        then = np.array([values[queue + 1] for (values, _), queue in zip(self.values, queues, strict=True)])
        following = now.sum() + rates @ (then - now) / rates.sum()
        return float(following + (1e3 * queues.sum() / rates.sum() - self.gain) / rates.sum())


def _poisson(means: Floats, counts: int) -> Floats:
    return np.asarray(scipy.stats.poisson.pmf(np.arange(counts), means[:, None]))


def _after(values: Floats, arrivals: Floats) -> Floats:
    """Expected values after arrivals, by batch size and queue left; the last increase goes on beyond the last queue."""
    beyond = values[-1] + (values[-1] - values[-2]) * np.arange(1, len(values) + 1)
    extended = np.concatenate([values, beyond])
    return np.stack([np.correlate(extended, row, "valid")[: len(values)] for row in arrivals])


def _relative_values(problem: Problem, table: Sequence[int]) -> tuple[Floats, float]:
    """Relative values of a table by queue length, 0 for an empty queue, and its average cost, equation (17)."""
    rate, times = problem.arrival_rate, np.array(problem.profile.service_times)
    arrivals, energies = _poisson(rate * times, _LONGEST + 1), problem.profile.energies or ()
    matrix, cost = np.eye(_LONGEST + 1), np.zeros(_LONGEST + 1)
    for queue in range(_LONGEST + 1):
        size = table[min(queue, len(table) - 1)]
        sojourn = times[size - 1] if size else 1.0 / rate
        moved = (
            arrivals[size - 1, : _LONGEST + 1 - queue + size]
            if size
            else np.eye(_LONGEST + 1)[1, : _LONGEST + 1 - queue]
        )
        matrix[queue, queue - size :] -= moved
        matrix[queue, -1] -= 1.0 - moved.sum()
        matrix[queue, 0] = sojourn
        waiting = queue * sojourn + (rate * sojourn**2 / 2 if size else 0.0)
        cost[queue] = 1e3 * problem.w1 / rate * waiting + (problem.w2 * energies[size - 1] if size else 0.0)
    solved = np.linalg.solve(matrix, cost)
    gain, solved[0] = float(solved[0]), 0.0
    return np.asarray(solved), gain


def system_of(name: str, load: float, w2: float) -> System:
    """The models of a setting, with arrival rates that together make the load."""
    profiles, rates = [], []
    for number, (key, factor, share) in enumerate(SYSTEMS[name]):
        shipped = load_profile(SHIPPED[key]).truncated(LARGEST_BATCH)
        times, energies = (tuple(factor * x for x in row or ()) for row in (shipped.service_times, shipped.energies))
        profiles.append(Profile(f"{key}-{number}", times, energies=energies))
        rates.append(load * share * profiles[-1].capacity)
    return System(tuple(profiles), tuple(rates), w2)


def policy_of(name: str, system: System) -> tuple[Policy, Any]:
    """Policy and monitor of this name."""
    if name == "valued":
        return Valued(system), NoMonitor()
    chosen = {}
    for profile, rate in zip(system.profiles, system.rates, strict=True):
        spec = "greedy" if name.startswith("greedy") else f"smdp:w2={system.w2 * sum(system.rates) / rate}"
        chosen[profile.name] = choose(spec, profile, max_wait=inf)
    policy, monitor = combine(chosen)
    return policy if name in FIRST_FORMED else FirstFormed({m: each.policy for m, each in chosen.items()}), monitor


def simulate(system: System, policy: Policy, monitor: Any, seed: int) -> float:
    """Cost of one run."""
    rng, end = np.random.default_rng(seed), REQUESTS / sum(system.rates)
    arrivals: list[tuple[float, str]] = []
    for profile, rate in zip(system.profiles, system.rates, strict=True):
        arrivals += [(float(at), profile.name) for at in rng.uniform(0.0, end, rng.poisson(rate * end))]
    requests = [Request(i, at, BatchKey(name)) for i, (at, name) in enumerate(sorted(arrivals))]
    by_name = {profile.name: profile for profile in system.profiles}

    def profile_of(launch: Launch) -> Profile:
        return by_name[launch.requests[0].kind.model]

    def energy(service: Service) -> float:
        return (profile_of(service.launch).energies or ())[len(service.launch.requests) - 1]

    batcher = Batcher(policy, {name: each.max_batch_size for name, each in by_name.items()}, deepcopy(monitor))
    run = simulator.run(batcher, requests, lambda launch: profile_of(launch).service_time(len(launch.requests)), energy)
    assert run.energies is not None
    begin = requests[SETTLING].arrival
    power = run.energies[run.finishes >= begin].sum() / (run.finishes[-1] - begin)
    return 1e3 * float(run.responses[run.arrivals >= begin].mean()) + system.w2 * float(power)


def measure(name: str, load: float, w2: float) -> dict[str, Any]:
    """Costs in one setting; differences, %, to the same policy and to the better one with the batch formed first."""
    system = system_of(name, load, w2)
    costs = {}
    for kind in POLICIES:
        policy, monitor = policy_of(kind, system)
        costs[kind] = np.array([simulate(system, policy, monitor, seed) for seed in range(RUNS)])

    def change(kind: str, other: str) -> list[float]:
        return interval(100 * (costs[kind] - costs[other]) / costs[other].mean())

    best = min(FIRST_FORMED.values(), key=lambda kind: costs[kind].mean())
    print(
        f"  {name}, {load}, {w2}: { {kind: round(float(each.mean()), 2) for kind, each in costs.items()} }", flush=True
    )
    return {
        "best": best,
        "cost": {kind: interval(each) for kind, each in costs.items()},
        "to_first_formed": {kind: change(kind, other) for kind, other in FIRST_FORMED.items()},
        "to_best": {kind: change(kind, best) for kind in (*FIRST_FORMED, "valued")},
    }


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = []
    for key, found in record.items():
        costs = [f"{found['cost'][kind][0]:.4g}" for kind in FIRST_FORMED.values()]
        changes = [*found["to_first_formed"].values(), *found["to_best"].values()]
        rows.append([*key.split("; "), *costs, *(f"{mean:+.1f} ± {half:.1f}" for mean, half in changes)])
    changes = [f"{kind} to {other}, %" for kind, other in FIRST_FORMED.items()]
    changes += [f"{kind} to the better of both, %" for kind in (*FIRST_FORMED, "valued")]
    return markdown_table(("models", "load", "w2, ms/W", *FIRST_FORMED.values(), *changes), rows)


def main() -> None:
    """Measure the cells that the record lacks and print them."""
    argument_parser(__doc__).parse_args()
    cells: dict[str, Callable[[], Any]] = {
        f"{name}; {load:g}; {w2:g}": partial(measure, name, load, w2)
        for name, load, w2 in product(SYSTEMS, LOADS, WEIGHTS)
    }
    print(table(fill_record(NAME, cells)))


if __name__ == "__main__":
    main()
