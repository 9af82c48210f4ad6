"""What solve-policy --plan prints: the devices of one model, or of the models of a pipeline."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from policies.command_line.common import print_warnings, writing
from policies.command_line.options import DEFAULT_SIMULATED_REQUESTS, SolveOptions
from policies.command_line.results import SimulationResult
from policies.objectives.table import save_table, table_of
from policies.percentile.ages import ResponseBounds
from policies.planning import devices, prices
from policies.planning.pipelines import PipelineStep, plan_pipeline, simulate_pipeline
from policies.types import SpecError

_SIMULATED_CALLS = 50_000  # of a pipeline, without --simulate


def show_plan(options: SolveOptions, price: prices.Price, spare: int, output: Path | None, as_json: bool) -> None:
    """Plan the devices of one model, print the plan, and write its policy to `output`."""
    bound = options.bound
    assert bound is not None  # checked by `prices.check_flags`
    requests = options.simulate or DEFAULT_SIMULATED_REQUESTS
    planning = devices.CapacityProblem(options.problem, bound, price, options.mixed, requests, options.seed, spare)
    with Console(stderr=True).status("planning") as status:
        with print_warnings():
            plan = devices.plan_capacity(planning, lambda n: status.update(f"planning: {n} devices"))
        status.update(f"simulating {plan.best.devices} devices")
        runs = devices.simulate_fleet(planning, plan.best)
    best, device, simulated_by_routing = plan.best, options.problem.truncated_profile, {}
    for routing, simulation in runs.items():
        simulated_by_routing[routing] = summary = SimulationResult.of(simulation, device).to_json(options.limits)
        if device.saved == "energy":
            summary["mean_power_w"] += best.devices * price.idle
        summary["bound_kept"] = devices.keeps(simulation, bound)
    fields = {
        "profile": device.name,
        "arrival_rate_hz": options.problem.arrival_rate,
        "bound": options.bound_entry,
        "devices": best.devices,
        "spare": spare,
        "cost": best.cost,
        "cost_unit": price.unit,
        **({} if device.saved == "energy" else {"resource": device.saved}),
        "candidates": [devices.candidate_row(each, device.saved) for each in plan.candidates],
        "beyond": {"devices": plan.beyond, "least_cost": plan.least_beyond},
        "simulated": simulated_by_routing,
    }
    if as_json:
        print(json.dumps(fields))
    else:
        _print_plan(fields, device.rate_unit)
    if output is not None:
        with writing("--output", output):
            save_table(table_of(planning.per_device(best.devices), [best.solution], options.bound_entry), output)


def _print_plan(fields: dict[str, Any], rate_unit: str) -> None:
    unit = fields["cost_unit"]
    cost = "cost" if unit == "devices" else unit
    table = Table("", "devices", "load", "kept", "batches", "mean ms", "p95 ms", rate_unit, cost, box=None)
    enough = min(row["devices"] for row in fields["candidates"] if row["bound_kept"]) + fields["spare"]
    for row in fields["candidates"]:
        first = next(n for n, action in enumerate(row["batch_size"]) if action)
        times = (f"{row[key]:.3f}" for key in ("mean_response_time_ms", "p95_ms"))
        kept = "yes" if row["devices"] >= enough else "without spares" if row["bound_kept"] else "no"
        best = ">" if row["devices"] == fields["devices"] else ""
        which = best, str(row["devices"]), f"{row['load']:.3f}", kept, f"{first} to {max(row['batch_size'])}"
        table.add_row(*which, *times, f"{taken(row):.2f}", f"{row['cost']:.5g}")
    Console().print(table)
    beyond = fields["beyond"]
    if unit != "devices":
        print(f"With {beyond['devices']} or more the cost is at least {beyond['least_cost']:.6g} {unit}.")
    if fields["spare"]:
        print(f"Without {fields['spare']} of the {fields['devices']} devices the bound is kept, too.")
    print("The plan covers devices only. HTTP needs CPUs in addition: docs/operation.md, More processes.\n")
    table = Table("simulated, sent", "mean ms", "±", "p95 ms", "±", rate_unit, box=None)
    for routing, summary in fields["simulated"].items():
        pairs = ((summary[f"{key}_ms"], summary["standard_error_ms"][key] or inf) for key in ("mean", "p95"))
        table.add_row(routing, *(f"{figure:.3f}" for pair in pairs for figure in pair), f"{taken(summary):.2f}")
    Console().print(table)
    bound = ", ".join(f"{key} {value}" for key, value in fields["bound"].items())
    for routing, summary in fields["simulated"].items():
        if not summary["bound_kept"]:
            within = summary.get("share_within", [])
            shares = [f"{each['share']:.2%} in time" for each in (within if isinstance(within, list) else [within])]
            found = ", ".join([f"mean {summary['mean_ms']:.4g} ms", *shares])
            print(f"Sent by {routing!r}, the bound is not kept ({bound}; {found}); plan with a smaller bound.")


def show_pipeline_plan(
    models: Sequence[tuple[SolveOptions, prices.Price, float]], rate: float, spare: int, as_json: bool
) -> None:
    """Plan the devices of the models of a pipeline, and print the plan.

    Args:
        models: options, price of a device and requests in a call of each, in the order in which they are called.
        rate: of the calls, 1/s.
        spare: devices of each model that may be out of service.
        as_json: whether to print a JSON object.

    Raises:
        SpecError: the bound is not one percentile, or cannot be kept.
    """
    options = models[0][0]
    bound, numbers, steps = options.bound, [number for *_, number in models], dict[str, PipelineStep]()
    if not (isinstance(bound, ResponseBounds) and len(bound.shares) == 1 and bound.mean == inf):
        raise SpecError("the bound of a pipeline is one percentile: give --slo-p95-ms, or one --slo-share")
    limit, share = bound.shares[0]
    for place, (each, price, number) in enumerate(models, 1):
        problem = replace(each.problem, arrival_rate=rate * number)
        name = problem.profile.name if problem.profile.name not in steps else f"{problem.profile.name} #{place}"
        planning = devices.CapacityProblem(problem, bound, price, each.mixed, each.simulate, each.seed, spare)
        steps[name] = PipelineStep(planning, number)
    units = dict.fromkeys(price.unit for _, price, _ in models)
    if len(units) > 1:
        raise SpecError(
            f"costs in {' and '.join(units)} cannot be added: the profiles of some models have an idle power; give "
            "--device-price and --power-price"
        )
    with Console(stderr=True).status("planning") as status, print_warnings():
        plans = plan_pipeline(steps, limit, share, lambda name: status.update(f"planning: {name}"))
        status.update("simulating")
        calls = options.simulate or _SIMULATED_CALLS
        runs = simulate_pipeline([*plans.values()], numbers, rate, calls, options.seed)
    rows = [
        {
            "model": name,
            "requests": steps[name].requests,
            "policy": f"smdp:slo_share={1e3 * found.bound.response_time:.6g}:{found.bound.share:.6g}",
            **devices.candidate_row(found.fleet, found.planning.problem.profile.saved),
        }
        for name, found in plans.items()
    ]
    simulated = {
        routing: {
            "calls": len(responses),
            "mean_ms": 1e3 * float(responses.mean()),
            "p95_ms": 1e3 * float(np.quantile(responses, 0.95)),
            "share_within": float(np.mean(responses <= limit)),
            "bound_kept": bool(np.mean(responses <= limit) >= share),
        }
        for routing, responses in runs.items()
    }
    fields = {
        "arrival_rate_hz": rate,
        "bound": options.bound_entry,
        "spare": spare,
        "cost": sum(row["cost"] for row in rows),
        "cost_unit": models[0][1].unit,
        "models": rows,
        "simulated": simulated,
    }
    if as_json:
        print(json.dumps(fields))
    else:
        _print_pipeline_plan(fields)


def _print_pipeline_plan(fields: dict[str, Any]) -> None:
    unit = "cost" if fields["cost_unit"] == "devices" else fields["cost_unit"]
    table = Table(Column("model", no_wrap=True), "devices", "load", "batches", "mean ms", "p95 ms", unit, box=None)
    for row in fields["models"]:
        first = next(n for n, action in enumerate(row["batch_size"]) if action)
        times = (f"{row[key]:.3f}" for key in ("mean_response_time_ms", "p95_ms"))
        which = row["model"], str(row["devices"]), f"{row['load']:.3f}", f"{first} to {max(row['batch_size'])}"
        table.add_row(*which, *times, f"{row['cost']:.5g}")
    Console().print(table)
    for row in fields["models"]:
        print(f"Serve {row['model']} with the policy {row['policy']}")
    if fields["spare"]:
        print(f"Without {fields['spare']} of the devices of each model the bound is kept, too.")
    print("The plan covers devices only. HTTP needs CPUs in addition: docs/operation.md, More processes.\n")
    table = Table("simulated calls, sent", "mean ms", "p95 ms", "in time", box=None)
    for routing, found in fields["simulated"].items():
        table.add_row(routing, f"{found['mean_ms']:.3f}", f"{found['p95_ms']:.3f}", f"{found['share_within']:.2%}")
    Console().print(table)
    missed = [repr(routing) for routing, found in fields["simulated"].items() if not found["bound_kept"]]
    if missed:
        print(f"Sent by {' and '.join(missed)}, the bound is not kept; plan with a smaller bound.")


def taken(row: dict[str, Any]) -> float:
    """What a policy takes of the resource per second."""
    found: float = row["mean_resource"] if row["mean_power_w"] is None else row["mean_power_w"]
    return found
