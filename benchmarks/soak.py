"""A soak: bursts, swaps of policy, clients that leave, deadlines, rubbish and faults; then the books must agree.

The server is benchmarks/drill.py: the real process on an emulated device that fails on command. Poisson arrivals at
load 0.8 with bursts of about a second at load 3, another policy every 20 s, another fault every 30 s.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import uvloop

from benchmarks.processes import Held, held
from benchmarks.serving import Server, running, save
from benchmarks.soak_calls import GIVE_UP, Books, Callers
from policies.profile import load_profile
from policies.queue import arrivals

PROFILE = "googlenet-tesla-p4-x10"
POLICIES = (
    *("greedy", "smdp:w2=16", "timeout:20", "static:12,max_wait_ms=200", "rate-matching"),
    *("max-under-deadline:slo_ms=300", "smdp:w2=4"),
)
FAULTS = ("error:1", "slow:0.5", "oom:31", "error:3", "none")
_LEFT = 16  # the largest batch once one of 32 did not fit; loads are of what it can carry
LOAD, BURST, CALM_S, BURST_S = 0.8, 3.0, 30.0, 1.0
_OUTCOMES = {"200": "ok", "400": "bad_input", "503": "rejected", "504": "expired", "500": "failed"}
_FILLING_S = 3.0
_AFTERMATH = 5.0  # s after an ordered error in which its 500s must be over
_SAMPLE_S = 2.0


class Soak:
    """One run against a server."""

    def __init__(self, server: Server, order: Path, seconds: float) -> None:
        """`order` is the file of which the device takes its orders."""
        self._server, self._order, self._seconds = server, order, seconds
        self._began = time.monotonic()
        self.samples: list[tuple[float, Held]] = []
        self.faults: list[tuple[float, str]] = []
        self.swaps: dict[str, int] = {}
        self.books = Books()

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> None:
        """Load, disturb, watch; returns when every call is over."""
        timeout, connector = aiohttp.ClientTimeout(total=GIVE_UP), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            callers = Callers(self._server.url, session, np.random.default_rng(1))
            self.books = callers.books
            await callers.learn()
            self._began = time.monotonic()
            step = min(1.0, self._seconds / 120)  # the short form goes through all of it, faster
            others = [self._swap(session, 20.0 * step), self._break(30.0 * step), self._watch()]
            tasks = [asyncio.create_task(other) for other in others]
            await self._offer(callers)
            self._order.write_text("none")
            for task in tasks:
                if task.done():
                    task.result()
                task.cancel()

    async def _offer(self, callers: Callers) -> None:
        capacity = load_profile(PROFILE).truncated(_LEFT).capacity
        rates, lengths = [LOAD * capacity, BURST * capacity], [CALM_S, BURST_S]
        rng = np.random.default_rng(2)
        first = arrivals.poisson(
            rates[1], _FILLING_S, rng
        )  # fills the queue, so that memory has seen the most it holds
        rest = arrivals.mmpp(rates, lengths, self._seconds - _FILLING_S, rng)
        instants = [*first.tolist(), *(_FILLING_S + rest).tolist()]
        async with asyncio.TaskGroup() as calls:
            for instant in instants:
                while (ahead := instant - self._now()) > 0:  # noqa: ASYNC110  (time passes of itself)
                    await asyncio.sleep(max(ahead, 1e-3))
                calls.create_task(callers.call(self._now()))

    async def _swap(self, session: aiohttp.ClientSession, every: float) -> None:
        url = f"{self._server.url}/admin/models/googlenet/policy"
        for policy in cycle(POLICIES):
            await asyncio.sleep(every)
            async with session.put(url, json={"policy": policy}) as response:
                if response.status != 200:
                    self.books.wrong.append(f"swap to {policy}: {response.status} {(await response.text())[:200]}")
            self.swaps[policy] = self.swaps.get(policy, 0) + 1

    async def _break(self, every: float) -> None:
        for fault in cycle(FAULTS):
            await asyncio.sleep(every)
            self._order.write_text(fault)
            self.faults.append((self._now(), fault))

    async def _watch(self) -> None:
        for number in count():
            await asyncio.sleep(max(0.0, number * _SAMPLE_S - self._now()))
            self.samples.append((self._now(), held(self._server.process.pid)))


def outcomes(server: Server) -> dict[str, int]:
    """What the server counted, by outcome."""
    found = server.metric("batchwright_requests_total")
    return {labels.split('outcome="')[1].split('"')[0]: round(value) for labels, value in found.items()}


def audit(books: Books, counted: dict[str, int]) -> list[str]:
    """Where the server's counts contradict the callers': leavers alone may stand under any outcome, each once."""
    left = sum(n for (kind, _), n in books.ends.items() if kind == "leaver")
    problems = []
    spare = 0
    for status, outcome in _OUTCOMES.items():
        more = counted.get(outcome, 0) - books.of(status)
        spare += more
        if not 0 <= more <= left:
            problems.append(f"{outcome}: the server counted {more:+d} beside what clients saw; {left} left")
    spare += counted.get("cancelled", 0)
    if spare != left:
        problems.append(f"{left} clients left, {spare} of their calls are in the books")
    return problems


def _unexplained(soak: Soak) -> list[str]:
    """500s of good samples long after an ordered error."""
    ordered = [at for at, fault in soak.faults if fault.startswith("error")]
    late = [
        at for at in soak.books.failed_at if not any(0 <= at - o <= _AFTERMATH or -2 <= at - o < 0 for o in ordered)
    ]
    return [f"500 for a good sample at {at:.1f} s, no error was ordered" for at in late]


def _around(samples: Sequence[tuple[float, Held]], at: float) -> Held:
    near = [h for _, h in sorted(samples, key=lambda s: abs(s[0] - at))[:5]]
    return Held(
        median(h.rss_mb for h in near), round(median(h.files for h in near)), round(median(h.threads for h in near))
    )


def _grown(early: Held, late: Held, idle: tuple[Held, Held], tolerance: float) -> list[str]:
    problems = []
    if late.rss_mb / early.rss_mb - 1 > tolerance:
        problems.append(f"memory went from {early.rss_mb} to {late.rss_mb} MB")
    if late.threads > early.threads + 1:
        problems.append(f"threads went from {early.threads} to {late.threads}")
    if idle[1].files > idle[0].files + 3:
        problems.append(f"open files of the idle server went from {idle[0].files} to {idle[1].files}")
    return problems


def soak(minutes: float) -> dict[str, Any]:
    """Run it and judge it; `wrong` of the record is empty when all is well."""
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "order"
        order.write_text("none")
        os.environ["DRILL_FILE"] = str(order)
        command = (sys.executable, "-m", "benchmarks.drill", "googlenet", "--device", f"emulated:{PROFILE}")
        with running(*command, "--policy", "greedy") as server:
            before = held(server.process.pid)
            run = Soak(server, order, 60 * minutes)
            uvloop.run(run.run())
            _settle(server)
            after = held(server.process.pid)
            counted = outcomes(server)
    long = minutes >= 5
    early = _around(run.samples, 120.0 if long else 30.0 * minutes)
    late = _around(run.samples, 60 * minutes)
    wrong = [*run.books.wrong, *audit(run.books, counted), *_unexplained(run)]
    wrong += _grown(early, late, (before, after), 0.05 if long else 0.25)
    return {
        "minutes": minutes,
        "calls": sum(run.books.ends.values()),
        "ends": {f"{kind}: {status}": n for (kind, status), n in sorted(run.books.ends.items())},
        "counted_by_the_server": counted,
        "swaps": run.swaps,
        "faults": len(run.faults),
        "rss_mb": {"idle before": before.rss_mb, "early": early.rss_mb, "end": late.rss_mb, "idle after": after.rss_mb},
        "files": {"idle before": before.files, "early": early.files, "end": late.files, "idle after": after.files},
        "threads": {"early": early.threads, "end": late.threads},
        "wrong": wrong[:50],
        "wrong_in_all": len(wrong),
    }


def _settle(server: Server) -> None:
    """Wait until the last leaver's connection is noticed and nobody waits."""
    end, before = time.monotonic() + 10.0, -1.0
    while time.monotonic() < end:
        now = sum(outcomes(server).values())
        if now == before and not any(server.metric("batchwright_queue_length").values()):
            return
        before = now
        time.sleep(1.0)


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = ["| calls | ended with | how many |", "|---|---|---|"]
    lines += [f"| {key.replace(': ', ' | ')} | {n} |" for key, n in record["ends"].items()]
    lines += [
        "",
        f"The server counted {record['counted_by_the_server']}; {record['swaps']} swaps, {record['faults']} faults.",
    ]
    lines += [f"Memory {record['rss_mb']} MB, files {record['files']}, threads {record['threads']}."]
    return "\n".join([*lines, f"Wrong: {record['wrong_in_all']}", *record["wrong"]]) + "\n"


def main() -> None:
    """Soak, print and record; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--record", default="soak", help="name of the record")
    chosen = parser.parse_args()
    record = soak(chosen.minutes)
    save(chosen.record, record)
    print(table(record))
    raise SystemExit(1 if record["wrong_in_all"] else 0)


if __name__ == "__main__":
    main()
