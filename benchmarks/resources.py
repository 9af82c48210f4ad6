"""A bound on a percentile on a CPU, kept with the least CPU time: real models, live, beside greedy and fixed timeouts.

For each model one server measures its profile first, and learns it again from batches under load, beside the client on
the same cores. Then, for each bound, a multiple of the learned l(1), and each load, the same arrivals are sent under
three policies in turns: greedy, the fixed timeout that keeps the bound with the least CPU time in a simulation of the
learned profile, and the solved policy. Of each: the share of the requests answered within the bound as clients see it,
and the CPU time of the batches a request, beside what the model predicts for both, and the lower bound of any policy;
and the CPU time of all processes of the server. A bound that the solver cannot keep is said. The record is written
after each model.
"""

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.real_models import bodies, open_loop, raw
from benchmarks.servers import real_models
from benchmarks.support.calls import HttpCall
from benchmarks.support.harness import (
    ROOT,
    TRACE,
    Server,
    argument_parser,
    confidence_interval,
    load_record,
    markdown_table,
    save_record,
    save_table,
    serving,
    temporary_cache,
)
from benchmarks.support.processes import cpu_seconds
from policies.objectives.bounds import solve_within
from policies.objectives.frontier import UnreachableError
from policies.objectives.solving import LEAST_SAVING
from policies.objectives.trial import Trial
from policies.percentile.ages import AgeSolution, ResponseBounds
from policies.profile import Profile, parse_profile
from policies.queue.simulator import share_within
from policies.queue.table_simulator import ServiceModel, simulate_ages
from policies.sizing.padded import of_mixed_lengths
from policies.solver.distributions import measured_service
from policies.solver.model import Problem
from policies.solver.solver import solve
from policies.types import MaxAges

NAME = "resources"
MODELS = ("Classifier", "Encoder", "VoiceDetector")
FACTORS, LOADS, SHARE = (2.0, 4.0, 8.0), (0.2, 0.5, 0.7), 0.95
_LARGEST = 16
_TUNED_OVER, _TIMEOUTS = 20_000, 24  # requests of a simulation; timeouts tried within a bound
_WARM = 5.0  # s of each cell that do not count
_AGAIN = 150  # requests under a solved policy that do not count when it is set again, with the margin that it had
_TOLERANCE = 0.005  # of the share
_LEARNING = 60.0  # s of greedy batches at half the capacity, before the profile is read


@contextmanager
def _server(model: str) -> Iterator[Server]:
    spec = f"model={ROOT / 'benchmarks' / 'servers' / 'real_models.py'}:{model}"
    flags = ("--device", "cpu", "--max-batch-size", str(_LARGEST), "--profile-first", "--resource", "cpu_time")
    with temporary_cache(), serving(spec, *flags, ready_within=600) as server:
        yield server


def profile_of(server: Server, lengths: Sequence[int]) -> Profile:
    """The profile as it is known now, for batches of requests of these lengths; empty for a model without lengths."""
    with urllib.request.urlopen(f"{server.url}/admin/models/model/profile") as response:
        known = parse_profile(response.read().decode(), "learned").saving("cpu_time")
    return of_mixed_lengths(known, [known.time_alone(length) for length in lengths])


def _lengths(model: str, sent: Sequence[bytes]) -> list[int]:
    """The lengths of bodies; none for a model without lengths."""
    described = getattr(real_models, model)()
    if not described.lengths:
        return []
    return [next(iter(described.decode(body, "").values())).shape[-1] for body in sent]


def predicted(problem: Problem, limit: float) -> dict[str, dict[str, Any]]:
    """Spec, CPU time a request, s, and share within the limit of each policy, by the model; and the lower bound."""
    greedy, best = MaxAges((0.0, 0.0)), _best_timeout(problem, limit)
    rows: dict[str, dict[str, Any]] = {"greedy": {"spec": "greedy", **_simulated(problem, greedy, limit)}}
    if best is not None:
        timeout, figures = best
        rows["best timeout"] = {"spec": f"timeout:{1e3 * timeout:.4g}", **figures}
    try:
        found = solve_within(problem, ResponseBounds(((limit, SHARE),)), least_saving=LEAST_SAVING)
    except UnreachableError:
        return rows
    rows["solved"] = {"spec": f"smdp:slo_p95_ms={1e3 * limit:.6g}", **_averages(problem, found, limit)}
    return rows


def _averages(problem: Problem, found: Any, limit: float) -> dict[str, float]:
    figures = {"cpu_s": found.energy_per_request}
    if isinstance(found, AgeSolution):
        figures |= {"share": found.share_within[0], "least_cpu_s": found.power_lower_bound / problem.arrival_rate}
    else:
        figures["share"] = share_within(Trial(problem, _TUNED_OVER).run(found).responses, limit).value
    return figures


def _simulated(problem: Problem, ages: MaxAges, limit: float) -> dict[str, float]:
    trial, profile = Trial(problem, _TUNED_OVER), problem.profile
    device = ServiceModel(trial.service_time(), profile.max_batch_size, profile.costs)
    run = simulate_ages(ages, device, trial.instants)
    assert run.energies is not None
    return {"cpu_s": float(run.energies.sum()) / run.scheduled, "share": share_within(run.responses, limit).value}


def _best_timeout(problem: Problem, limit: float) -> tuple[float, dict[str, float]] | None:
    """The timeout of the least CPU time within the limit, s, and its figures; None if none keeps it."""
    largest, found = problem.profile.max_batch_size, list[tuple[float, dict[str, float]]]()
    for timeout in np.linspace(0.0, limit, _TIMEOUTS, endpoint=False).tolist():
        figures = _simulated(problem, MaxAges((0.0, *(timeout,) * (largest - 1), 0.0)), limit)
        if figures["share"] >= SHARE:
            found.append((timeout, figures))
    return min(found, key=lambda each: each[1]["cpu_s"], default=None)


def measured(
    server: Server, calls: Sequence[HttpCall], rate: float, requests: int, seed: int, settled: int = 0
) -> dict[str, Any]:
    """Response times, s, and CPU time a request of one cell, after some seconds, or requests, that do not count.

    `cpu_s` is of the batches, `all_cpu_s` of all processes of the server: HTTP, decoding, and solving policies, too.
    """
    rng = np.random.default_rng(seed)
    warm = max(settled, round(_WARM * rate))
    uvloop.run(open_loop(calls, np.cumsum(rng.exponential(1 / rate, warm)).tolist()))
    before, all_before = server.total("batchwright_cpu_seconds_total"), _of_all(server)
    responses, errors = uvloop.run(open_loop(calls, np.cumsum(rng.exponential(1 / rate, requests)).tolist()))
    spent = server.total("batchwright_cpu_seconds_total") - before
    answered = max(requests - errors, 1)
    of_all = (_of_all(server) - all_before) / answered
    return {"responses": responses, "errors": errors, "cpu_s": spent / answered, "all_cpu_s": of_all}


def _of_all(server: Server) -> float:
    """CPU time of a server's processes so far, also of those that have ended, as those that solve policies do, s."""
    times = psutil.Process(server.process.pid).cpu_times()
    return cpu_seconds(server.process.pid) + float(times.children_user + times.children_system)


def _cells(model: str, chosen: Any) -> list[dict[str, Any]]:
    sent, rows = bodies(model, TRACE), list[dict[str, Any]]()
    lengths = _lengths(model, sent)
    with _server(model) as server:
        calls = [raw(f"{server.url}/predict")(body) for body in sent]
        server.set_policy("model", "greedy")
        half = profile_of(server, lengths).capacity / 2.0
        measured(server, calls, half, round(_LEARNING * half), 0)
        profile = profile_of(server, lengths)
        for factor in chosen.factors:
            for load in chosen.loads:
                limit, rate = factor * profile.service_time(1), load * profile.capacity
                problem = Problem(profile, rate, service=measured_service(profile))
                policies = predicted(problem, limit)
                for number in range(chosen.rounds):
                    for name, expected in policies.items():
                        server.set_policy("model", expected["spec"])
                        seed = round(100 * load) + 7 * number
                        settled = 0 if name != "solved" else _AGAIN if number else chosen.settled
                        found = measured(server, calls, rate, chosen.requests, seed, settled)
                        within = float(np.mean(np.array(found.pop("responses")) <= limit))
                        cell = {"model": model, "factor": factor, "load": load, "policy": name, "round": number}
                        rows.append({**cell, "limit_ms": 1e3 * limit, "predicted": expected, "share": within, **found})
                        print(json.dumps(rows[-1]), flush=True)
                if "solved" not in policies:
                    fastest = solve(replace(problem, w2=0.0))
                    print(f"{model} {factor:g} {load:g}: not reachable, mean {1e3 * fastest.mean_response_time:.0f} ms")
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The cells as a Markdown table: share within the bound and CPU ms a request, measured (predicted).

    A half of the 95 per cent interval over the rounds follows each mean. A cell without a solved policy is one whose
    bound no policy keeps, by the model; a measured share that misses it is marked.
    """
    cells: dict[tuple[str, float, float, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["factor"], row["load"], row["policy"]), []).append(row)
    lines = []
    for (model, factor, load, policy), each in cells.items():
        expected, reachable = each[0]["predicted"], (model, factor, load, "solved") in cells
        share, around = confidence_interval([one["share"] for one in each])
        cpu, of_all = (confidence_interval([1e3 * one[key] for one in each]) for key in ("cpu_s", "all_cpu_s"))
        least = expected.get("least_cpu_s")
        missed = " missed" if reachable and share < SHARE - _TOLERANCE else ""
        lines.append(
            [
                *(model, f"{factor:g}", f"{each[0]['limit_ms']:.0f}", f"{load:g}", policy),
                f"{share:.3f} ± {around:.3f} ({expected['share']:.3f}){missed}",
                f"{cpu[0]:.1f} ± {cpu[1]:.1f} ({1e3 * expected['cpu_s']:.1f})",
                f"{of_all[0]:.1f} ± {of_all[1]:.1f}",
                "" if least is None else f"{1e3 * least:.1f}",
            ]
        )
    head = ["model", "bound / l(1)", "bound, ms", "load", "policy", "share within"]
    return markdown_table([*head, "CPU ms a request", "of all processes", "lower bound"], lines)


def main() -> None:
    """Measure, print and record."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--factors", nargs="+", type=float, default=FACTORS, help="bounds over l(1)")
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2500, help="that count in each cell")
    about = "those under a solved policy that do not count at first, while the server learns its margin"
    parser.add_argument("--settled", type=int, default=800, help=about)
    chosen = parser.parse_args()
    record: dict[str, Any] = load_record(NAME)
    for model in chosen.models:
        record[model] = _cells(model, chosen)
        save_record(NAME, record)
    rows = [row for model in record.values() for row in model]
    save_table(NAME, "CPU time within a bound", table(rows))


if __name__ == "__main__":
    main()
