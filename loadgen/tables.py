"""Tables of the reports of one run or several, for the terminal and for the HTML page."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from rich.table import Table

from loadgen.history import StepFigures
from loadgen.report import Report, RunObjective

ROWS: Mapping[str, tuple[str, str]] = {  # label and unit of each value, in the order of the table
    "arrival_rate_hz": ("arrival rate", "1/s"),
    "throughput_hz": ("throughput", "1/s"),
    "mean_ms": ("response time, mean", "ms"),
    "p50_ms": ("median", "ms"),
    "p90_ms": ("90 % within", "ms"),
    "p95_ms": ("95 % within", "ms"),
    "p99_ms": ("99 % within", "ms"),
    "max_ms": ("longest", "ms"),
    "mean_batch_size": ("mean batch size", ""),
    "energy_per_request_mj": ("energy per request", "mJ"),
    "mean_power_w": ("mean power", "W"),
    "cpu_per_request_ms": ("CPU time per request", "ms"),
    "cost": ("cost", ""),
    "slo_attainment": ("share answered within the SLO", ""),
    "slo_violations": ("late: not within the SLO", ""),
    "send_lag_p99_ms": ("sent late, 99 % within", "ms"),
}
_COLUMNS: Mapping[str, str] = {
    "mean_ms": "mean ms",
    "p50_ms": "median",
    "p95_ms": "95 %",
    "p99_ms": "99 %",
    "mean_batch_size": "batch",
    "energy_per_request_mj": "mJ",
    "mean_power_w": "W",
    "cpu_per_request_ms": "CPU ms",
    "cost": "cost",
    "slo_violations": "late",
}
_STEP_COLUMNS: Mapping[str, str] = {
    "start_s": "from s",
    "end_s": "to s",
    "scheduled": "requests",
    "ok": "answered",
    "p50_ms": "median",
    "p95_ms": "95 %",
    "p99_ms": "99 %",
    "energy_per_request_mj": "mJ",
    "mean_power_w": "W",
}
_LEVEL_COLUMNS: Mapping[str, str] = {
    "level": "level",
    "ok": "answered",
    "mean_ms": "mean ms",
    "p50_ms": "median",
    "p95_ms": "95 %",
    "p99_ms": "99 %",
    "slo_attainment": "within SLO",
}

_MIN_NAME_WIDTH = 16  # terminal columns for a policy's spec, or its length if shorter


def report_table(content: Report, objective: RunObjective) -> Table:
    """Table of one run's report; unknown values are left out, and so is the cost without a weight of power."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column()
    grid.add_row("requests", str(content["scheduled"]), "")
    grid.add_row("answered", str(content["ok"]), "")
    for status, count in content["errors"].items():
        grid.add_row(f"not answered: {status}", str(count), "")
    values: Mapping[str, Any] = {**content}
    for key, (label, unit) in ROWS.items():
        if values.get(key) is not None and (key != "cost" or objective.w2):
            bound = f" of {1e3 * objective.slo:g} ms" if key.startswith("slo_") else ""
            grid.add_row(f"{label}{bound}", figure(values[key]), unit)
    return grid


def comparison_table(rows: Mapping[str, Report], objective: RunObjective) -> Table:
    """Table with one row per policy spec; columns as the rows of `report_table`."""
    contents: dict[str, Mapping[str, Any]] = {spec: {**content} for spec, content in rows.items()}
    known = [key for key in _COLUMNS if any(content.get(key) is not None for content in contents.values())]
    shown = [key for key in known if key != "cost" or objective.w2]
    grid = Table(box=None, pad_edge=False, caption=_explain(objective), caption_justify="left")  # fits 80 columns
    grid.add_column("policy", overflow="fold", min_width=min(_MIN_NAME_WIDTH, max(map(len, contents), default=0)))
    for key in shown:
        grid.add_column(_COLUMNS[key], justify="right", no_wrap=True)
    for spec, content in contents.items():
        grid.add_row(spec, *(figure(content.get(key)) for key in shown))
    return grid


def step_table(rows: Mapping[str, Sequence[StepFigures]]) -> Table:
    """Table with one row per policy spec and step of the arrival rate; energy and power are left out if unknown."""
    grid = Table(box=None, pad_edge=False)
    named = len(rows) > 1
    values: dict[str, list[Mapping[str, Any]]] = {spec: [{**step} for step in steps] for spec, steps in rows.items()}
    is_metered = any(step["mean_power_w"] is not None for steps in values.values() for step in steps)
    shown = [key for key in _STEP_COLUMNS if is_metered or key not in ("energy_per_request_mj", "mean_power_w")]
    if named:
        grid.add_column("policy")
    for key in shown:
        grid.add_column(_STEP_COLUMNS[key], justify="right")
    for spec, steps in values.items():
        for step in steps:
            grid.add_row(*((spec,) if named else ()), *(figure(step[key]) for key in shown))
    return grid


def level_table(rows: Mapping[str, Report]) -> Table | None:
    """Table with one row per policy spec and priority level; None without levels."""
    levels: list[tuple[str, Mapping[str, Any]]] = [
        (spec, {**each}) for spec, content in rows.items() for each in content.get("levels", ())
    ]
    if not levels:
        return None
    grid = Table(box=None, pad_edge=False)
    shown = [key for key in _LEVEL_COLUMNS if any(each[key] is not None for _, each in levels)]
    if len(rows) > 1:
        grid.add_column("policy")
    for key in shown:
        grid.add_column(_LEVEL_COLUMNS[key], justify="right")
    for spec, each in levels:
        grid.add_row(*((spec,) if len(rows) > 1 else ()), *(figure(each[key]) for key in shown))
    return grid


def explain_cost(objective: RunObjective) -> str:
    """Definition of the cost."""
    return f"cost = {objective.w1:g} x mean response time in ms + {objective.w2:g} x mean power in W"


def _explain(objective: RunObjective) -> str:
    late = f"\nlate: not answered within {1e3 * objective.slo:g} ms" if isfinite(objective.slo) else ""
    cost = f"; cost: {objective.w1:g} x mean ms + {objective.w2:g} x W" if objective.w2 else ""
    return f"mJ, CPU ms: per request{cost}{late}"


def figure(value: float | None) -> str:
    """Format a value with four digits, from 1000 on as a whole number; None is a dash."""
    if value is None:
        return "-"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
