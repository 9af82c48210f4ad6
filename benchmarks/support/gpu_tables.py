"""The records of `make gpu` as Markdown."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.support.harness import markdown_table

Results = Mapping[str, Any]


def report(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """All stages that have been run, by their letter."""
    text = []
    for letter, record in stages.items():
        versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
        text.append(f"# Stage {letter}: {record['device']}, {record['date']}\n\n{versions}")
        for name, part in record.get("parts", {}).items():
            text.append(f"## {name}")
            text += _part(part)
    return "\n\n".join(text) + "\n"


def _part(part: Mapping[str, Any]) -> Iterator[str]:
    if "failed" in part:
        yield f"failed: {part['failed'].splitlines()[0]}"
    results = part.get("results", {})
    for key, write in _TABLES.items():
        if results.get(key):
            yield write(results)


def _kernels(results: Results) -> str:
    keys = ("eager_ms", "graph_ms", "first_call_ms", "event_to_replay_us", "kernels", "relative_l2")
    rows = [
        [
            c["variant"],
            c["batch_size"],
            *(_number(c.get(key)) for key in keys),
            c.get("failed") or c.get("graph") or "-",
        ]
        for c in results["cells"]
    ]
    head = (
        "network",
        "b",
        "eager, ms",
        "graph, ms",
        "first call, ms",
        "event to replay, us",
        "kernels",
        "relative L2",
        "failed",
    )
    return markdown_table(head, rows)


def _uploads(results: Results) -> str:
    rows = [[_number(row[key]) for key in ("samples", "us", "host_us", "gb_per_s")] for row in results["uploads"]]
    return markdown_table(("samples", "device, us", "host, us", "GB/s"), rows)


def _profile(results: Results) -> str:
    profile = results["profile"]
    times = profile["service_time_s"]
    energies = {row["batch_size"]: row for row in results.get("energy", [])}
    spread = {int(b): share for b, share in results.get("repeatability", {}).items()}
    rows = []
    for b in (b for b in (1, 2, 4, 8, 16, 32, 64, 128) if b <= len(times)):
        cells = ["-"] * 5
        if (row := energies.get(b)) is not None:
            cells = [f"{row['power_w']:.0f}", f"{row['marginal_mj']:.1f}", f"{row['marginal_error_mj']:.1f}"]
            cells += [f"{row['marginal_mj'] / b:.2f}", f"{spread.get(b, float('nan')):.1%}"]
        rows.append([b, f"{1e3 * times[b - 1]:.3f}", f"{b / times[b - 1]:.0f}", *cells])
    head = ("b", "l(b), ms", "requests/s", "P(b), W", "ζ(b), mJ", "±", "ζ(b) / b, mJ", "between passes")
    return f"{markdown_table(head, rows)}\n\n{profile.get('note', '')}"


def _sensor(results: Results) -> str:
    found = results["sensor"]
    idle = " and ".join(f"{found['idle_power_w'][when]['value']:.1f} W {when}" for when in ("before", "after"))
    loads = ", ".join(f"{power:.0f} W at {load:.2f}" for load, power in found["power_w_by_load"])
    return (
        f"Sensor: {found['meter']}, a step every {1e3 * found['step_s']:.0f} ms. Idle, with the context open: {idle}; "
        f"in gaps between batches: {_number(found['active_idle_w'])} W.\n"
        f"Power by load (b = {found['batch_size']}): {loads}. Largest distance from the best line: "
        f"{found['off_the_line']:.1%};\nfrom the sum of idle power and batches: "
        f"{'-' if found['duty_cycle_error'] is None else format(found['duty_cycle_error'], '+.1%')}."
    )


def _joules(results: Results) -> str:
    rows = []
    for cell in results["joules"]:
        policy = cell["policy"].partition(":")[0] + " (one processor used up)" * cell.get("cpu_bound", False)
        if "failed" in cell:
            rows.append([f"{cell['load']:.2f}", "-", policy, cell["failed"], *["-"] * 7])
            continue
        slo = f"{cell['slo_p95_ms']:.2f}{'' if cell['kept'] else ' (missed)'}" if "slo_p95_ms" in cell else "-"
        times = [f"{cell['mean_ms']:.2f}", _number(cell.get("predicted_ms")), f"{cell['p95_ms']:.2f}"]
        powers = [f"{cell['power_w']:.0f}", _number(cell.get("predicted_w"))]
        row = [f"{cell['load']:.2f}", f"{cell['answered_hz']:.0f}", policy, slo, *times, *powers]
        rows.append([*row, f"{cell['mean_batch_size']:.1f}", f"{cell['marginal_mj']:.1f}"])
    head = (
        "load",
        "1/s",
        "policy",
        "SLO ms",
        "mean ms",
        "predicted",
        "p95 ms",
        "W",
        "predicted",
        "mean batch",
        "mJ each",
    )
    return markdown_table(head, rows)


def _http(results: Results) -> str:
    keys = ("offered_hz", "throughput_hz", "mean_ms", "p95_ms", "p99_ms", "mean_batch_size", "busiest_process")
    rows = [[row["gateways"], *(_number(row[key]) for key in keys), _limits(row)] for row in results["throughput"]]
    head = (
        "gateways",
        "offered, 1/s",
        "answered",
        "mean ms",
        "p95",
        "p99",
        "mean batch",
        "busiest process",
        "limited by",
    )
    return markdown_table(head, rows)


def _http_policies(results: Results) -> str:
    keys = ("offered_hz", "throughput_hz", "mean_ms", "p95_ms", "mean_batch_size", "busiest_process")
    rows = [
        [row["policy"], f"{row['load']:.2f}", *(_number(row[key]) for key in keys), _limits(row)]
        for row in results["policies"]
    ]
    head = (
        "policy",
        "load",
        "offered, 1/s",
        "answered",
        "mean ms",
        "p95",
        "mean batch",
        "busiest process",
        "limited by",
    )
    return markdown_table(head, rows)


def _limits(row: Mapping[str, Any]) -> str:
    return ", ".join(["a process"] * row["cpu_bound"] + ["the load generator"] * row["client_late"]) or "-"


def _number(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


_TABLES: Mapping[str, Callable[[Results], str]] = {
    "tests": lambda results: str(results["tests"]),
    "cells": _kernels,
    "tensorrt": lambda results: f"TensorRT: {results['tensorrt']}",
    "uploads": _uploads,
    "profile": _profile,
    "sensor": _sensor,
    "joules": _joules,
    "throughput": _http,
    "policies": _http_policies,
}
