"""Speed and accuracy of the solver: solves, tables, percentiles, a long truncation, the papers' scheme, simulations.

Times are medians on one core. Methods that are compared are timed in turns in one run.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.support.harness import argument_parser, save_record
from policies.objectives.table import default_loads, solve_table
from policies.objectives.trial import Trial
from policies.percentile.ages import ResponseBounds, solve_ages
from policies.profile import Profile, load_profile
from policies.solver.distributions import Gamma, distribution
from policies.solver.model import Problem, build_model, objective_weights
from policies.solver.rvi import Rvi
from policies.solver.solver import Solution, evaluate, solve
from policies.solver.tail import ShortModel, best_tail, close

P4 = load_profile("googlenet-tesla-p4")
SIZES = np.arange(1, 33)
LINEAR = tuple((0.019899 * SIZES + 0.019603).tolist())
PROFILES = {
    "affine": P4,
    "logarithmic energy": replace(P4, energies=tuple((0.105 * np.log(SIZES) + 0.06).tolist())),
    "logarithmic time": Profile("log", tuple((1e-3 * (1.36 + 2.5 * np.log(SIZES))).tolist()), energies=LINEAR),
    "constant": Profile("constant", (6.0859e-3,) * 32, energies=LINEAR),
    "staircase": Profile(
        "staircase", tuple((1.0524e-3 + 0.3051e-3 * 8 * np.ceil(SIZES / 8)).tolist()), energies=LINEAR
    ),
}
DISTRIBUTIONS = ("deterministic", "erlang2", "exponential", "hyperexponential", "gamma:0.3")
LOADS, WEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99), (0.0, 1.0, 15.0)


def at_load(load: float, w2: float, profile: Profile = P4) -> Problem:
    """The problem of a profile at a load, with w1 = 1."""
    return Problem(profile, load * profile.capacity, 1.0, w2)


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Median time of a call, ms."""
    times = []
    for _ in range(rounds):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return round(1e3 * median(times), 3)


def single_solves(profile: Profile, rounds: int) -> dict[str, float]:
    """Time of a solve by load and weight, ms."""
    return {
        f"load {load}, w2 {w2:g}": milliseconds(partial(solve, at_load(load, w2, profile)), rounds)
        for load, w2 in product(LOADS, WEIGHTS)
    }


def long_truncation(problem: Problem, length: int) -> float:
    """The least gain of the model truncated to `length` states, by policy iteration from the greedy policy."""
    model, weights = build_model(problem), objective_weights(problem)
    tail = best_tail(model, weights)
    short = ShortModel(close(model, tail), length)
    policy = short.extend(np.where(np.arange(tail + 1) >= problem.min_batch_size, np.arange(tail + 1), 0))
    while True:
        value = short.value_of(policy)
        better = short.improve(policy, value, weights)
        if np.array_equal(better, policy):
            return float(value.average @ weights)
        policy = better


def accuracy() -> dict[str, float]:
    """Largest relative error of the gain over loads to 0.995 and weights to 500, by profile and distribution."""
    worst: dict[str, float] = {}
    for (name, profile), service in product(PROFILES.items(), DISTRIBUTIONS):
        errors = []
        for load, w2 in product((0.1, 0.5, 0.9, 0.97, 0.995), (0.0, 1.0, 500.0)):
            problem = replace(at_load(load, w2, profile), service=distribution(service, profile))
            errors.append(abs(solve(problem).gain / long_truncation(problem, 800) - 1.0))
        worst[f"{name}, {service}"] = float(f"{max(errors):.2g}")
    return worst


def beside_the_papers_scheme(rounds: int) -> dict[str, Any]:
    """The exact solver, the papers' scheme as printed, and the scheme to nine digits, at load 0.9 and w1 = w2 = 1."""
    problem = at_load(0.9, 1.0)
    schemes = {
        "exact": None,
        "rvi as printed": Rvi(100.0, 70, 0.01),
        "rvi to nine digits": Rvi(100.0, 256, 1e-7, 1_000_000),
    }
    truth, times = long_truncation(problem, 800), {name: list[float]() for name in schemes}
    errors: dict[str, float] = {}
    for _ in range(rounds):
        for name, scheme in schemes.items():
            start = perf_counter()
            solution = solve(problem, scheme)
            times[name].append(perf_counter() - start)
            errors[name] = abs(solution.gain / truth - 1.0)
    ratios = {
        name: round(median(slow / fast for slow, fast in zip(times[name], times["exact"], strict=True)), 1)
        for name in schemes
    }
    return {
        name: {
            "ms": round(1e3 * median(times[name]), 2),
            "times exact": ratios[name],
            "error of g": float(f"{errors[name]:.1g}"),
        }
        for name in schemes
    }


def curves(largest: int) -> dict[str, tuple[Profile, float]]:
    """Four profiles for batches of up to `largest`, and the coefficient of variation of their service times."""
    sizes = np.arange(1, largest + 1)
    joules = tuple((0.02 * sizes + 0.04).tolist())
    curved = tuple((0.3 * sizes**0.6 + 0.05).tolist())
    affine = Profile("affine", tuple((1e-4 * sizes + 2e-3).tolist()), energies=joules)
    return {
        "affine": (affine, 0.0),
        "affine, cv 0.3": (affine, 0.3),
        "concave": (Profile("concave", tuple((1e-3 * sizes**0.7 + 1e-3).tolist()), energies=curved), 0.0),
        "staircase": (
            Profile("staircase", tuple((1e-4 * 8 * np.ceil(sizes / 8) + 2e-3).tolist()), energies=joules),
            0.0,
        ),
    }


def certificates(largest: int) -> dict[str, dict[str, float]]:
    """Power over its lower bound, less 1, and seconds, of tables of maximum ages within twice l(B_max) for 95 %."""
    found = {}
    for (name, (profile, cv)), load in product(curves(largest).items(), (0.2, 0.5, 0.8)):
        problem = Problem(profile, load * profile.capacity, service=Gamma((cv,)))
        start = perf_counter()
        solution, kept = solve_ages(problem, ResponseBounds(((2.0 * max(profile.service_times), 0.95),)))
        seconds = perf_counter() - start
        gap = solution.mean_power / solution.power_lower_bound - 1.0 if kept else float("nan")
        found[f"{name}, load {load}"] = {"gap": float(f"{gap:.2g}"), "s": round(seconds, 2)}
    return found


def table_within_bound(largest: int) -> float:
    """Time of the 49 loads of a bound on the 95th percentile, s."""
    profile, _ = curves(largest)["affine"]
    bound = ResponseBounds(((2.0 * max(profile.service_times), 0.95),))
    problem = Problem(profile, 1.0)
    return milliseconds(lambda: solve_table(problem, default_loads(), lambda each: solve_ages(each, bound)[0]), 1) / 1e3


def simulations() -> dict[str, float]:
    """Time of a simulation of Table I's 1.66 million requests with their arrivals, s."""
    return {
        name: milliseconds(lambda: Trial(problem, 1_660_000).run(solution), 3) / 1e3  # noqa: B023  (called at once)
        for name, problem, solution in cases()
    }


def cases() -> Iterator[tuple[str, Problem, Solution]]:
    """Two policies of Table I, and greedy, which has the smallest batches."""
    for load in (0.7, 0.1):
        problem = at_load(load, 1.6)
        yield f"static:8, load {load}", problem, evaluate(problem, [0] * 8 + [8])
        yield f"smdp:w2=1.6, load {load}", problem, solve(problem)
        yield f"greedy, load {load}", problem, evaluate(problem, list(range(33)))


def main() -> None:
    """Print and record everything."""
    argument_parser(__doc__).parse_args()
    sizes = np.arange(1, 257)
    times, joules = 0.3051e-3 * sizes + 1.0524e-3, 0.019899 * sizes + 0.019603
    wide = Profile("wide", tuple(times.tolist()), energies=tuple(joules.tolist()))
    with threadpool_limits(limits=1, user_api="blas"):
        record: dict[str, Any] = {
            "solve, B_max 32, ms": single_solves(P4, 15),
            "solve, B_max 256, ms": single_solves(wide, 3),
            "table of 49 loads, ms": {
                f"w2 {w2:g}": milliseconds(partial(solve_table, at_load(0.5, w2), default_loads()), 7) for w2 in WEIGHTS
            },
            **{f"percentile, B_max {largest}": certificates(largest) for largest in (64, 128, 256)},
            "percentile, 49 loads, B_max 128, s": {"affine": table_within_bound(128)},
            "load 0.9, w1 = w2 = 1": beside_the_papers_scheme(5),
            "1.66 million requests, s": simulations(),
            "largest relative error of g against 800 states": accuracy(),
        }
    save_record("solver", record)
    for title, rows in record.items():
        print(title)
        for key, value in rows.items():
            print(f"  {key:36s} {value}")


if __name__ == "__main__":
    main()
