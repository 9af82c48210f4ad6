"""solve-policy: from a profile and a load to the policy of least cost, its exact averages, and a file to serve by."""

import json
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from loadgen import simulated
from policies.catalog import Chosen, action_table, choose, solved
from policies.command import run
from policies.profile import Profile, load_profile
from policies.queue.arrivals import poisson
from policies.smdp.model import Problem, build_model
from policies.smdp.solver import Solution, evaluate, solve
from policies.smdp.table import save_table, table_of
from policies.types import SpecError

app = typer.Typer(add_completion=False)
_EXACT = (
    *("average_cost", "mean_response_time_ms", "mean_power_w", "energy_per_request_mj", "mean_batch_size"),
    *("batch_size", "iterations"),
)


@dataclass(frozen=True)
class _Question:
    """What was asked about one load.

    Attributes:
        problem: the system and the weights.
        spec: the policy to evaluate; None solves.
        simulate: number of requests to simulate; 0 for none.
        seed: of the simulated arrivals.
    """

    problem: Problem
    spec: str | None
    simulate: int
    seed: int


@app.command()
def solve_policy(
    profile: Annotated[str, typer.Argument(help="a shipped profile's name, or a file")],
    arrival_rate: Annotated[float | None, typer.Option(help="requests per second")] = None,
    load: Annotated[float | None, typer.Option(help="arrival rate over the largest service rate")] = None,
    w1: Annotated[float, typer.Option(help="weight of the mean response time, per ms")] = 1.0,
    w2: Annotated[float, typer.Option(help="weight of the mean power, per W")] = 0.0,
    min_batch_size: Annotated[int, typer.Option(help="smallest batch")] = 1,
    max_batch_size: Annotated[int | None, typer.Option(help="largest batch")] = None,
    evaluate_: Annotated[str | None, typer.Option("--evaluate", help="evaluate this policy instead")] = None,
    simulate: Annotated[int, typer.Option(help="simulate so many requests as well")] = 0,
    seed: Annotated[int, typer.Option(help="of the simulated arrivals")] = 0,
    rates: Annotated[str | None, typer.Option(help="LO:HI:N, solve for N loads")] = None,
    output: Annotated[Path | None, typer.Option(help="policy file to write")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Find the policy that minimises w1 x mean response time + w2 x mean power."""
    device = load_profile(profile)
    _refuse(simulate < 0, f"--simulate {simulate} is no number of requests; give 1 or more")
    _refuse(seed < 0, f"--seed {seed} is below 0; give 0 or more")
    problem = Problem(device, 1.0, w1, w2, min_batch_size, max_batch_size)
    if rates is not None:
        _refuse(arrival_rate is not None or load is not None, "--rates names the loads: leave --load and the rate out")
        _refuse(evaluate_ is not None or simulate > 0, "--rates solves only: leave --evaluate and --simulate out")
        _solve_many(problem, _loads(rates), output, as_json)
        return
    _refuse(output is not None and evaluate_ is not None, "--output writes a solved policy: leave --evaluate out")
    problem = replace(problem, arrival_rate=_rate(build_model(problem).capacity, arrival_rate, load))
    answer, solution = _answer(_Question(problem, evaluate_, simulate, seed))
    if output is not None and solution is not None:
        save_table(table_of(problem, [solution]), output)
    _print(answer, as_json)


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise SpecError(message)


def _rate(capacity: float, arrival_rate: float | None, load: float | None) -> float:
    if (arrival_rate is None) == (load is None):
        raise SpecError("give either --arrival-rate PER_SECOND or --load RHO")
    rate = arrival_rate if arrival_rate is not None else (load or 0.0) * capacity
    if not 0.0 < rate < inf:
        raise SpecError(f"an arrival rate of {rate:g} per second cannot be: give a positive rate or load")
    return rate


def _loads(text: str) -> list[float]:
    try:
        low, high, count = text.split(":")
        loads: list[float] = np.linspace(float(low), float(high), int(count)).tolist()
    except ValueError:
        raise SpecError(f"--rates {text!r} is not LO:HI:N; write for example 0.02:0.98:49") from None
    if not loads or not 0.0 < min(loads) <= max(loads) < 1.0 or sorted(set(loads)) != loads:
        raise SpecError(f"--rates {text!r}: loads must ascend within 0..1, both excluded; write 0.02:0.98:49")
    return loads


def _answer(question: _Question) -> tuple[dict[str, Any], Solution | None]:
    """One load: solve or evaluate, and simulate if asked to."""
    problem = question.problem
    profile = problem.profile.truncated(problem.max_batch_size)
    began = perf_counter()
    chosen = None if question.spec is None else choose(question.spec, profile, max_wait=inf)
    table = None if chosen is None else action_table(chosen, problem.arrival_rate)
    if chosen is not None and table is None and not question.simulate:
        raise SpecError(f"policy {question.spec!r} is no function of the queue length: add --simulate N to measure it")
    solution = solve(problem) if chosen is None else None if table is None else evaluate(problem, table)
    seconds = perf_counter() - began
    answer = _describe(problem, profile, solution) | {"solve_time_ms": round(1e3 * seconds, 3)}
    if question.simulate:
        subject = chosen or solved(solution.batch_size if solution else (), profile)
        answer["simulated"] = _simulate(subject, question)
    return answer, solution


def _describe(problem: Problem, profile: Profile, solution: Solution | None) -> dict[str, Any]:
    answer = {
        "profile": profile.name,
        "arrival_rate_hz": problem.arrival_rate,
        "load": problem.arrival_rate / build_model(problem).capacity,
        "w1": problem.w1,
        "w2": problem.w2,
        "method": "exact" if solution else "simulation",
    }
    if solution is None:
        return answer | dict.fromkeys(_EXACT)
    energy = solution.energy_per_request
    averages = (
        solution.gain,
        1e3 * solution.mean_response_time,
        solution.mean_power,
        None if energy is None else 1e3 * energy,
        solution.mean_batch_size,
        list(solution.batch_size),
        solution.iterations,
    )
    return answer | dict(zip(_EXACT, averages, strict=True))


def _simulate(chosen: Chosen, question: _Question) -> dict[str, Any]:
    rate, n = question.problem.arrival_rate, question.simulate
    rng = np.random.default_rng(question.seed)
    instants = poisson(rate, (n + 10 * n**0.5 + 10) / rate, rng)[:n]
    result = simulated.simulate(chosen, instants)
    quantiles = dict(zip(("p50_ms", "p90_ms", "p95_ms", "p99_ms"), (50, 90, 95, 99), strict=True))
    return {
        "requests": n,
        "mean_ms": 1e3 * float(result.responses.mean()),
        **{key: 1e3 * float(np.percentile(result.responses, share)) for key, share in quantiles.items()},
        "mean_power_w": result.mean_power,
    }


def _solve_many(problem: Problem, loads: list[float], output: Path | None, as_json: bool) -> None:
    capacity = build_model(problem).capacity
    answers = [_answer(_Question(replace(problem, arrival_rate=load * capacity), None, 0, 0)) for load in loads]
    if output is not None:
        save_table(table_of(problem, [solution for _, solution in answers if solution is not None]), output)
    rows = [answer for answer, _ in answers]
    if as_json:
        print(json.dumps({"rows": rows}))
        return
    table = Table("load", "arrivals, 1/s", "mean ms", "W", "cost", "launches from", "largest", box=None)
    for row in rows:
        limit = next(n for n, action in enumerate(row["batch_size"]) if action)
        power = "-" if row["mean_power_w"] is None else f"{row['mean_power_w']:.3f}"
        figures = [f"{row[key]:.3f}" for key in ("load", "arrival_rate_hz", "mean_response_time_ms")]
        table.add_row(*figures, power, f"{row['average_cost']:.4f}", str(limit), str(max(row["batch_size"])))
    Console().print(table)


def _print(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    console = Console()
    for key, value in answer.items():
        console.print(f"{key:24} {value}", highlight=False, soft_wrap=True)


def main() -> None:
    """The console entry point."""
    run(app, "solve-policy")


if __name__ == "__main__":
    main()
