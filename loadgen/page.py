"""Self-contained HTML page of one run, or of several with the same arrivals: figures, settings, interactive charts.

The page includes plotly's JavaScript from its Python package, and its Content-Security-Policy forbids the browser to
load anything.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import isfinite
from string import Template
from typing import Any

from loadgen.history import (
    RunResult,
    Values,
    batch_shares,
    centres,
    percentiles,
    points,
    power,
    rate,
    response_distribution,
    windows,
)
from loadgen.report import RunObjective
from loadgen.tables import ROWS, explain_cost, figure

_SHARES = (0.5, 0.95, 0.99)
_LESS_IS_BETTER = {
    *("mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "max_ms"),
    *("energy_per_request_mj", "mean_power_w", "cpu_per_request_ms", "cost", "slo_violations"),
}


def render_report_page(
    results: Sequence[RunResult], objective: RunObjective, title: str, run: Mapping[str, str]
) -> str:
    """Render the HTML page.

    Args:
        results: results of at least one run, all with the same arrivals.
        objective: SLO, which the charts mark, and weights of the cost.
        title: title of the page.
        run: settings of the run, by name.
    """
    charts = json.dumps(list(_charts(results, objective)), allow_nan=False)
    template = Template(files("loadgen").joinpath("page.html").read_text())
    return template.substitute(
        title=escape(title),
        table=_table(results),
        explanation=escape(explain_cost(objective)),
        settings="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in run.items()),
        charts=charts.replace("<", "\\u003c"),  # a "</script>" in a name must not end the script
        plotly=files("plotly").joinpath("package_data", "plotly.min.js").read_text(),
    )


def _table(results: Sequence[RunResult]) -> str:
    """Table with a row per figure and a column per run; unknown figures are left out, the best of several is marked."""
    head = "".join(f"<th scope=col>{escape(result.policy or 'value')}</th>" for result in results)
    counts = _row("requests", [result.report["scheduled"] for result in results], False)
    counts += _row("answered", [result.report["ok"] for result in results], False)
    for status in sorted({status for result in results for status in result.report["errors"]}):
        counts += _row(f"not answered: {status}", [result.report["errors"].get(status, 0) for result in results], True)
    rows = []
    for key, (label, unit) in ROWS.items():
        values = [dict[str, Any](result.report).get(key) for result in results]
        if any(value is not None for value in values):
            rows.append(_row(", ".join(filter(None, (label, unit))), values, key in _LESS_IS_BETTER))
    rows += _level_rows(results)
    return f"<thead><tr><td></td>{head}</tr></thead><tbody>{counts}{''.join(rows)}</tbody>"


def _level_rows(results: Sequence[RunResult]) -> Iterator[str]:
    """Rows of the mean and the 95th percentile of each priority level; none without levels."""
    found = [{each["level"]: each for each in result.report.get("levels", ())} for result in results]
    for level in sorted({level for each in found for level in each}):
        known = [each.get(level) for each in found]
        yield _row(f"level {level}, mean, ms", [each and each["mean_ms"] for each in known], True)
        yield _row(f"level {level}, 95 % within, ms", [each and each["p95_ms"] for each in known], True)


def _row(label: str, values: Sequence[float | None], less_is_better: bool) -> str:
    known = {value for value in values if value is not None}
    best = min(known) if less_is_better and len(known) > 1 else None
    cells = (
        f"<td{' class=best' if value == best and value is not None else ''}>{figure(value)}</td>" for value in values
    )
    return f"<tr><th scope=row>{escape(label)}</th>{''.join(cells)}</tr>"


def _charts(results: Sequence[RunResult], objective: RunObjective) -> Iterator[dict[str, Any]]:
    """Charts as the page's script draws them: titles of the axes, lines, and the mark of the SLO (ms)."""
    edges, slo = windows([result.history for result in results]), None
    if isfinite(objective.slo):
        slo = 1e3 * objective.slo
    alone = len(results) == 1
    which = "" if alone else ", 95 % within"
    times = _percentile_lines(results[0], edges) if alone else [_tail(i, r, edges) for i, r in enumerate(results)]
    yield _chart(f"Response time over time{which}", ("instant of arrival, s", "response time, ms"), times, slo_y=slo)
    axes = ("response time, ms", "share of requests answered within it")
    yield _chart("Distribution of response times", axes, [_ecdf(i, r) for i, r in enumerate(results)], slo_x=slo)
    kind = "bar" if alone else "lines+markers"
    batches = [_line(i, r.policy, *batch_shares(r.history), kind) for i, r in enumerate(results)]
    yield _chart("Batch sizes", ("batch size", "share of the batches"), batches)
    watts = [(i, r.policy, power(r.history, edges)) for i, r in enumerate(results)]
    lines = [_line(i, name, centres(edges), values) for i, name, values in watts if values is not None]
    yield _chart("Power over time", ("time, s", "mean power of the batches, W"), lines)
    yield _chart("Arrivals and answers", ("time, s", "requests per second"), _rates(results, edges))


def _chart(title: str, axes: tuple[str, str], lines: Sequence[dict[str, Any]], **marks: float | None) -> dict[str, Any]:
    return {"title": title, "x": axes[0], "y": axes[1], "lines": [line for line in lines if line["x"]], **marks}


def _line(color: int | None, name: str, x: Values, y: Values, mode: str = "lines+markers") -> dict[str, Any]:
    """A line for the charts' JSON; `color` is an index into the page theme's palette, None is grey."""
    values = [None if not isfinite(value) else float(f"{value:.5g}") for value in y.tolist()]
    places = [float(f"{place:.6g}") for place in x.tolist()]
    return {"name": name, "color": color, "x": places, "y": values, "mode": mode}


def _percentile_lines(result: RunResult, edges: Values) -> list[dict[str, Any]]:
    if not len(result.history.responses):
        return []
    arrivals, responses = points(result.history)
    lines = [_line(None, "single requests", arrivals, 1e3 * responses, "markers")]
    for i, values in enumerate(percentiles(result.history, edges, _SHARES)):
        lines.append(_line(i, f"p{100 * _SHARES[i]:g}", centres(edges), 1e3 * values))
    return lines


def _tail(color: int, result: RunResult, edges: Values) -> dict[str, Any]:
    return _line(color, result.policy, centres(edges), 1e3 * percentiles(result.history, edges, (0.95,))[0])


def _ecdf(color: int, result: RunResult) -> dict[str, Any]:
    responses, shares = response_distribution(result.history)
    return _line(color, result.policy, 1e3 * responses, shares, "lines")


def _rates(results: Sequence[RunResult], edges: Values) -> list[dict[str, Any]]:
    """Arrival rate, common to all runs, and response rate of each run."""
    alone = len(results) == 1
    lines = [_line(None, "arrivals", centres(edges), rate(results[0].history.offered, edges), "lines")]
    for i, result in enumerate(results):
        answers = rate(result.history.arrivals + result.history.responses, edges)
        lines.append(_line(i, "answers" if alone else result.policy, centres(edges), answers, "lines"))
    return lines
