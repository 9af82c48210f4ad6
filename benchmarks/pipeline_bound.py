"""A bound on the percentile of a pipeline, live on two emulated devices: what is promised, and what clients see.

One request of a model is followed by 1 to 6 at once of another. The devices are a Tesla P4 slowed ten and five times.
For each policy and load of the busier device, by Poisson arrivals of calls: the share within the bound as clients see
it, the 95th percentile, and the power of both devices by their profiles. Policies: the split of
policies/planning/pipeline_bounds.py, both models served greedily, and both by the policy of least mean response time.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import uvloop

from benchmarks.real_models import open_loop
from benchmarks.servers.chain import MOST
from benchmarks.support.calls import HttpCall
from benchmarks.support.harness import ROOT, argument_parser, markdown_table, save_record, save_table, serving
from policies.profile import Profile, load_profile

NAME = "pipeline_bound"
POLICIES: dict[str, Sequence[str]] = {
    "split bound": (),
    "greedy": ("--policy", "greedy"),
    "least mean response time": (),
}
LOADS = (0.2, 0.5, 0.8)
_MEAN = (1 + MOST) / 2  # requests of the second model in a call
_FACTOR = 5.0  # of the second device


def profiles() -> dict[str, Profile]:
    """The devices' profiles by their models."""
    slow, fast = load_profile("googlenet-tesla-p4-x10"), load_profile("googlenet-tesla-p4")
    times, energies = (tuple(_FACTOR * each for each in values or ()) for values in (fast.service_times, fast.energies))
    return {"first": slow, "second": replace(fast, name="slowed", service_times=times, energies=energies)}


def measure(policy: str, bound_ms: float, seconds: float, settling: float, folder: Path) -> list[dict[str, Any]]:
    """Serve each load, one after the other, by one server."""
    found = profiles()
    models: list[dict[str, Any]] = []
    for name, profile in found.items():
        file = folder / f"{name}.json"
        file.write_text(profile.to_json())
        source = f"{ROOT}/benchmarks/servers/chain.py:Floats"
        models.append({"name": name, "source": source, "device": f"emulated:{file}"})
    models.append({"name": "chain", "source": f"{ROOT}/benchmarks/servers/chain.py:Chain"})
    (folder / "server.yaml").write_text(json.dumps({"models": models}))
    flags = ["--config", str(folder / "server.yaml"), *POLICIES[policy]]
    if policy == "split bound":
        flags += ["--slo-p95-ms", f"chain={bound_ms:g}"]
    capacity = min(found["first"].capacity, found["second"].capacity / _MEAN)
    headers, rows = {"Content-Type": "application/json"}, []
    with serving(*flags, ready_within=300) as server:
        rng = np.random.default_rng(54)
        calls = [
            HttpCall(f"{server.url}/predict/chain", json.dumps({"inputs": {"x": [count, 0, 0, 0]}}).encode(), headers)
            for count in rng.integers(1, MOST + 1, 512).tolist()
        ]
        for load in LOADS:
            rate = load * capacity
            uvloop.run(open_loop(calls, np.cumsum(rng.exponential(1 / rate, round(rate * settling))).tolist()))
            instants = np.cumsum(rng.exponential(1 / rate, round(rate * seconds)))
            before = server.total("batchwright_energy_joules_total")
            responses, errors = uvloop.run(open_loop(calls, instants.tolist()))
            joules = server.total("batchwright_energy_joules_total") - before
            times = 1e3 * np.array(responses)
            rows.append(
                {
                    "load": load,
                    "calls": len(times),
                    "errors": errors,
                    "within": float(np.mean(times <= bound_ms)),
                    "p95_ms": float(np.quantile(times, 0.95)),
                    "mean_ms": float(times.mean()),
                    "power_w": joules / float(instants[-1]),
                    "batch_sizes": {
                        model: size / server.by_label("batchwright_batch_size_count", "model")[model]
                        for model, size in server.by_label("batchwright_batch_size_sum", "model").items()
                    },
                }
            )
            print(policy, rows[-1], flush=True)
    return rows


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    figures = ("p95_ms", "mean_ms", "power_w")
    head = ["policy", "load", "calls", "within the bound", "p95, ms", "mean, ms", "power, W"]
    rows = [
        [policy, row["load"], row["calls"], f"{row['within']:.3f}", *(f"{row[key]:.1f}" for key in figures)]
        for policy, rows in record["policies"].items()
        for row in rows
    ]
    return f"The bound is {record['bound_ms']:g} ms.\n\n{markdown_table(head, rows)}\n"


def main() -> None:
    """Measure, print and record."""
    parser = argument_parser(__doc__)
    parser.add_argument("--bound-ms", type=float, default=200.0, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="measured at each load (default: %(default)s)")
    parser.add_argument("--settling", type=float, default=20.0, help="before that, s (default: %(default)s)")
    chosen = parser.parse_args()
    record: dict[str, Any] = {"bound_ms": chosen.bound_ms, "policies": {}}
    with TemporaryDirectory() as folder:
        for policy in POLICIES:
            record["policies"][policy] = measure(policy, chosen.bound_ms, chosen.seconds, chosen.settling, Path(folder))
    save_record(NAME, record)
    save_table(NAME, "A bound on the percentile of a pipeline", table(record))


if __name__ == "__main__":
    main()
