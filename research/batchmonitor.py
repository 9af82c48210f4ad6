"""BatchMonitor's figure 2 in simulation: mean response time and requests per joule of six policies.

Khan et al., "Efficient Adaptive Batching of DNN Inference Services for Improved Latency": 300 s of rates from 1 to 240
requests a second, on one server for each network. The paper gives neither its rates nor its deadline nor a profile.
Ours: the rate is a cosine with a period of 100 s, with Poisson arrivals within each second; the deadline is 200 ms,
chosen to come near the printed factor of 14 between max-under-deadline and rate matching (ours: 8 to 29).

Service times and energies are affine. ResNet-50 on a Tesla V100 in mixed precision: l = 0.1412 b + 1.935 ms, zeta =
41.42 b + 175.6 mJ, fitted to table 1 of Inoue (arXiv 1912.06322), which quotes NVIDIA's inference white paper; the
energies are board power x service time. The other networks are modelled from it: the constant term scales with the
number of weight layers (50, 101, 19), the slope with multiplications and additions (4.09, 7.80, 19.63 x 10^9).
All service times and energies are twice those of the V100, so that mean response times come nearer to the printed ones
(ours are 0.66 to 1.38 of them).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.support import harness
from policies.catalog import choose
from policies.charts.averages import PALETTE
from policies.planning.simulation import simulate_policy
from policies.profile import Profile
from policies.queue.arrivals import Instants, steps
from research import FIGURES
from research.rate_matching_literal import rate_matching_literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST, SLOWER = 32, 2.0
DURATION, PERIOD, LOW, HIGH, SEED = 300, 100.0, 1.0, 240.0, 0
LITERAL = "rate-matching-literal"  # no spec of the server
POLICIES: Mapping[str, str] = {
    "max under deadline": "max-under-deadline:slo_ms=200",
    "ad hoc (greedy)": "greedy",
    "rate matching, literal": LITERAL,
    "rate matching": "rate-matching",
    "smdp, w2 = 0.1": "smdp:w2=0.1",
    "smdp, w2 = 0.5": "smdp:w2=0.5",
}
LIVE = ("rate matching",)  # measured with --live, five minutes each


@dataclass(frozen=True, slots=True)
class Network:
    """Numbers of weight layers, and of multiplications and additions, 10^9."""

    layers: float
    operations: float


NETWORKS = {"ResNet-50": Network(50, 4.09), "ResNet-101": Network(101, 7.80), "VGG19": Network(19, 19.63)}
PRINTED_MS = {"ResNet-50": 7.29, "ResNet-101": 9.67, "VGG19": 6.11}  # of rate matching


def profile(name: str) -> Profile:
    """The modelled profile of a network."""
    network = NETWORKS[name]
    once = SLOWER * network.layers / NETWORKS["ResNet-50"].layers
    each = SLOWER * network.operations / NETWORKS["ResNet-50"].operations
    sizes = range(1, LARGEST + 1)
    return Profile(
        name,
        tuple(1e-3 * (0.1412 * each * b + 1.935 * once) for b in sizes),
        energies=tuple(1e-3 * (41.42 * each * b + 175.6 * once) for b in sizes),
    )


def rates() -> list[float]:
    """The arrival rate of each second, 1/s."""
    seconds = np.arange(DURATION) + 0.5
    return list((LOW + (HIGH - LOW) * (0.5 - 0.5 * np.cos(2 * np.pi * seconds / PERIOD))).tolist())


def arrivals() -> Instants:
    """Poisson arrivals within each second; the same for all policies."""
    return steps(rates(), [1.0] * DURATION, float(DURATION), np.random.default_rng(SEED))


def cell(name: str, spec: str, instants: Instants) -> dict[str, float]:
    """Mean and 99th percentile of the response time in ms, requests per joule, mean batch size."""
    device = profile(name)
    chosen = rate_matching_literal(device) if spec == LITERAL else choose(spec, device)
    run = simulate_policy(chosen, instants)
    assert run.energies is not None
    return {
        "mean_ms": float(1e3 * run.responses.mean()),
        "p99_ms": float(1e3 * np.quantile(run.responses, 0.99)),
        "requests_per_joule": len(run.responses) / float(run.energies.sum()),
        "mean_batch_size": float(run.batch_sizes.mean()),
    }


def live(name: str, spec: str, instants: Instants) -> dict[str, float]:
    """The figures of the same arrivals over HTTP, on an emulated device."""
    with TemporaryDirectory() as folder:
        file, trace = Path(folder) / "profile.json", Path(folder) / "arrivals.csv"
        file.write_text(profile(name).to_json())
        trace.write_text("TIMESTAMP\n" + "\n".join(map(repr, instants.tolist())) + "\n")
        with harness.serving("demo", "--device", f"emulated:{file}", "--policy", spec) as server:
            found = harness.run_json("generate-load", server.url, "--arrivals", f"trace:{trace}", "--pixels")
    return {
        "mean_ms": found["mean_ms"],
        "p99_ms": found["p99_ms"],
        "requests_per_joule": 1e3 / found["energy_per_request_mj"],
        "mean_batch_size": found["mean_batch_size"],
    }


def table(record: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The record as Markdown."""
    columns = {"mean_ms": ".2f", "p99_ms": ".1f", "requests_per_joule": ".3f", "mean_batch_size": ".2f"}
    rows = (
        (name, policy, *(format(figures[key], style) for key, style in columns.items()))
        for name, policies in record.items()
        for policy, figures in policies.items()
    )
    head = ("network", "policy", "mean, ms", "p99, ms", "requests per joule", "mean batch")
    return harness.markdown_table(head, rows)


def draw(record: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """The paper's three panels: rates over time, mean response times, requests per joule."""
    figure = harness.new_figure(13, 7)
    axes = figure.subplot_mosaic([["rates", "rates"], ["mean_ms", "requests_per_joule"]], height_ratios=(1, 2))
    axes["rates"].step(np.arange(DURATION), rates(), where="post", color="black", lw=1)
    axes["rates"].set(
        xlabel="time, s", ylabel="arrival rate, 1/s", xlim=(0, DURATION), title="(a) rates, Poisson within each second"
    )
    _bars(axes["mean_ms"], record, "mean_ms")
    axes["mean_ms"].set(yscale="log", ylabel="mean response time, ms", title="(b) mean response time")
    for place, value in enumerate(PRINTED_MS[name] for name in record):
        label = "printed, rate matching" if place == 0 else ""
        axes["mean_ms"].hlines(value, place - 0.45, place + 0.45, color="black", ls=":", label=label)
    _bars(axes["requests_per_joule"], record, "requests_per_joule")
    axes["requests_per_joule"].set(ylabel="requests per joule", title="(c) energy")
    handles, labels = axes["mean_ms"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    harness.save_figure(figure, FIGURES / "batchmonitor-figure-2.png")


def _bars(axes: "Axes", record: Mapping[str, Mapping[str, Mapping[str, float]]], key: str) -> None:
    width = 0.8 / len(POLICIES)
    for i, (policy, color) in enumerate(zip(POLICIES, PALETTE, strict=True)):
        heights = [policies[policy][key] for policies in record.values()]
        places = np.arange(len(record)) - 0.4 + (i + 0.5) * width
        axes.bar(places, heights, width, color=color, label=policy)
    axes.set_xticks(range(len(record)), list(record))
    harness.finish_axes(axes)
    axes.grid(visible=False, axis="x")


def main() -> None:
    """Print the table, write the record, draw the figure."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--live", action="store_true", help=f"measure {LIVE[0]} over HTTP too: five minutes")
    is_live = parser.parse_args().live
    instants = arrivals()
    record: dict[str, dict[str, Any]] = {
        name: {policy: cell(name, spec, instants) for policy, spec in POLICIES.items()} for name in NETWORKS
    }
    print(table(record))
    settings: dict[str, Any] = {
        "seconds": DURATION,
        "requests": len(instants),
        "policies": dict(POLICIES),
        "printed_ms": PRINTED_MS,
    }
    if is_live:
        measured = {policy: live("ResNet-50", POLICIES[policy], instants) for policy in LIVE}
        print(table({"ResNet-50, live": measured}))
        settings["ResNet-50, live"] = measured
    harness.save_record("batchmonitor", {**settings, "cells": record})
    draw(record)


if __name__ == "__main__":
    main()
