"""The solve-policy command: solve or evaluate a policy, plan capacity, or recommend bins."""

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from policies.catalog import ModelPolicy, choose, in_stages, solved
from policies.charts.plots import plot_policy, plot_table
from policies.command_line.common import (
    VersionFlag,
    check_files,
    complete_policies,
    complete_profiles,
    examples,
    print_warnings,
    run,
    writing,
)
from policies.command_line.levels import check_level_flags, show_level_plan, show_levels
from policies.command_line.options import (
    SolveOptions,
    bounds_of,
    check_options,
    loads_of,
    rate_of,
    reject_if,
    scheme_of,
)
from policies.command_line.plans import show_pipeline_plan, show_plan, taken
from policies.command_line.results import PolicyResult, SimulationResult, evaluate_with, solve_with
from policies.objectives.bounds import FORMS, check_form
from policies.objectives.frontier import UnreachableError
from policies.objectives.table import save_table, table_of
from policies.objectives.trial import Trial
from policies.percentile.ages import AgeSolution
from policies.planning import prices
from policies.planning.pipelines import parse_steps
from policies.planning.recommendations import BinningProblem, candidate_row, parse_problem, recommend
from policies.planning.simulation import simulate_policy
from policies.profile import RESOURCES, Profile, load_profile, resource_of, shipped_profiles
from policies.queue.simulator import Run
from policies.sizing.size_distributions import LONGEST_REQUEST, SIZES_USAGE
from policies.solver.distributions import DETERMINISTIC, DISTRIBUTIONS_USAGE, distribution
from policies.solver.model import Problem, build_model, check_actions
from policies.solver.solver import Solution

app = typer.Typer()

GROUPS = {
    "Arrivals": ("arrival_rate", "load", "rates"),
    "Objective": (
        "w1",
        "w2",
        "slo_mean_ms",
        "slo_p95_ms",
        "slo_share",
        "power_cap_w",
        "resource_cap",
        "resource",
        "no_mix",
        "policy_form",
    ),
    "Priorities": ("priority_weights", "priority_shares"),
    "System": ("min_batch_size", "max_batch_size", "service_distribution"),
    "Method and evaluation": (
        *("evaluate_", "method", "overflow_cost", "max_queue_length", "epsilon", "max_iterations", "simulate", "seed"),
    ),
    "Recommendations": ("sizes", "plan", "spare", "device_price", "idle_power_w", "power_price"),
    "Output": ("output", "plot", "as_json"),
}
_EXAMPLES = examples(
    "solve-policy googlenet-tesla-p4 --load 0.5 --w2 2",
    "solve-policy googlenet-tesla-p4 --load 0.5 --slo-p95-ms 10 --plot policy.png",
    "solve-policy googlenet-tesla-p4 --rates 0.1:0.9:9 --slo-p95-ms 10 --output policy.json",
    "solve-policy googlenet-tesla-p4 --plan --arrival-rate 5000 --slo-p95-ms 10 --spare 1",
    "solve-policy --list-profiles",
)

_MAX_SHOWN = 10  # candidates printed with a recommendation
_EXACT_KEYS = (  # null in the JSON object of a policy that is only simulated
    "average_cost",
    "mean_response_time_ms",
    "mean_power_w",
    "energy_per_request_mj",
    "mean_batch_size",
    "batch_size",
    "iterations",
)


@dataclass(frozen=True)
class _Result:
    """The result at one load.

    Attributes:
        options: the options, with that load.
        fields: the JSON object.
        solution: the policy, if it has exact averages.
        simulation: the simulation, if there was one.
    """

    options: SolveOptions
    fields: dict[str, Any]
    solution: Solution | None
    simulation: Run | None


def _print_profiles(given: bool) -> None:
    if not given:
        return
    name = Column("profile", no_wrap=True)
    table = Table(name, "device", "batch", "l(1), ms", "1/s", Column("energies", no_wrap=True), box=None)
    for profile in map(load_profile, shipped_profiles()):
        numbers = str(profile.max_batch_size), f"{1e3 * profile.service_time(1):.3g}", f"{profile.capacity:.0f}"
        energies = "none" if profile.energies is None else profile.energy_source
        table.add_row(profile.name, profile.device, *numbers, energies)
    Console().print(table)
    raise typer.Exit


@app.command(epilog=_EXAMPLES)
def solve_policy(
    context: typer.Context,
    profile: Annotated[
        str,
        typer.Argument(
            help="Name of a shipped profile, or path of a profile file; with --sizes also longest, with --plan also "
            "PROFILE:REQUESTS,PROFILE:REQUESTS, the models of a pipeline and their requests in a call.",
            autocompletion=complete_profiles,
        ),
    ],
    arrival_rate: Annotated[
        float | None, typer.Option("--arrival-rate", "--rate", help="Arrival rate in requests per second.")
    ] = None,
    load: Annotated[
        float | None, typer.Option(help="Load: arrival rate over the largest service rate, between 0 and 1.")
    ] = None,
    w1: Annotated[float, typer.Option(help="Weight of the mean response time in the cost, per ms.")] = 1.0,
    w2: Annotated[
        float | None, typer.Option(help="Weight of the resource in the cost, per W, core or busy share (default: 0).")
    ] = None,
    slo_mean_ms: Annotated[
        float | None, typer.Option(help="Save the resource within this mean response time in ms.")
    ] = None,
    slo_p95_ms: Annotated[
        float | None, typer.Option(help="Save the resource within this 95th percentile of the response time in ms.")
    ] = None,
    slo_share: Annotated[
        list[str] | None,
        typer.Option(
            help="MS:SHARE: save the resource with this share of the requests answered within MS ms; repeatable."
        ),
    ] = None,
    power_cap_w: Annotated[
        float | None, typer.Option(help="Minimise the mean response time within this mean power in W.")
    ] = None,
    resource_cap: Annotated[
        float | None,
        typer.Option(help="Minimise the mean response time within this much of the resource: W, cores, or busy share."),
    ] = None,
    resource: Annotated[
        str | None,
        typer.Option(help=f"What to save: {', '.join(RESOURCES)} (default: the first that the profile has)."),
    ] = None,
    no_mix: Annotated[
        bool, typer.Option("--no-mix", help="Meet the bound with one table instead of a mix of two.")
    ] = False,
    policy_form: Annotated[
        str,
        typer.Option(help="Form of the policy that keeps a percentile: max-ages (which takes least) or batch-size."),
    ] = FORMS[0],
    min_batch_size: Annotated[int, typer.Option(help="Smallest batch size, in requests.")] = 1,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Largest batch size, in requests (default: the profile's).")
    ] = None,
    service_distribution: Annotated[
        str, typer.Option(help=f"Distribution of the service times: {DISTRIBUTIONS_USAGE}.")
    ] = "deterministic",
    evaluate_: Annotated[
        str | None,
        typer.Option(
            "--evaluate", help="Evaluate this policy spec instead of solving.", autocompletion=complete_policies
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="Method: exact, or rvi (the papers' relative value iteration on a truncated queue)."),
    ] = "exact",
    overflow_cost: Annotated[
        float | None, typer.Option(help="Overflow cost c_o of rvi, in the unit of the cost (default: 100).")
    ] = None,
    max_queue_length: Annotated[
        int | None, typer.Option(help="Maximum queue length s_max of rvi, in requests (default: chosen automatically).")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Span at which rvi stops, in the unit of the cost (default: 0.01).")
    ] = None,
    max_iterations: Annotated[
        int | None, typer.Option(help="Maximum number of iterations of rvi (default: 10000).")
    ] = None,
    simulate: Annotated[int, typer.Option(help="Number of requests to simulate in addition; 0 for none.")] = 0,
    seed: Annotated[int, typer.Option(help="Random seed of the simulated arrivals.")] = 0,
    rates: Annotated[str | None, typer.Option(help="LO:HI:N: solve for N equally spaced loads from LO to HI.")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help=f"Recommend bins and a batch size for this distribution of request sizes: {SIZES_USAGE}; in tokens, "
            "with longest in s."
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Find the number of devices of least cost that keeps the bound.")
    ] = False,
    spare: Annotated[
        int, typer.Option(help="With --plan: number of devices that may be out of service while the bound is kept.")
    ] = 0,
    device_price: Annotated[float | None, typer.Option(help="With --plan: price of a device per hour.")] = None,
    idle_power_w: Annotated[
        float | None, typer.Option(help="With --plan: power of an idle device in W (default: the profile's, if known).")
    ] = None,
    power_price: Annotated[float | None, typer.Option(help="With --plan: price of a kWh.")] = None,
    priority_weights: Annotated[
        str | None,
        typer.Option(help="W1,W2,...: weights of the mean response times of priority levels, the first level first."),
    ] = None,
    priority_shares: Annotated[
        str | None, typer.Option(help="S1,S2,...: shares of the levels in the arrivals.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the solved policy to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write charts to this file (.png, .pdf, .svg).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    list_profiles: Annotated[
        bool,
        typer.Option(
            "--list-profiles", callback=_print_profiles, is_eager=True, help="Print the shipped profiles and exit."
        ),
    ] = False,
    version: VersionFlag = False,
) -> None:
    """Find the policy that minimises w1 x mean response time + w2 x mean power, or another resource."""
    if sizes is not None or profile == LONGEST_REQUEST:
        binning = parse_problem(profile, sizes, _given_parameters(context), arrival_rate, max_batch_size, seed)
        _recommend(binning, slo_mean_ms, as_json)
        return
    given = _given_parameters(context)
    if priority_weights is not None or priority_shares is not None:
        check_level_flags(given)
    prices.check_flags(given, plan)
    check_files(output, plot)
    scheme = scheme_of(method, overflow_cost, max_queue_length, epsilon, max_iterations)
    bounds = bounds_of(w2, (slo_mean_ms, slo_p95_ms, slo_share, power_cap_w, resource_cap), check_form(policy_form))

    def options_of(profile: str) -> tuple[SolveOptions, prices.Price]:
        saving = load_profile(profile).saving(resource_of(resource))
        device, price = prices.priced(saving, device_price, idle_power_w, power_price)
        service = distribution(service_distribution, device)
        problem = Problem(device, 1.0, w1, w2 or 0.0, min_batch_size, max_batch_size, service)
        options = SolveOptions(problem, evaluate_, scheme, bounds, not no_mix, simulate, seed, policy_form)
        check_options(options, output is not None)
        return options, price

    if plan:
        reject_if(arrival_rate is None, "--plan needs an arrival rate: add --arrival-rate PER_SECOND")
        reject_if(spare < 0, f"--spare {spare} is invalid: give 0 or more devices")
        rate = rate_of(1.0, arrival_rate, None)
        if steps := parse_steps(profile):
            reject_if(output is not None, "--output writes one policy: leave it out for the models of a pipeline")
            reject_if(priority_weights is not None, "--priority-weights plans one model: leave it out for a pipeline")
            show_pipeline_plan([(*options_of(name), number) for name, number in steps], rate, spare, as_json)
            return
        options, price = options_of(profile)
        if priority_weights is not None and priority_shares is not None:
            show_level_plan(options.at(rate), priority_weights, priority_shares, spare, as_json)
            return
        show_plan(options.at(rate), price, spare, output, as_json)
        return
    options, _ = options_of(profile)
    if priority_weights is not None and priority_shares is not None:
        rate = rate_of(build_model(options.problem).capacity, arrival_rate, load)
        show_levels(options.at(rate), priority_weights, priority_shares, as_json)
        return
    rates_hz = _rates_hz(options, arrival_rate, load, rates)
    with print_warnings(), closing(_with_progress(rates_hz)) as shown:
        results = [_solve_load(options.at(rate), rates is not None) for rate in shown]
    _report_missed_bounds(results)
    rows = [result.fields for result in results]
    if as_json:
        print(json.dumps({"rows": rows} if rates is not None else rows[0]))
    elif rates is not None:
        _print_rows(rows, options.problem.profile.rate_unit)
    else:
        _print_result(rows[0])
    _write_files(options, results, output, plot)


def _rates_hz(options: SolveOptions, arrival_rate: float | None, load: float | None, rates: str | None) -> list[float]:
    capacity = build_model(options.problem).capacity
    if rates is None:
        return [rate_of(capacity, arrival_rate, load)]
    reject_if(
        arrival_rate is not None or load is not None, "--rates gives the loads: leave --load and --arrival-rate out"
    )
    reject_if(options.spec is not None, "--rates solves only: leave --evaluate out")
    return [each * capacity for each in loads_of(rates)]


def _with_progress(rates: list[float]) -> Generator[float, None, None]:
    """Yield the rates, and show on a terminal how many are done, or that one is being solved."""
    console = Console(stderr=True)
    if len(rates) == 1:
        with console.status("solving"):
            yield from rates
    else:
        yield from track(rates, "loads", console=console, transient=True, disable=not console.is_terminal)


def _solve_load(options: SolveOptions, in_table: bool) -> _Result:
    """Solve or evaluate at one load, and simulate if requested.

    If no policy keeps the bound, the nearest one becomes the row of a table; outside a table this is an error.
    """
    problem, profile = options.problem, options.problem.truncated_profile
    if options.bounds or problem.service != DETERMINISTIC:
        for module in ("linalg", "optimize", "special"):
            import_module(f"scipy.{module}")  # now, since it does not belong to the time of solving
    began = perf_counter()
    charged = profile.charged  # so that simulations add up the resource that is saved
    chosen = None if options.spec is None else choose(options.spec, in_stages(options.spec, charged), max_wait=inf)
    kept = True
    try:
        solution = solve_with(options) if chosen is None else evaluate_with(options, chosen)
    except UnreachableError as error:
        if not in_table:
            raise
        solution, kept = error.nearest, False
    seconds = perf_counter() - began
    fields = _fields(options, solution) | {"solve_time_ms": round(1e3 * seconds, 3)}
    if options.bounds and in_table:
        fields["bound_kept"] = kept
    simulation = None
    if options.simulate:
        policy = chosen or _solved(solution, charged)
        trial = Trial(problem, options.simulate, options.seed)
        simulation = simulate_policy(policy, trial.instants, service_time=trial.service_time())
        fields["simulated"] = SimulationResult.of(simulation, profile).to_json(options.limits)
    return _Result(options, fields, solution, simulation)


def _solved(solution: Solution | None, profile: Profile) -> ModelPolicy:
    assert solution is not None  # without a spec there is a solution
    ages = solution.max_ages if isinstance(solution, AgeSolution) else None
    return solved(solution.batch_size, profile, solution.mix, ages)


def _report_missed_bounds(results: Sequence[_Result]) -> None:
    """Report the loads at which no policy keeps the bound, in one line on stderr; if it is all of them, as an error."""
    missed = [f"{result.fields['load']:.3g}" for result in results if not result.fields.get("bound_kept", True)]
    if not missed:
        return
    message = f"no policy keeps the bound at load {', '.join(missed)}"
    reject_if(len(missed) == len(results), f"{message}: relax the bound, or lower the loads")
    print(f"solve-policy: {message}; each such row has the nearest policy", file=sys.stderr)


def _fields(options: SolveOptions, solution: Solution | None) -> dict[str, Any]:
    if solution is not None:
        return PolicyResult.of(options, solution).to_json()
    problem = options.problem
    return {
        "profile": problem.truncated_profile.name,
        "arrival_rate_hz": problem.arrival_rate,
        "load": build_model(problem).load,
        "w1": problem.w1,
        "w2": problem.w2,
        "method": "simulation",
        **({} if problem.profile.saved == "energy" else {"resource": problem.profile.saved}),
    } | dict.fromkeys(_EXACT_KEYS)


def _write_files(options: SolveOptions, results: Sequence[_Result], output: Path | None, plot: Path | None) -> None:
    solutions = [result.solution for result in results if result.solution is not None]
    if output is not None:
        for solution in solutions:
            check_actions(solution.batch_size, 1, options.problem.truncated_profile.max_batch_size)
        with writing("--output", output):
            save_table(table_of(options.problem, solutions, options.bound_entry), output)
    if plot is None:
        return
    reject_if(not solutions, f"policy {options.spec!r} is not a function of the queue length: leave --plot out")
    with writing("--plot", plot):
        if len(results) > 1:
            title = ", ".join(f"{key.replace('_', '-')} {text}" for key, text in options.bounds)
            plot_table(solutions, options.problem.profile, plot, title)
        else:
            simulation, limits = results[0].simulation, options.limits
            responses = None if simulation is None else simulation.responses
            plot_policy(results[0].options.problem, solutions[0], responses, plot, next(iter(limits), None))


def _print_rows(rows: Sequence[dict[str, Any]], unit: str) -> None:
    measured = [("p95 ms", lambda row: f"{row['simulated']['p95_ms']:.3f}")] if "simulated" in rows[0] else []
    bounded = [("kept", lambda row: "yes" if row["bound_kept"] else "no")] if "bound_kept" in rows[0] else []
    extra: list[tuple[str, Callable[[dict[str, Any]], str]]] = [*measured, *bounded]
    by_age = any("max_age_ms" in row for row in rows)
    launching = ["one waits, ms", "at once from"] if by_age else ["launches from", "largest"]
    titles = ["load", "arrivals, 1/s", "w2", "mean ms", unit, "cost", *launching]
    table = Table(*titles, *(title for title, _ in extra), box=None)
    for row in rows:
        figures = [f"{row['load']:.3f}", f"{row['arrival_rate_hz']:.3f}", f"{row['w2']:.4g}"]
        averages = [f"{row['mean_response_time_ms']:.3f}", f"{taken(row):.3f}", f"{row['average_cost']:.4f}"]
        table.add_row(*figures, *averages, *_launches(row), *(cell(row) for _, cell in extra))
    Console().print(table)


def _launches(row: dict[str, Any]) -> tuple[str, str]:
    """Return the first and the largest launch; for ages the wait of one request, ms, and the first that is 0."""
    if "max_age_ms" in row:
        ages = row["max_age_ms"]
        return f"{ages[1]:.3f}", str(next((n for n, age in enumerate(ages) if n and age == 0.0), "-"))
    first = next((n for n, action in enumerate(row["batch_size"]) if action), "-")
    return str(first), str(max(row["batch_size"]))


def _given_parameters(context: typer.Context) -> list[str]:
    """Return the names of the parameters that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _recommend(binning: BinningProblem, slo_mean_ms: float | None, as_json: bool) -> None:
    invalid = slo_mean_ms is not None and not 0.0 < slo_mean_ms < inf
    reject_if(invalid, f"--slo-mean-ms {slo_mean_ms} is invalid: give a positive time")
    bound = None if slo_mean_ms is None else slo_mean_ms / 1e3
    rows = [candidate_row(each, binning, bound) for each in recommend(binning, bound)]
    if as_json:
        fields = {"profile": binning.name, "arrival_rate_hz": binning.arrival_rate}
        print(json.dumps({**fields, "bound": slo_mean_ms and {"slo_mean_ms": slo_mean_ms}, "rows": rows}))
        return
    print(f"recommended: {rows[0]['policy']}")
    table = Table("bins", "batch size", "most, 1/s", "load", "least, ms", "mean, ms", "±", "kept", box=None)
    for row in rows[:_MAX_SHOWN]:
        times = (f"{row[key]:.4g}" for key in ("least_response_time_ms", "mean_response_time_ms", "standard_error_ms"))
        kept = {True: "yes", False: "no", None: "-"}[row["bound_kept"]]
        table.add_row(
            str(row["bins"]), str(row["batch_size"]), f"{row['capacity_hz']:.4g}", f"{row['load']:.3f}", *times, kept
        )
    Console().print(table)


def _print_result(fields: dict[str, Any]) -> None:
    console = Console()
    for key, value in fields.items():
        console.print(f"{key:24} {value}", highlight=False, soft_wrap=True)


def main() -> None:
    """The console entry point."""
    run(app, "solve-policy", GROUPS)


if __name__ == "__main__":
    main()
