"""Interactive calls beside bulk that saturates the device: a solved limit of bulk's batches, and strict priority.

A real image classifier on this CPU. Bulk comes from 64 clients that each send a call after the answer to the last one;
interactive calls arrive at random, at a twentieth of the capacity. First strict priority: greedy batches, filled with
interactive calls first, as Triton's priority levels do it. Then the same calls with a bound on the 95th percentile of
level 1, of 0.6 of what strict priority gave it. Of each: what interactive and bulk calls got, beside what the model of
policies/percentile/bulk.py predicts from the profile as learned in the same round. The rounds are in turns. A run with
a bound begins with 90 s in which the server reduces the bound that it solves for by what decoding and HTTP take.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import aiohttp
import numpy as np
import uvloop

from benchmarks.real_models import bodies
from benchmarks.support.harness import (
    FIGURES,
    ROOT,
    TRACE,
    Server,
    argument_parser,
    confidence_interval,
    finish_axes,
    markdown_table,
    new_figure,
    save_figure,
    save_record,
    save_table,
    serving,
    temporary_cache,
)
from policies.percentile.bulk import bulk_batches, largest_bulk_batch
from policies.profile import Profile, parse_profile

NAME = "priorities"
MODEL, LARGEST, CLIENTS, SHARE = "Classifier", 16, 64, 0.95
_INTERACTIVE, _BOUND = 0.05, 0.6  # of the capacity; of the percentile under strict priority
_WARM, _SETTLING = 8.0, 90.0  # s of each run that do not count; with a bound until its margin has settled


def _run(
    server: Server, sent: Sequence[bytes], rate: float, seconds: float, seed: int, warm: float = _WARM
) -> dict[str, Any]:
    """Response times of interactive calls, s, and answers of bulk a second, after some seconds that do not count."""
    url, rng = f"{server.url}/predict", np.random.default_rng(seed)
    responses: list[float] = []
    answered = 0

    async def call(session: aiohttp.ClientSession, body: bytes, urgency: str) -> float:
        began = time.monotonic()
        async with session.post(url, data=body, headers={"Priority": urgency}) as response:
            await response.read()
            assert response.status == 200, await response.text()
        return time.monotonic() - began

    async def bulk(session: aiohttp.ClientSession, first: int, begin: float, end: float) -> None:
        nonlocal answered
        number = first
        while time.monotonic() < end:
            await call(session, sent[number % len(sent)], "u=7")
            answered += begin <= time.monotonic() < end
            number += CLIENTS

    async def interactive(session: aiohttp.ClientSession, at: float, body: bytes, begin: float) -> None:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        response = await call(session, body, "u=0")
        if at >= begin:
            responses.append(response)

    async def run() -> None:
        start = time.monotonic()
        begin, end = start + warm, start + warm + seconds
        instants = start + np.cumsum(rng.exponential(1.0 / rate, round(rate * (warm + seconds))))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
            for client in range(CLIENTS):
                tasks.create_task(bulk(session, client, begin, end))
            for number, at in enumerate(instants[instants < end].tolist()):
                tasks.create_task(interactive(session, at, sent[number % len(sent)], begin))

    uvloop.run(run())
    return {"responses": responses, "bulk_hz": answered / seconds}


def _profile(server: Server) -> Profile:
    with urllib.request.urlopen(f"{server.url}/admin/models/model/profile") as response:
        return parse_profile(response.read().decode(), "learned")


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    """Strict priority and the solved limit in turns."""
    sent, rows = bodies(MODEL, TRACE), list[dict[str, Any]]()
    spec = f"model={ROOT / 'benchmarks' / 'servers' / 'real_models.py'}:{MODEL}"
    flags = ("--device", "cpu", "--max-batch-size", str(LARGEST), "--profile-first", "--priority-weights", "8,1")
    with temporary_cache(), serving(spec, *flags, ready_within=600) as server:
        server.set_policy("model", "greedy")
        _run(server, sent, 1.0, 30.0, 99)  # so that the times under load are learned
        profile = _profile(server)
        rate = _INTERACTIVE * profile.capacity
        strict = _run(server, sent, rate, seconds, 98)
        bound = _BOUND * float(np.quantile(strict["responses"], SHARE))
        for number in range(rounds):
            for name, policy in (("strict", "greedy"), ("bounded", f"smdp:slo_p95_ms={1e3 * bound:.6g}")):
                server.set_policy("model", policy)
                found = _run(server, sent, rate, seconds, number, _WARM if name == "strict" else _SETTLING)
                responses = np.array(found.pop("responses"))
                rows.append(
                    {
                        "policy": name,
                        "round": number,
                        **found,
                        "share": float(np.mean(responses <= bound)),
                        "mean_ms": 1e3 * float(responses.mean()),
                        "p95_ms": 1e3 * float(np.quantile(responses, SHARE)),
                        "calls": len(responses),
                    }
                )
                if name == "bounded":  # from the times as learned in this round, since the machine's speed varies
                    chosen = largest_bulk_batch(bulk_batches(_profile(server), rate, bound), SHARE)
                    predicted = {"largest_batch": chosen.size, "share": chosen.share, "bulk_hz": chosen.throughput}
                    rows[-1]["predicted"] = predicted
                print(json.dumps(rows[-1]), flush=True)
        profile = _profile(server)
    return {
        "bound_ms": 1e3 * bound,
        "interactive_hz": rate,
        "capacity_hz": profile.capacity,
        "service_time_cv": profile.cvs,
        "service_time_s": list(profile.service_times),
        "rows": rows,
        "curve": [
            {"factor": factor, **_point(profile, rate, factor * profile.service_time(LARGEST))}
            for factor in np.linspace(0.4, 2.4, 21).tolist()
        ],
    }


def _point(profile: Profile, rate: float, bound: float) -> dict[str, Any]:
    chosen = largest_bulk_batch(bulk_batches(profile, rate, bound), SHARE)
    kept = chosen.share >= SHARE
    return {"bound_ms": 1e3 * bound, "bulk_hz": chosen.throughput if kept else None, "largest_batch": chosen.size}


def table(record: Mapping[str, Any]) -> str:
    """The record as a Markdown table."""
    lines = []
    for policy in ("strict", "bounded"):
        rows = [row for row in record["rows"] if row["policy"] == policy]
        share, mean, p95, bulk = (
            confidence_interval([row[key] for row in rows]) for key in ("share", "mean_ms", "p95_ms", "bulk_hz")
        )
        predicted = [row["predicted"] for row in rows if "predicted" in row]
        kept = f" ({fmean(each['share'] for each in predicted):.3f})" if predicted else ""
        bulk_hz = f" ({fmean(each['bulk_hz'] for each in predicted):.1f})" if predicted else ""
        lines.append(
            [
                "strict priority" if policy == "strict" else f"p95 within {record['bound_ms']:.0f} ms",
                f"{share[0]:.3f} ± {share[1]:.3f}" + kept,
                f"{mean[0]:.0f} ± {mean[1]:.0f}",
                f"{p95[0]:.0f} ± {p95[1]:.0f}",
                f"{bulk[0]:.1f} ± {bulk[1]:.1f}" + bulk_hz,
            ]
        )
    head = ["policy", "level 1 within the bound (predicted)", "mean, ms", "p95, ms", "bulk, 1/s (predicted)"]
    return markdown_table(head, lines) + "\n"


def draw(record: Mapping[str, Any]) -> None:
    """Bulk's throughput by the bound of level 1, predicted, and the measured points."""
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    points = [each for each in record["curve"] if each["bulk_hz"] is not None]
    x, y = [each["bound_ms"] for each in points], [each["bulk_hz"] for each in points]
    axes.plot(x, y, label="predicted, within the bound")
    for policy, marker in (("strict", "s"), ("bounded", "o")):
        rows = [row for row in record["rows"] if row["policy"] == policy]
        x, y = [row["p95_ms"] for row in rows], [row["bulk_hz"] for row in rows]
        axes.plot(x, y, marker, label=f"measured, {'strict priority' if policy == 'strict' else 'bounded'}")
    axes.axvline(record["bound_ms"], linestyle=":", color="gray", label="the bound")
    top = 1.15 * max([each["bulk_hz"] for each in (*points, *record["rows"])])
    axes.set(xlabel="95th percentile of level 1, ms", ylabel="bulk, 1/s", ylim=(0, top), xlim=(0, None))
    finish_axes(axes, {"fontsize": 8})
    save_figure(figure, FIGURES / f"{NAME}.png")


def main() -> None:
    """Measure, print, draw and record."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    chosen = parser.parse_args()
    record = measure(chosen.rounds, chosen.seconds)
    save_record(NAME, record)
    draw(record)
    save_table(NAME, "Interactive calls beside bulk", table(record))


if __name__ == "__main__":
    main()
