"""A percentile live over HTTP on an emulated device: at steady loads, and while the load rises in steps.

For each policy: the share of the requests that clients saw answered within the bound, the percentile, and the power by
the profile (energy of a request times the arrival rate). The policies are the table of maximum ages, the table of batch
sizes, greedy, and the fixed timeout of least power, which is tuned in simulation for each load. The record is written
after each run, and runs in it are not measured again; delete it to start over.
"""

import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.support.harness import Server, argument_parser, command_line, fill_record, read_jsonl, serving
from policies.objectives.trial import Trial
from policies.profile import load_profile
from policies.queue.simulator import share_within
from policies.queue.table_simulator import ServiceModel, simulate_ages
from policies.solver.model import Problem
from policies.types import MaxAges

PROFILE = "googlenet-tesla-p4-x10"
BOUND_MS, SHARE = 100.0, 0.95  # as clients see it
_NETWORK_MS = 2.0  # of it, left for HTTP and the clients
_KEPT_MS = BOUND_MS - _NETWORK_MS  # by all policies
LOADS = (0.3, 0.5, 0.7)
POLICIES = {
    "maximum ages": f"smdp:slo_p95_ms={_KEPT_MS:g}",
    "batch sizes": f"smdp:slo_p95_ms={_KEPT_MS:g},policy_form=batch-size",
    "greedy": "greedy",
}
_TUNED_OVER = 100_000  # requests
_READY_WITHIN = 600.0  # s, while the tables are solved


def best_timeout(load: float) -> str:
    """Return the timeout policy of the least power within the bound, by simulation."""
    profile = load_profile(PROFILE)
    trial = Trial(Problem(profile, load * profile.capacity), _TUNED_OVER)
    largest, limit, found = profile.max_batch_size, _KEPT_MS / 1e3, (np.inf, 0.0)
    for timeout in np.arange(0.0, limit, 0.001).tolist():
        ages = MaxAges((0.0, *(timeout,) * (largest - 1), 0.0))
        run = simulate_ages(ages, ServiceModel(trial.service_time(), largest, profile.energies), trial.instants)
        assert run.energies is not None
        if share_within(run.responses, limit).value >= SHARE:
            found = min(found, (float(run.energies.sum()), timeout))
    return f"timeout:{1e3 * found[1]:g}"


def steady(policy: str, seconds: float, settling: float, flags: Sequence[str]) -> dict[str, Any]:
    """Serve steady loads, one after the other, by one server."""
    rows: dict[str, Any] = {}
    with _serving(POLICIES.get(policy, "greedy"), flags) as server:
        for load in LOADS:
            spec = POLICIES.get(policy) or best_timeout(load)
            if policy not in POLICIES:
                server.set_policy("demo", spec)
            answers = _load(server, load, ["--duration", str(settling + seconds)])
            rows[f"{load:g}"] = {"spec": spec, **seen_by_clients(answers, settling, settling + seconds, load)}
            rows[f"{load:g}"] |= _adaptations(server)
    return rows


def rising(policy: str, seconds: float, settling: float, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Serve a load that rises in steps; the beginning of each step does not count."""
    top, step = max(LOADS), settling + seconds
    steps = ",".join(f"{load / top}@{step}" for load in LOADS)
    with _serving(POLICIES[policy], flags) as server:
        answers = _load(server, top, ["--duration", str(step * len(LOADS)), "--arrivals", f"steps:{steps}"])
    return [seen_by_clients(answers, i * step + settling, (i + 1) * step, load) for i, load in enumerate(LOADS)]


def seen_by_clients(answers: list[dict[str, Any]], begin: float, end: float, load: float) -> dict[str, float]:
    """Summarise the answers to requests sent from `begin` to `end`, s, at a load."""
    mine = [answer for answer in answers if begin <= answer["scheduled_s"] < end]
    served = [answer for answer in mine if answer["status"] == 200]
    responses = np.array([answer["response_ms"] for answer in served])
    rate = load * load_profile(PROFILE).capacity
    return {
        "load": load,
        "requests": len(mine),
        "failed": len(mine) - len(served),
        "share": round(float(np.sum(responses <= BOUND_MS)) / len(mine), 4),
        "p95_ms": round(float(np.quantile(responses, SHARE)), 2),
        "mean_ms": round(float(responses.mean()), 2),
        "power_w": round(rate * float(np.mean([answer["energy_mj"] for answer in served])) / 1e3, 3),
    }


def _serving(policy: str, flags: Sequence[str]) -> AbstractContextManager[Server]:
    device = ("--device", f"emulated:{PROFILE}")
    return serving("demo", *device, "--policy", policy, *flags, ready_within=_READY_WITHIN)


def _load(server: Server, load: float, arguments: Sequence[str]) -> list[dict[str, Any]]:
    rate = load * load_profile(PROFILE).capacity
    with TemporaryDirectory() as folder:
        output = Path(folder) / "run.jsonl"
        line = [*command_line("generate-load"), server.url, "--rate", str(rate), *arguments, "--pixels"]
        subprocess.run([*line, "--output", str(output), "--json"], check=True, stdout=subprocess.DEVNULL)
        return read_jsonl(output)


def _adaptations(server: Server) -> dict[str, float]:
    """How often the server has changed its policy for the objective, and what it has changed last."""
    changes = server.by_label("batchwright_policy_changes_total", "reason").get("objective", 0.0)
    margin = 1e3 * server.total("batchwright_objective_margin_seconds")
    return {"changes": changes, "level": server.total("batchwright_objective_level"), "margin_ms": round(margin, 2)}


def main() -> None:
    """Measure what the record lacks, print and record."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="measured at each load (default: %(default)s)")
    parser.add_argument("--settling", type=float, default=60.0, help="before that, s (default: %(default)s)")
    options = parser.parse_args()
    times = options.seconds, options.settling
    cells: dict[str, Callable[[], Any]] = {
        f"steady, {policy}": partial(steady, policy, *times, []) for policy in (*POLICIES, "best timeout")
    }
    cells |= {f"rising, {policy}": partial(rising, policy, *times, []) for policy in POLICIES}
    for name, found in fill_record("objective", cells).items():
        print(name)
        for row in found.values() if isinstance(found, dict) else found:
            print("   ", row)


if __name__ == "__main__":
    main()
