"""solve-policy: from a profile and a load to the policy of least cost, its exact averages, and a file to serve by."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadgen import simulated
from policies.action_lookup import action_table
from policies.catalog import Chosen, choose, in_stages, solved
from policies.charts.plots import plot_policy, plot_table
from policies.command import check_files, run
from policies.planning import devices, prices
from policies.planning.recommendations import Demand, demand_of, recommend, row_of
from policies.profile import load_profile
from policies.queue.simulator import Estimate, Run, estimate, percentile, share_within
from policies.sizing.size_distributions import SIZES
from policies.smdp.choice import ShareBound, UnreachableError, parse_bound
from policies.smdp.choice import choose as choose_weight
from policies.smdp.distributions import NAMES, distribution
from policies.smdp.model import Problem, build_model, check_actions
from policies.smdp.solver import Solution, evaluate, solve
from policies.smdp.table import save_table, table_of
from policies.smdp.trial import Trial
from policies.solve_options import MEASURED_OVER, Question, bound_of, check, loads_of, rate_of, refuse, scheme_of
from policies.types import SpecError

_SHOWN = 10  # of what was tried for a recommendation
app = typer.Typer(add_completion=False)
_EXACT = (
    *("average_cost", "mean_response_time_ms", "mean_power_w", "energy_per_request_mj", "mean_batch_size"),
    *("batch_size", "iterations"),
)


@dataclass(frozen=True)
class _Answer:
    """To one load.

    Attributes:
        question: with that load.
        said: the JSON object.
        solution: the policy, if it has exact averages.
        ran: the simulation, if there was one.
    """

    question: Question
    said: dict[str, Any]
    solution: Solution | None
    ran: Run | None


@app.command()
def solve_policy(
    context: typer.Context,
    profile: Annotated[str, typer.Argument(help="a shipped profile's name, or a file; longest, with --sizes")],
    arrival_rate: Annotated[float | None, typer.Option(help="requests per second")] = None,
    load: Annotated[float | None, typer.Option(help="arrival rate over the largest service rate")] = None,
    w1: Annotated[float, typer.Option(help="weight of the mean response time, per ms")] = 1.0,
    w2: Annotated[float | None, typer.Option(help="weight of the mean power, per W [default: 0]")] = None,
    slo_mean_ms: Annotated[float | None, typer.Option(help="least power with this mean response time")] = None,
    slo_p95_ms: Annotated[float | None, typer.Option(help="least power with this 95th percentile")] = None,
    slo_share: Annotated[str | None, typer.Option(help="MS:SHARE, least power with this share in time")] = None,
    power_cap_w: Annotated[float | None, typer.Option(help="least response time within this power")] = None,
    no_mix: Annotated[bool, typer.Option("--no-mix", help="one table, though a mix of two is better")] = False,
    min_batch_size: Annotated[int, typer.Option(help="smallest batch")] = 1,
    max_batch_size: Annotated[int | None, typer.Option(help="largest batch")] = None,
    service_distribution: Annotated[str, typer.Option(help=f"of service times: {NAMES}")] = "deterministic",
    evaluate_: Annotated[str | None, typer.Option("--evaluate", help="evaluate this policy instead")] = None,
    method: Annotated[str, typer.Option(help="exact, or rvi as the papers print it")] = "exact",
    overflow_cost: Annotated[float | None, typer.Option(help="c_o of rvi [default: 100]")] = None,
    max_queue_length: Annotated[int | None, typer.Option(help="s_max of rvi [default: as far as needed]")] = None,
    epsilon: Annotated[float | None, typer.Option(help="span at which rvi ends [default: 0.01]")] = None,
    max_iterations: Annotated[int | None, typer.Option(help="of rvi [default: 10000]")] = None,
    simulate: Annotated[int, typer.Option(help="simulate so many requests as well")] = 0,
    seed: Annotated[int, typer.Option(help="of the simulated arrivals")] = 0,
    rates: Annotated[str | None, typer.Option(help="LO:HI:N, solve for N loads")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help=f"recommend bins and batches for requests of these {SIZES}: lengths, or s with longest"),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="how many devices keep the promise at the least cost")] = False,
    device_price: Annotated[float | None, typer.Option(help="with --plan: of a device, an hour")] = None,
    idle_power_w: Annotated[
        float | None, typer.Option(help="with --plan: what an idle device draws [default: the profile's, if it knows]")
    ] = None,
    power_price: Annotated[float | None, typer.Option(help="with --plan: of a kWh")] = None,
    output: Annotated[Path | None, typer.Option(help="policy file to write")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw it into this file (.png, .pdf, .svg)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Find the policy that minimises w1 x mean response time + w2 x mean power."""
    if sizes is not None or profile == "longest":
        demand = demand_of(profile, sizes, _given(context), (arrival_rate, max_batch_size, seed))
        _recommend(demand, slo_mean_ms, as_json)
        return
    prices.check_flags(_given(context), plan)
    device, price = prices.priced(load_profile(profile), device_price, idle_power_w, power_price)
    check_files(output, plot)
    service = distribution(service_distribution, device)
    problem = Problem(device, 1.0, w1, w2 or 0.0, min_batch_size, max_batch_size, service)
    scheme = scheme_of(method, (overflow_cost, max_queue_length, epsilon, max_iterations))
    bound = bound_of(w2, (slo_mean_ms, slo_p95_ms, slo_share, power_cap_w))
    question = Question(problem, evaluate_, scheme, bound, not no_mix, simulate, seed)
    check(question, output is not None)
    if plan:
        _plan(question.at(rate_of(1.0, arrival_rate, None)), price, output, as_json)
        return
    rates_hz = _rates_hz(question, arrival_rate, load, rates)
    with _warnings_said():
        answers = [_answer(question.at(rate), rates is not None) for rate in rates_hz]
    _say_what_was_missed(answers)
    _write(question, answers, output, plot)
    said = [answer.said for answer in answers]
    if as_json:
        print(json.dumps({"rows": said} if rates is not None else said[0]))
    elif rates is not None:
        _print_rows(said)
    else:
        _print(said[0])


def _rates_hz(question: Question, arrival_rate: float | None, load: float | None, rates: str | None) -> list[float]:
    capacity = build_model(question.problem).capacity
    if rates is None:
        return [rate_of(capacity, arrival_rate, load)]
    refuse(arrival_rate is not None or load is not None, "--rates names the loads: leave --load and the rate out")
    refuse(question.spec is not None, "--rates solves only: leave --evaluate out")
    return [each * capacity for each in loads_of(rates)]


@contextmanager
def _warnings_said() -> Iterator[None]:
    """What the solver warns of, one line each on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if not warning.category.__module__.startswith("policies."):
            continue
        print(f"solve-policy: {warning.category.__name__}: {warning.message}", file=sys.stderr)


def _answer(question: Question, one_of_many: bool) -> _Answer:
    """One load: solve or evaluate, and simulate if asked to.

    Where no policy keeps a bound, the nearest one is a row of a table as good as another; alone it is an error.
    """
    problem, profile = question.problem, question.profile
    began = perf_counter()
    chosen = None if question.spec is None else choose(question.spec, in_stages(question.spec, profile), max_wait=inf)
    kept = True
    try:
        solution = _solved(question) if chosen is None else _evaluated(question, chosen)
    except UnreachableError as error:
        if not one_of_many:
            raise
        solution, kept = error.nearest, False
    seconds = perf_counter() - began
    said = _describe(question, solution) | {"solve_time_ms": round(1e3 * seconds, 3)}
    if question.bound is not None and one_of_many:
        said["bound_kept"] = kept
    ran = None
    if question.simulate:
        subject = chosen or solved(solution.batch_size if solution else (), profile, solution.mix if solution else None)
        trial = Trial(problem, question.simulate, question.seed)
        ran = simulated.simulate_policy(subject, trial.instants, service_time=trial.service_time())
        said["simulated"] = _summary(ran, question.shared_bound)
    return _Answer(question, said, solution, ran)


def _say_what_was_missed(answers: Sequence[_Answer]) -> None:
    """Loads at which no policy keeps the bound: one line on stderr; an error where there are no others."""
    missed = [f"{answer.said['load']:.3g}" for answer in answers if not answer.said.get("bound_kept", True)]
    if not missed:
        return
    said = f"no policy keeps the bound at load {', '.join(missed)}"
    refuse(len(missed) == len(answers), f"{said}: allow more, or lower the loads")
    print(f"solve-policy: {said}: what comes nearest stands there", file=sys.stderr)


def _solved(question: Question) -> Solution:
    if question.bound is None:
        return solve(question.problem, question.scheme)
    key, text = question.bound
    bound = parse_bound(key, text, max(question.simulate, MEASURED_OVER), question.seed)
    return choose_weight(question.problem, bound, question.mixed)


def _evaluated(question: Question, chosen: Chosen) -> Solution | None:
    table = action_table(chosen, question.problem.arrival_rate)
    if table is None and not question.simulate:
        raise SpecError(f"policy {question.spec!r} is no function of the queue length: add --simulate N to measure it")
    try:
        return None if table is None else evaluate(question.problem, *table)
    except SpecError as error:
        raise SpecError(f"policy {question.spec!r}: {error}") from error


def _describe(question: Question, solution: Solution | None) -> dict[str, Any]:
    problem = question.problem
    method = "simulation" if solution is None else "exact" if question.scheme is None else "rvi"
    answer: dict[str, Any] = {
        "profile": question.profile.name,
        "arrival_rate_hz": problem.arrival_rate,
        "load": problem.arrival_rate / build_model(problem).capacity,
        "w1": problem.w1,
        "w2": problem.w2 if solution is None else solution.w2,
        "method": method,
    }
    if question.bound is not None:
        answer["bound"] = question.bound_said
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
    answer |= dict(zip(_EXACT, averages, strict=True))
    if solution.mix is not None:
        answer["mix"] = {"probability": solution.mix.probability, "batch_size": list(solution.mix.batch_size)}
    if solution.overflow_cost_share is not None:
        answer["overflow_cost_share"] = solution.overflow_cost_share
    return answer


def _summary(ran: Run, bound: ShareBound | None) -> dict[str, Any]:
    """Mean and percentiles with their standard errors, and the share within the bound where one was given."""
    found = {"mean_ms": estimate(ran.responses, lambda block: float(block.mean()))}
    for percent in (50, 90, 95, 99):
        found[f"p{percent}_ms"] = percentile(ran.responses, percent / 100)
    said: dict[str, Any] = {"requests": ran.scheduled, **{key: 1e3 * each.value for key, each in found.items()}}
    said["mean_power_w"] = ran.mean_power
    said["standard_error_ms"] = {key.removesuffix("_ms"): _error(each, 1e3) for key, each in found.items()}
    if bound is not None:
        share = share_within(ran.responses, bound.response_time)
        said["share_within"] = {"share": share.value, "standard_error": _error(share, 1.0)}
    return said


def _error(estimated: Estimate, per_unit: float) -> float | None:
    return per_unit * estimated.standard_error if isfinite(estimated.standard_error) else None


def _write(question: Question, answers: Sequence[_Answer], output: Path | None, plot: Path | None) -> None:
    solutions = [answer.solution for answer in answers if answer.solution is not None]
    if output is not None:
        for solution in solutions:
            check_actions(solution.batch_size, 1, question.profile.max_batch_size)
        save_table(table_of(question.problem, solutions, question.bound_said), output)
    if plot is None:
        return
    refuse(not solutions, f"policy {question.spec!r} is no function of the queue length: leave --plot out")
    try:
        if len(answers) > 1:
            said = "" if question.bound is None else f"{question.bound[0].replace('_', '-')} {question.bound[1]}"
            plot_table(solutions, plot, said)
        else:
            ran, shared = answers[0].ran, question.shared_bound
            responses = None if ran is None else ran.responses
            limit = None if shared is None else shared.response_time
            plot_policy(answers[0].question.problem, solutions[0], responses, plot, limit)
    except OSError as error:
        raise SpecError(f"cannot write {error.filename!r}: {error.strerror}; give another file") from error


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    measured = [("p95 ms", lambda row: f"{row['simulated']['p95_ms']:.3f}")] if "simulated" in rows[0] else []
    bounded = [("kept", lambda row: "yes" if row["bound_kept"] else "no")] if "bound_kept" in rows[0] else []
    more: list[tuple[str, Callable[[dict[str, Any]], str]]] = [*measured, *bounded]
    titles = ["load", "arrivals, 1/s", "w2", "mean ms", "W", "cost", "launches from", "largest"]
    table = Table(*titles, *(title for title, _ in more), box=None)
    for row in rows:
        limit = next((n for n, action in enumerate(row["batch_size"]) if action), "-")
        power = "-" if row["mean_power_w"] is None else f"{row['mean_power_w']:.3f}"
        figures = [f"{row['load']:.3f}", f"{row['arrival_rate_hz']:.3f}", f"{row['w2']:.4g}"]
        averages = [f"{row['mean_response_time_ms']:.3f}", power, f"{row['average_cost']:.4f}"]
        launches = [str(limit), str(max(row["batch_size"]))]
        table.add_row(*figures, *averages, *launches, *(tell(row) for _, tell in more))
    Console().print(table)


def _given(context: typer.Context) -> list[str]:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _recommend(demand: Demand, slo_mean_ms: float | None, as_json: bool) -> None:
    wrong = slo_mean_ms is not None and not 0.0 < slo_mean_ms < inf
    refuse(wrong, f"--slo-mean-ms {slo_mean_ms} cannot be: give a positive time")
    bound = None if slo_mean_ms is None else slo_mean_ms / 1e3
    tried = recommend(demand, bound)
    rows = [row_of(each, demand, bound) for each in tried]
    if as_json:
        said = {"profile": demand.name, "arrival_rate_hz": demand.arrival_rate}
        print(json.dumps({**said, "bound": slo_mean_ms and {"slo_mean_ms": slo_mean_ms}, "rows": rows}))
        return
    print(f"recommended: {rows[0]['policy']}")
    table = Table("bins", "batch size", "most, 1/s", "load", "least, ms", "mean, ms", "±", "kept", box=None)
    for row in rows[:_SHOWN]:
        times = (f"{row[key]:.4g}" for key in ("least_response_time_ms", "mean_response_time_ms", "standard_error_ms"))
        kept = {True: "yes", False: "no", None: "-"}[row["bound_kept"]]
        table.add_row(
            str(row["bins"]), str(row["batch_size"]), f"{row['capacity_hz']:.4g}", f"{row['load']:.3f}", *times, kept
        )
    Console().print(table)


def _plan(question: Question, price: prices.Price, output: Path | None, as_json: bool) -> None:
    assert question.bound is not None  # the flags are checked
    bound = parse_bound(*question.bound, max(question.simulate, MEASURED_OVER), question.seed)
    requests = question.simulate or MEASURED_OVER
    demand = devices.Demand(question.problem, bound, price, question.mixed, requests, question.seed)
    with _warnings_said():
        found = devices.plan(demand)
    best, checks = found.best, {}
    if output is not None:
        save_table(table_of(demand.share(best.devices), [best.solution], question.bound_said), output)
    for routing, ran in devices.check(demand, best).items():
        checks[routing] = said = _summary(ran, question.shared_bound)
        said["mean_power_w"] = None if best.power is None else best.devices * price.idle + said["mean_power_w"]
    answer = {
        "profile": question.profile.name,
        "arrival_rate_hz": question.problem.arrival_rate,
        "bound": question.bound_said,
        "devices": best.devices,
        "cost": best.cost,
        "cost_unit": price.unit,
        "candidates": [devices.row_of(each) for each in found.tried],
        "beyond": {"devices": found.beyond, "least_cost": found.least_beyond},
        "simulated": checks,
    }
    if as_json:
        print(json.dumps(answer))
    else:
        _print_plan(answer)


def _print_plan(answer: dict[str, Any]) -> None:
    unit = answer["cost_unit"]
    table = Table("", "devices", "load", "kept", "batches", "mean ms", "p95 ms", "W", unit, box=None)
    for row in answer["candidates"]:
        first = next(n for n, action in enumerate(row["batch_size"]) if action)
        figures = (f"{row[key]:.3f}" for key in ("mean_response_time_ms", "p95_ms"))
        kept, best = "yes" if row["bound_kept"] else "no", ">" if row["devices"] == answer["devices"] else ""
        which = best, str(row["devices"]), f"{row['load']:.3f}", kept, f"{first} to {max(row['batch_size'])}"
        table.add_row(*which, *figures, _watts(row), f"{row['cost']:.5g}")
    Console().print(table)
    print(f"{answer['beyond']['devices']} devices or more: at least {answer['beyond']['least_cost']:.6g} {unit}\n")
    table = Table("simulated, sent", "mean ms", "±", "p95 ms", "±", "W", box=None)
    for routing, said in answer["simulated"].items():
        pairs = ((said[f"{key}_ms"], said["standard_error_ms"][key] or inf) for key in ("mean", "p95"))
        table.add_row(routing, *(f"{figure:.3f}" for pair in pairs for figure in pair), _watts(said))
    Console().print(table)


def _watts(row: dict[str, Any]) -> str:
    return "-" if row["mean_power_w"] is None else f"{row['mean_power_w']:.2f}"


def _print(answer: dict[str, Any]) -> None:
    console = Console()
    for key, value in answer.items():
        console.print(f"{key:24} {value}", highlight=False, soft_wrap=True)


def main() -> None:
    """The console entry point."""
    run(app, "solve-policy")


if __name__ == "__main__":
    main()
