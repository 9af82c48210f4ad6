"""Predicted against measured response times of real models, from wrong profiles, and while the device changes.

Models are those of benchmarks/real_models.py, the load is Poisson. One server each:

- none: without a profile;
- x0.4, x2.5: with a profile whose times are those that the first server learned, times this factor;
- a core is taken: for the middle third of the time another process keeps one core busy, at half of the rate, which one
  core can serve; once without and once with a goal;
- lengths double: texts are half as long until half of the time has passed.

Every five seconds: what the server predicts, what it measured in the last minute, both without decoding and HTTP, the
learned service time of one request, and the policy changes so far. The figure is docs/figures/predictions.png.
"""

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.real_models import EMBEDDINGS, LARGEST, MODELS, PAGES, bodies, open_loop
from benchmarks.support.calls import HttpCall
from benchmarks.support.harness import (
    FIGURES,
    ROOT,
    Server,
    add_trace_argument,
    argument_parser,
    finish_axes,
    load_record,
    markdown_table,
    new_figure,
    save_figure,
    save_record,
    save_table,
    serving,
    temporary_cache,
)
from policies.charts.averages import PALETTE

NAME = "predictions"
FACTORS = {"none": None, "x0.4": 0.4, "x2.5": 2.5}
_MODELS = tuple(name for name in MODELS if name not in (EMBEDDINGS, PAGES))
_EVERY = 5.0  # s
_BUSY = "while True: pass"
_GOAL = 300  # ms


async def _watch(server: Server, seconds: float, found: list[dict[str, Any]]) -> None:
    """Append what the server knows every five seconds."""
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        await asyncio.sleep(_EVERY)
        found.append({"t": time.monotonic() - start, **await asyncio.to_thread(_known, server)})


def _known(server: Server) -> dict[str, Any]:
    live, profile = (_get(f"{server.url}/{path}") for path in ("live", "admin/models/model/profile"))
    changes = server.by_label("batchwright_policy_changes_total", "reason")
    alone = profile.get("length_service_time_s", [profile["service_time_s"]])[0]
    return {
        "alone_ms": 1e3 * alone[len(alone) // 2 if "length" in profile else 0],
        "changes": sum(changes.values()),
        "missed": server.total("batchwright_deadline_missed_total"),
        **{key: (live["prediction"] or {}).get(key) for key in ("predicted", "measured")},
    }


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def _run(
    server: Server, parts: Sequence[tuple[float, Sequence[bytes]]], rate: float, busy: tuple[float, float] | None
) -> dict[str, Any]:
    """Send each part's bodies for its time, s; a process keeps a core busy between the two instants, s."""
    rng = np.random.default_rng(50)
    headers = {"Content-Type": "application/octet-stream"}
    watched: list[dict[str, Any]] = []
    responses: list[float] = []

    async def disturb() -> None:
        if busy is not None:
            await asyncio.sleep(busy[0])
            other = await asyncio.create_subprocess_exec(sys.executable, "-c", _BUSY)
            try:
                await asyncio.sleep(busy[1] - busy[0])
            finally:
                other.kill()
                await other.wait()

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_watch(server, sum(part[0] for part in parts), watched))
            tasks.create_task(disturb())
            for seconds, sent in parts:
                calls = [HttpCall(f"{server.url}/predict", body, headers) for body in sent]
                count = round(rate * seconds)
                instants = np.sort(rng.uniform(0.0, seconds, count))
                answers, errors = await open_loop(calls, instants.tolist())
                responses.extend(answers)
                assert not errors, f"{errors} errors"

    uvloop.run(run())
    mean, p95 = 1e3 * np.mean(responses), 1e3 * np.quantile(responses, 0.95)
    return {"rate": rate, "http_mean_ms": float(mean), "http_p95_ms": float(p95), "seen": watched}


def _measure(model: str, rate: float, chosen: Any, folder: Path) -> dict[str, Any]:
    spec = f"model={ROOT / 'benchmarks' / 'servers' / 'real_models.py'}:{model}"
    sent, seconds = bodies(model, chosen.trace), chosen.seconds
    found: dict[str, Any] = {}
    learned: dict[str, Any] = {}

    def served(
        factor: float | None,
        parts: Sequence[tuple[float, Sequence[bytes]]],
        busy: tuple[float, float] | None = None,
        flags: Sequence[str] = (),
    ) -> dict[str, Any]:
        if factor is not None:
            path = folder / f"{model}.json"
            keys = {"service_time_s", "length_service_time_s"}
            scaled = {key: (factor * np.array(value)).tolist() for key, value in learned.items() if key in keys}
            path.write_text(json.dumps(learned | scaled))
            flags = [*flags, "--profile", str(path)]
        with serving(spec, "--device", "cpu", "--max-batch-size", str(LARGEST), *flags, ready_within=300) as server:
            result = _run(server, parts, rate / 2 if busy else rate, busy)
            result["log"] = _changes(server)
            learned.update(_get(f"{server.url}/admin/models/model/profile"))
            return result

    for name in ["none", *(name for name in FACTORS if name != "none" and name in (chosen.profiles or FACTORS))]:
        found[name] = served(FACTORS[name], [(seconds, sent)])
        print(model, name, _summary(found[name]), flush=True)
    if chosen.profiles:
        return found
    busy, goal = (seconds / 3, 2 * seconds / 3), ("--slo-p95-ms", str(_GOAL))
    found["a core is taken"] = served(1.0, [(seconds, sent)], busy)
    found[f"a core is taken, p95 within {_GOAL} ms"] = served(1.0, [(seconds, sent)], busy, goal)
    if model == "Encoder":
        halves = [b" ".join(body.split()[: len(body.split()) // 2 + 1]) for body in sent]
        found["lengths double"] = served(1.0, [(seconds / 2, halves), (seconds / 2, sent)])
    return found


def _changes(server: Server) -> dict[str, float]:
    return {key: value for key, value in server.by_label("batchwright_policy_changes_total", "reason").items() if value}


def _summary(run: Mapping[str, Any]) -> list[str]:
    """Cells of a table: predicted and measured means over the time after the first minute, and policy changes."""
    late = [each for each in run["seen"] if each["t"] > 60.0 and each["predicted"] and each["measured"]]
    if not late:
        return ["", "", "", f"{run['seen'][-1]['changes']:g}"]
    predicted, measured = (np.mean([each[key]["mean_ms"] for each in late]) for key in ("predicted", "measured"))
    first = next(each["changes"] for each in run["seen"] if each["t"] > 60.0)
    changes = f"{first:g} + {run['seen'][-1]['changes'] - first:g}"
    return [f"{predicted:.0f}", f"{measured:.0f}", f"{predicted / measured - 1:+.0%}", changes]


def table(record: Mapping[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = [
        [model, f"{run['rate']:.1f}", name, *_summary(run), f"{run['http_mean_ms']:.0f}"]
        for model, runs in record.items()
        for name, run in runs.items()
    ]
    head = ["model", "1/s", "start", "predicted, ms", "measured, ms", "difference"]
    return markdown_table([*head, "policy changes, first minute + later", "client, ms"], rows) + "\n"


def draw(record: Mapping[str, Any]) -> None:
    """For each model, mean response times and the learned service time of one request over time."""
    figure = new_figure(12.5, 3.6 * len(record))
    for (model, runs), (means, times) in zip(
        record.items(), figure.subplots(len(record), 2, squeeze=False), strict=True
    ):
        for colour, (name, run) in zip(PALETTE, runs.items(), strict=False):
            seen = run["seen"]
            times.plot([each["t"] for each in seen], [each["alone_ms"] for each in seen], color=colour, label=name)
            for key, style in (("predicted", "-"), ("measured", ":")):
                known = [each for each in seen if each[key]]
                x, y = [each["t"] for each in known], [each[key]["mean_ms"] for each in known]
                means.plot(x, y, style, color=colour, label=f"{name}, {key}")
        means.set(title=f"{model}: mean response time", xlabel="s", ylabel="ms", yscale="log")
        times.set(title=f"{model}: learned time of one request", xlabel="s", ylabel="ms", ylim=(0, None))
        finish_axes(means, {"fontsize": 7})
        finish_axes(times, {"fontsize": 8})
    save_figure(figure, FIGURES / f"{NAME}.png")


def main() -> None:
    """Measure, print, draw and record."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=_MODELS, default=_MODELS)
    parser.add_argument("--rates", nargs="*", type=float, required=True, help="1/s, one for each model")
    parser.add_argument("--seconds", type=float, default=660.0, help="of each server")
    parser.add_argument(
        "--profiles", nargs="*", choices=FACTORS, help="measure these only, and first the one they need"
    )
    add_trace_argument(parser)
    chosen = parser.parse_args()
    record: dict[str, Any] = load_record(NAME)
    with temporary_cache() as folder:
        for model, rate in zip(chosen.models, chosen.rates, strict=True):
            record[model] = record.get(model, {}) | _measure(model, rate, chosen, folder)
            save_record(NAME, record)
    draw(record)
    save_table(NAME, "Predicted and measured response times", table(record))


if __name__ == "__main__":
    main()
