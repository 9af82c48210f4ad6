"""A soak: bursts, swaps of policy, clients that leave, deadlines, rubbish and faults; then the books must agree.

The server is benchmarks/drill.py: the real process on an emulated device that fails on command. Poisson arrivals at
load 0.8 with bursts of about a second at load 3, another policy every 20 s, another fault 30 s after the last one came.
Twice the memory is too small for the largest batch, which halves it: from 32 to 8, until larger ones are tried again.
Loads are of what 8 carry.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import aiohttp
import numpy as np
import uvloop

from benchmarks.drill import give
from benchmarks.processes import Held, held
from benchmarks.serving import Server, running, save
from benchmarks.soak_calls import GIVE_UP, SAMPLES, Books, Callers
from policies.profile import load_profile
from policies.queue import arrivals

PROFILE = "googlenet-tesla-p4-x10"
POLICIES = (
    *("greedy", "smdp:w2=16", "timeout:20", "static:6,max_wait_ms=200", "rate-matching"),
    *("max-under-deadline:slo_ms=300", "smdp:w2=4"),
)
FIRST, THEN = ("error:1", "oom", "slow:0.5", "oom", "error:3"), ("error:1", "slow:0.5", "error:3")
_RAISES = {"oom": "OutOfMemoryError", "error": "RuntimeError"}
_LEFT = 8  # the largest batch once two did not fit
_CROWD = 100  # calls at once, so that some batch is as large as it can be
LOAD, BURST, CALM_S, BURST_S = 0.8, 3.0, 30.0, 1.0
_OUTCOMES = {"200": "ok", "400": "bad_input", "503": "rejected", "504": "expired", "500": "failed"}
_FILLING_S = 3.0
_HEEDED_S = 60.0  # s in which an ordered fault comes: some policies launch no batch that is large enough
_AGAIN_S = 10.0  # s after which it is ordered again: an attempt to recover another batch may have met it, uncounted
_AFTERMATH = 5.0  # s after an ordered error in which its 500s must be over
_SAMPLE_S = 2.0
_EARLY = 2.0  # minutes, after which the memory is what it is compared with
_COMPARED = 15  # samples, half a minute
_FEW, _CALM_S = 32, 12.0  # a full queue alone holds 150 MB; ten seconds later the system has got back what lies free
_RECORDED = 10  # every so many samples one is kept


_T = TypeVar("_T")
_Call = Callable[[], asyncio.Task[None]]  # makes one


@dataclass(frozen=True)
class Sample:
    """What the server held at an instant, s after the start, and how many requests waited then."""

    at: float
    held: Held
    waiting: int


class Soak:
    """One run against a server."""

    def __init__(self, server: Server, order: Path, seconds: float) -> None:
        """`order` is the file of which the device takes its orders."""
        self._server, self._order, self._seconds = server, order, seconds
        self._began = time.monotonic()
        self.samples: list[Sample] = []
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
            async with asyncio.TaskGroup() as calls:  # they outlive whoever made them

                def call() -> asyncio.Task[None]:
                    return calls.create_task(callers.call(self._now()))

                others = [self._swap(session, 20.0 * step), self._break(call, 30.0 * step), self._watch()]
                tasks = [asyncio.create_task(other) for other in others]
                await self._offer(call)
                for task in tasks:
                    if task.done():
                        task.result()
                    task.cancel()
            give(self._order, "none")

    async def _offer(self, call: _Call) -> None:
        capacity = load_profile(PROFILE).truncated(_LEFT).capacity
        rates, lengths = [LOAD * capacity / SAMPLES, BURST * capacity / SAMPLES], [CALM_S, BURST_S]
        rng = np.random.default_rng(2)
        # fills the queue, so that memory has seen the most it holds
        first = arrivals.poisson(rates[1], _FILLING_S, rng)
        rest = arrivals.mmpp(rates, lengths, self._seconds - _FILLING_S, rng)
        instants = [*first.tolist(), *(_FILLING_S + rest).tolist()]
        for instant in instants:
            while (ahead := instant - self._now()) > 0:  # noqa: ASYNC110  (time passes of itself)
                await asyncio.sleep(max(ahead, 1e-3))
            call()

    async def _swap(self, session: aiohttp.ClientSession, every: float) -> None:
        url = f"{self._server.url}/admin/models/googlenet/policy"
        for policy in cycle(POLICIES):
            await asyncio.sleep(every)
            async with session.put(url, json={"policy": policy}) as response:
                if response.status != 200:
                    self.books.wrong.append(f"swap to {policy}: {response.status} {(await response.text())[:200]}")
            self.swaps[policy] = self.swaps.get(policy, 0) + 1

    async def _break(self, call: _Call, every: float) -> None:
        for kind in chain(FIRST, cycle(THEN)):
            await asyncio.sleep(every)
            largest = await _told(largest_batch, self._server)
            fault = f"oom:{largest - 1}" if kind == "oom" else kind
            error = _RAISES.get(fault.partition(":")[0])
            before = await _told(raised, self._server, error)
            ordered = self._now()
            self._give(fault)
            while error and await _told(raised, self._server, error) == before:
                await asyncio.wait([call() for _ in range(_CROWD)])
                if self._now() > ordered + _HEEDED_S:
                    self.books.wrong.append(f"{fault} was ordered, and no batch raised {error}")
                    break
                if self._now() > self.faults[-1][0] + _AGAIN_S:
                    self._give(fault)

    def _give(self, fault: str) -> None:
        give(self._order, fault)
        self.faults.append((self._now(), fault))

    async def _watch(self) -> None:
        for number in count():
            await asyncio.sleep(max(0.0, number * _SAMPLE_S - self._now()))
            waiting = await _told(self._server.metric, "batchwright_queue_length")
            self.samples.append(Sample(self._now(), held(self._server.process.pid), round(sum(waiting.values()))))


async def _told(ask: Callable[..., _T], *arguments: Any) -> _T:
    """What the server tells beside its load, with the patience that callers have."""
    end = time.monotonic() + GIVE_UP
    while True:
        try:
            return await asyncio.to_thread(ask, *arguments)
        except OSError:  # TimeoutError is one
            if time.monotonic() > end:
                raise


def largest_batch(server: Server) -> int:
    """How many requests a batch may hold by the profile that decides now."""
    with urllib.request.urlopen(f"{server.url}/live/policy", timeout=10) as response:
        return int(json.load(response)["profile"]["max_batch_size"])


def raised(server: Server, error: str | None) -> float:
    """How many batches the device has failed on with this exception."""
    found = server.metric("batchwright_device_faults_total")
    return sum(value for labels, value in found.items() if f'error="{error}"' in labels)


def outcomes(server: Server) -> dict[str, int]:
    """What the server counted, by outcome."""
    found = server.metric("batchwright_requests_total")
    return {labels.split('outcome="')[1].split('"')[0]: round(value) for labels, value in found.items()}


def audit(books: Books, counted: dict[str, int]) -> list[str]:
    """Where the server's counts contradict the callers': leavers alone may stand under any outcome, each once.

    A call of several samples that is refused before its body is read counts as one, as nobody knows better.
    """
    problems, left = [], books.left
    fewest = most = counted.get("cancelled", 0)  # leavers' calls that are in the server's books
    for status, outcome in _OUTCOMES.items():
        here = counted.get(outcome, 0)
        least = here - books.samples_of(status)
        greatest = here - books.calls_of(status) if outcome == "rejected" else least
        fewest, most = fewest + least, most + greatest
        if greatest < 0 or least > left:
            problems.append(f"{outcome}: the server counted {least:+d} beside what clients saw; {left} left")
    if not fewest <= left <= most:
        problems.append(f"{left} clients left, {fewest} to {most} of their calls are in the books")
    return problems


def _unexplained(soak: Soak) -> list[str]:
    """500s of good samples long after an ordered error."""
    ordered = [at for at, fault in soak.faults if fault.startswith("error")]
    late = [
        at for at in soak.books.failed_at if not any(0 <= at - o <= _AFTERMATH or -2 <= at - o < 0 for o in ordered)
    ]
    return [f"500 for a good sample at {at:.1f} s, no error was ordered" for at in late]


def _calm(samples: Sequence[Sample]) -> list[Sample]:
    """Those before which few waited for a while; all, if there are none."""
    busy = [sample.at for sample in samples if sample.waiting > _FEW]
    return [s for s in samples if not any(s.at - _CALM_S <= at <= s.at for at in busy)] or [*samples]


def _medians(samples: Sequence[Sample]) -> Held:
    return Held(
        round(median(s.held.rss_mb for s in samples), 1),
        round(median(s.held.files for s in samples)),
        round(median(s.held.threads for s in samples)),
    )


def _grown(early: Held, late: Held, idle: tuple[Held, Held], tolerance: float) -> list[str]:
    problems = []
    for then, name in ((late, "under load"), (idle[1], "when all was over")):
        if then.rss_mb / early.rss_mb - 1 > tolerance:
            problems.append(f"memory went from {early.rss_mb} to {then.rss_mb} MB {name}")
    if late.threads > early.threads + 1:
        problems.append(f"threads went from {early.threads} to {late.threads}")
    if idle[1].files > idle[0].files + 3:
        problems.append(f"open files of the idle server went from {idle[0].files} to {idle[1].files}")
    return problems


def soak(minutes: float) -> dict[str, Any]:
    """Run it and judge it; `wrong` of the record is empty when all is well."""
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "order"
        give(order, "none")
        os.environ["DRILL_FILE"] = str(order)
        command = (sys.executable, "-m", "benchmarks.drill", "googlenet", "--device", f"emulated:{PROFILE}")
        with running(*command, "--policy", "greedy") as server:
            before = held(server.process.pid)
            run = Soak(server, order, 60 * minutes)
            uvloop.run(run.run())
            _settle(server)
            time.sleep(_CALM_S)
            after = held(server.process.pid)
            counted = outcomes(server)
    long = minutes >= 5
    calm, begin = _calm(run.samples), 60.0 * min(_EARLY, minutes / 8)
    early = _medians([sample for sample in calm if sample.at >= begin][:_COMPARED] or calm)
    late = _medians(calm[-_COMPARED:])
    wrong = [*run.books.wrong, *audit(run.books, counted), *_unexplained(run)]
    wrong += _grown(
        early, late, (before, after), 0.05 if long else 0.5
    )  # a short run ends while memory still rises to its level
    return {
        "minutes": minutes,
        "calls": sum(run.books.ends.values()),
        "ends": {f"{kind}: {status}": n for (kind, status), n in sorted(run.books.ends.items())},
        "counted_by_the_server": counted,
        "swaps": run.swaps,
        "faults": dict(Counter(fault for _, fault in run.faults)),
        "rss_mb": {"idle before": before.rss_mb, "early": early.rss_mb, "end": late.rss_mb, "idle after": after.rss_mb},
        "files": {"idle before": before.files, "early": early.files, "end": late.files, "idle after": after.files},
        "threads": {"early": early.threads, "end": late.threads},
        "early_s": begin,
        "samples": [
            {"t_s": round(s.at, 1), "rss_mb": s.held.rss_mb, "files": s.held.files, "waiting": s.waiting}
            for s in run.samples[::_RECORDED]
        ],
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
