"""HTTP servers under the same trivial batcher: granian, uvicorn, and uvicorn with a protocol that receives in place.

The batcher takes all waiting requests, at most 32, and runs them in no time, so that what is left is the cost of HTTP.
wrk sends bodies of 1 KB and of 150,528 bytes from one thread to each server in turns. CPU time is that of the server's
processes. One more granian has malloc's mmap threshold raised, above the size of a body. The ratios are what to
compare: they are of one run on one machine.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from statistics import median
from typing import Any

from benchmarks.support import harness
from benchmarks.support.calls import HttpCall
from benchmarks.support.processes import cpu_seconds
from benchmarks.support.wrk import is_installed, run_wrk

BODIES = {"1 KB": 1024, "150,528 bytes": 224 * 224 * 3}
CONNECTIONS = (32, 128)
BASE = "received in place"
_MODULE = "benchmarks.servers.trivial_batcher"


_RAISED = ("env", f"MALLOC_MMAP_THRESHOLD_={1 << 25}", f"MALLOC_TRIM_THRESHOLD_={1 << 28}")


def commands(granian_python: str | None) -> dict[str, list[str]]:
    """The servers' command lines without --port, by name."""
    own = [sys.executable, "-m", _MODULE, "--http"]
    servers = {BASE: [*own, "received-in-place"], "uvicorn, ASGI": [*own, "uvicorn"]}
    if granian_python is not None:
        rsgi = [
            granian_python,
            "-m",
            "granian",
            "--interface",
            "rsgi",
            "--loop",
            "uvloop",
            "--no-log",
            f"{_MODULE}:rsgi",
        ]
        servers |= {"granian, RSGI": rsgi, "granian, RSGI, mmap threshold raised": [*_RAISED, *rsgi]}
    return servers


def measure(servers: dict[str, list[str]], rounds: int, duration: float) -> dict[str, list[dict[str, Any]]]:
    """Run wrk on all servers in turns; the runs by server."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    with ExitStack() as stack:
        started = {name: stack.enter_context(harness.running(*line)) for name, line in servers.items()}
        for turn in range(rounds):
            for body, connections in product(BODIES, CONNECTIONS):
                for name in list(servers)[:: 1 if turn % 2 == 0 else -1]:
                    print(f"round {turn + 1} of {rounds}: {body}, {connections} connections, {name}", flush=True)
                    server = started[name]
                    call = HttpCall(server.url, bytes(BODIES[body]), {})
                    run_wrk(call, connections, 1.0)
                    cpu = cpu_seconds(server.process.pid)
                    run = run_wrk(call, connections, duration)
                    cpu = cpu_seconds(server.process.pid) - cpu
                    cell = {"body": body, "connections": connections, "requests_per_s": run.requests_per_s}
                    runs[name].append(cell | {"not_200": run.not_200, "cpu_s_per_1000": 1e3 * cpu / run.requests})
    return runs


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over the rounds as Markdown, with their ratios to BASE's."""
    head = ["server", *(f"{body}, {connections}" for body, connections in product(BODIES, CONNECTIONS))]
    rates = [head, *(list(_row(runs, name, "requests_per_s", ".0f")) for name in runs)]
    times = [head, *(list(_row(runs, name, "cpu_s_per_1000", ".3f")) for name in runs)]
    return "\n".join(
        f"{about}:\n\n{harness.markdown_table(rows[0], rows[1:])}\n"
        for about, rows in (
            (f"Requests a second by body and connections (in brackets: ratio to {BASE})", rates),
            ("CPU seconds of the server for 1,000 requests", times),
        )
    )


def _row(runs: dict[str, list[dict[str, Any]]], name: str, key: str, form: str) -> Iterator[str]:
    yield name
    for body, connections in product(BODIES, CONNECTIONS):
        ours, base = (
            median(run[key] for run in runs[server] if (run["body"], run["connections"]) == (body, connections))
            for server in (name, BASE)
        )
        yield f"{ours:{form}} ({ours / base:.2f})"


def main() -> None:
    """Measure, print and record."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--granian-python", help="an interpreter with granian; without it only uvicorn is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=5.0, help="seconds of a run of wrk (default: 5)")
    parser.add_argument("--trial", action="store_true", help="write no record")
    chosen = parser.parse_args()
    if not is_installed():
        sys.exit("skipped: wrk is not installed (apt-get install wrk)")
    runs = measure(commands(chosen.granian_python), chosen.rounds, chosen.duration)
    if chosen.trial:
        print(table(runs))
        return
    harness.save_record("http_servers", runs)
    harness.save_table("http_servers", "HTTP servers under the same trivial batcher", table(runs))


if __name__ == "__main__":
    main()
