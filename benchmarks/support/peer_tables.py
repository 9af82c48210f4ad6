"""The tables and the figure of benchmarks/peers.py, from its record."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.support.harness import FIGURES, finish_axes, markdown_table, new_figure, save_figure
from policies.charts.averages import PALETTE

BARE, MOSEC, IN_PLACE = "bare FastAPI", "mosec", "received in place"
LOADS = (0.3, 0.7, 0.9)
BODIES = ("1 KB", "150,528 bytes", "JPEG")
CONNECTIONS = (32, 128)
CPU_LOAD, GAP_LOAD = 0.7, 0.9
_CELLS = tuple(product(BODIES, CONNECTIONS))

Record = Mapping[str, Any]
Value = Callable[[Record, str], float | None]  # of a server


def tables(record: Record) -> str:
    """The record as Markdown tables: open loop, requests a second, our servers' ratios to the others, the least."""
    servers = list(record["loads"]["runs"])
    head = ["server", *(name for name, _, _ in _OPEN_LOOP)]
    loops = [[name, *(_text(value(record, name), form) for _, value, form in _OPEN_LOOP)] for name in servers]
    rates = [[name, *(_text(value(record, name), form) for _, value, form in _RATES)] for name in servers]
    least = {"loads": record["least"]}
    minimal = [[name, *(_text(v(least, name), form) for _, v, form in _OPEN_LOOP)] for name in least["loads"]["runs"]]
    about = (
        "Means over the repetitions of an open loop. Above ideal: mean response time above that of an ideal queue on "
        "the same arrivals, ms. CPU: user and system seconds of all processes in 1,000 requests.",
        "Requests a second by body and connections, with a device that takes a microsecond for each batch.",
        "Ratios of these numbers. Of the first table a ratio below 1 is better, of the second one above 1.",
        "The open loop once more, with a minimal protocol that receives bodies in place, without limits, ids, logs or "
        "metrics: the least that this client and this machine allow.",
    )
    parts = [
        markdown_table(head, loops),
        markdown_table(["server", *(name for name, _, _ in _RATES)], rates),
        markdown_table(["", *(f"{one} / {other}" for one, other in _pairs(servers))], _ratios(record, servers)),
        markdown_table(head, minimal),
    ]
    return "\n\n".join(f"{text}\n\n{part}" for text, part in zip(about, parts, strict=True)) + "\n"


def _pairs(servers: list[str]) -> list[tuple[str, str]]:
    others = [name for name in (BARE, MOSEC) if name in servers]
    return list(product([name for name in servers if name not in others], others))


def _ratios(record: Record, servers: list[str]) -> Iterator[list[str]]:
    for name, value, _ in (*_OPEN_LOOP, *_RATES):
        row = [name]
        for one, other in _pairs(servers):
            a, b = value(record, one), value(record, other)
            row.append(_text(a / b if a is not None and b else None, ".2f"))
        yield row


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _of_load(key: str, load: float) -> Value:
    return lambda record, name: fmean(run[key] for run in record["loads"]["runs"][name] if run["load"] == load)


def _above_ideal(load: float) -> Value:
    def value(record: Record, name: str) -> float:
        return fmean(r["mean_ms"] - r["ideal_ms"] for r in record["loads"]["runs"][name] if r["load"] == load)

    return value


def _gap(key: str) -> Value:
    """From the log of batches, or from our metric where there is none."""

    def value(record: Record, name: str) -> float | None:
        runs = [run for run in record["loads"]["runs"][name] if run["load"] == GAP_LOAD]
        found = [run["idle_gap"] or run["idle_gap_by_metric"] for run in runs]
        return None if None in found else fmean(gap[key] for gap in found)

    return value


def _rate(body: str, connections: int) -> Value:
    def value(record: Record, name: str) -> float:
        runs = record["rates"]["runs"][name]
        return fmean(r["requests_per_s"] for r in runs if (r["body"], r["connections"]) == (body, connections))

    return value


_OPEN_LOOP: tuple[tuple[str, Value, str], ...] = (
    *((f"above ideal at {load}", _above_ideal(load), "+.2f") for load in LOADS),
    *((f"p99 at {load}, ms", _of_load("p99_ms", load), ".1f") for load in LOADS),
    (f"idle gap at {GAP_LOAD}, median, ms", _gap("median_ms"), ".3f"),
    ("mean gap, ms", _gap("mean_ms"), ".3f"),
    (f"CPU at {CPU_LOAD}", _of_load("cpu_s_per_1000", CPU_LOAD), ".2f"),
    ("RSS, MB", lambda record, name: float(record["loads"]["rss_mb"][name]), ".0f"),
)
_RATES: tuple[tuple[str, Value, str], ...] = tuple(
    (f"{body}, {connections}", _rate(body, connections), ".0f") for body, connections in _CELLS
)


def draw(record: Record, path: Path = FIGURES / "peers.png") -> None:
    """Draw the response time above ideal by load, the idle gap, and the requests a second of all servers."""
    figure = new_figure(15, 4.8)
    response, gap, rate = figure.subplots(1, 3, width_ratios=(3, 1.6, 6))
    panels = (
        (response, _OPEN_LOOP[: len(LOADS)], [str(load) for load in LOADS]),
        (gap, (_OPEN_LOOP[2 * len(LOADS)], _OPEN_LOOP[2 * len(LOADS) + 1]), ["median", "mean"]),
        (rate, _RATES, [f"{body}\n{connections}" for body, connections in _CELLS]),
    )
    servers = list(record["loads"]["runs"])
    width = 0.8 / len(servers)
    for axes, columns, ticks in panels:
        places = np.arange(len(columns))
        for index, (colour, name) in enumerate(zip(PALETTE, servers, strict=False)):
            heights = [value(record, name) or 0.0 for _, value, _ in columns]
            axes.bar(places + (index - (len(servers) - 1) / 2) * width, heights, width, color=colour, label=name)
        axes.set_xticks(places, ticks)
        finish_axes(axes)
    response.set(title="(a) mean response time above ideal", xlabel="load", ylabel="ms")
    gap.set(title=f"(b) idle gap, load {GAP_LOAD}", ylabel="ms", yscale="log")
    rate.set(title="(c) requests a second", xlabel="body, connections", ylabel="1/s", yscale="log")
    figure.legend(*rate.get_legend_handles_labels(), loc="outside lower center", ncols=len(servers), frameon=False)
    save_figure(figure, path)
