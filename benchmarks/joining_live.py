"""Continuous batching with a weight of power against joining at once, on a running server and simulated.

A GPT-2 of four layers of width 64 with random weights generates 1 to 32 tokens on a CPU. Its decode step takes little
longer for eight texts than for one. The server's profile has the measured times, and energies of an assumed device that
draws 180 W + 6 W a request while it works, above its idle power. The energy of a run is what the server counts by them:
it follows the number and the sizes of the batches that were run, not a meter. Loads are fractions of what full batches
can serve. Each run has a server of its own, which learns lengths from 300 requests first. A solved table is in use
before the measured run begins. The simulation has the same arrivals and lengths. There are two rounds with other
arrivals, and no intervals. Loads and w2 were fixed before the first run.

The record is written after each run, and runs in it are not made again; delete it to start over.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.support.harness import (
    argument_parser,
    fill_record,
    load_record,
    markdown_table,
    measure_profile,
    run_json,
    serving,
    wait_until,
)
from policies.profile import Profile, load_profile, parse_profile
from policies.rules.continuous_batching import decode_problem

NAME = "joining_live"
LARGEST, LOADS, ROUNDS, W2 = 8, (0.1, 0.2, 0.4), (1, 2), 3.0  # w2 in ms/W
POLICIES = (f"joining:{LARGEST}", f"joining:{LARGEST},w2={W2:g}")
_TOKENS = 32  # at most
_LEARNING, _MEASURED = 300, 600  # requests
_SOLVED_WITHIN = 120.0  # s
_CONFIGURATION = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 259,
    "n_positions": 512,
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 4,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}


def measured_profile() -> dict[str, Any]:
    """Measure service times by length, add the assumed energies, and return the content of a profile file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        flags = ("--weights", "random", "--device", "cpu", "--max-batch-size", str(LARGEST))
        measure_profile(f"writer={_model(Path(folder))}", path, *flags)
        profile = load_profile(str(path))
    joules = tuple((180.0 + 6.0 * size) * time for size, time in enumerate(profile.service_times, 1))
    content: dict[str, Any] = json.loads(replace(profile, energies=joules).to_json())
    return content


def measure(policy: str, load: float, seed: int) -> dict[str, Any]:
    """One run: response time, ms, and energy of a request, J, live and simulated, and the latest sending, ms."""
    content = json.dumps(load_record(NAME)["profile"])
    rate = _rate(parse_profile(content, NAME), load)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "profile.json"
        file.write_text(content)
        flags = ("--weights", "random", "--device", "cpu", "--profile", str(file), "--max-batch-size", str(LARGEST))
        with serving(f"writer={_model(folder)}", *flags, "--policy", policy) as server:
            offer = partial(_offer, server.url)
            offer(rate, _LEARNING, 100 + seed)
            if "w2" in policy:
                wait_until(lambda: _solved(server) > 0, _SOLVED_WITHIN)
            before = server.total("batchwright_energy_joules_total")
            live = offer(rate, _MEASURED, seed)
            joules = server.total("batchwright_energy_joules_total") - before
        simulated = _offer("--simulate", rate, _MEASURED, seed, str(file), "--policy", policy)
    assert live["ok"] == live["scheduled"] == simulated["scheduled"], live["errors"]
    return {
        "rate": rate,
        "requests": live["ok"],
        "live": {"mean_ms": live["mean_ms"], "joules": joules / live["ok"]},
        "simulated": {"mean_ms": simulated["mean_ms"], "joules": simulated["energy_per_request_mj"] / 1e3},
        "send_lag_p99_ms": live["send_lag_p99_ms"],
    }


def _model(folder: Path) -> Path:
    """Write the model's configuration; it has no weights."""
    model = folder / "writer"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(_CONFIGURATION))
    return model


def _rate(profile: Profile, load: float) -> float:
    """Arrival rate of a load, 1/s."""
    sizes = [profile.service_time(1, length) for length in range(1, _TOKENS + 1)]
    return load * decode_problem(sizes, profile, 0.0).capacity


def _offer(target: str, rate: float, requests: int, seed: int, *rest: str) -> Any:
    arrivals = ("--rate", f"{rate:g}", "--duration", f"{requests / rate:g}", "--seed", str(seed))
    return run_json("generate-load", target, *rest, *arrivals, "--sizes", f"uniform:1:{_TOKENS}")


def _solved(server: Any) -> float:
    """Number of tables that were solved for learned lengths."""
    return float(server.by_label("batchwright_policy_changes_total", "reason").get("sizes", 0.0))


def changes(record: dict[str, Any]) -> dict[tuple[float, int], dict[str, float]]:
    """Changes by w2 of energy, time and cost, live and simulated, per cent, by load and round."""
    found = {}
    for load, seed in product(LOADS, ROUNDS):
        plain, weighted = (record[f"{policy}; {load:g}; {seed}"] for policy in POLICIES)
        row = {}
        for how in ("live", "simulated"):
            for part in ("joules", "mean_ms"):
                row[f"{how} {part}"] = 100.0 * (weighted[how][part] / plain[how][part] - 1.0)
            costs = [run[how]["mean_ms"] + W2 * run["rate"] * run[how]["joules"] for run in (plain, weighted)]
            row[f"{how} cost"] = 100.0 * (costs[1] / costs[0] - 1.0)
        found[load, seed] = row
    return found


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = []
    for (load, seed), change in changes(record).items():
        plain = record[f"{POLICIES[0]}; {load:g}; {seed}"]["live"]
        pairs = [
            f"{change[f'live {part}']:+.1f} ({change[f'simulated {part}']:+.1f})"
            for part in ("joules", "mean_ms", "cost")
        ]
        rows.append((f"{load:g}", f"{seed}", f"{plain['mean_ms']:.0f}", f"{plain['joules']:.1f}", *pairs))
    head = ("load", "round", "ms", "J a request", *(f"{what} with w2, %" for what in ("energy", "time", "cost")))
    return markdown_table(head, rows)


def main() -> None:
    """Measure the runs that the record lacks and print them."""
    argument_parser(__doc__).parse_args()
    runs: dict[str, Callable[[], Any]] = {"profile": measured_profile} | {
        f"{policy}; {load:g}; {seed}": partial(measure, policy, load, seed)
        for seed, load, policy in product(ROUNDS, LOADS, POLICIES)
    }
    print(table(fill_record(NAME, runs)))


if __name__ == "__main__":
    main()
