"""A soak: bursts, policy swaps, abandoned calls, time-outs, corrupt images and faults; then the counts must agree.

The server is benchmarks/servers/fault_injection.py. Poisson arrivals at load 0.8, with bursts of about a second at load
3. The policy is swapped every 20 s, and 30 s after a fault the next one is ordered. Two of the faults are
out-of-memory errors of the largest batch: each halves it, from 32 to 8, until larger batches are tried again. Loads
count from the capacity of batches of 8. At last the server is drained under load 0.5.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from itertools import chain, count, cycle
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import aiohttp
import numpy as np
import uvloop

from benchmarks.servers.fault_injection import order_fault
from benchmarks.support.harness import Server, argument_parser, markdown_table, running, save_record
from benchmarks.support.memory_held import BUDGET_FLAGS, bytes_held
from benchmarks.support.pixel_load import OK, offer_pixels
from benchmarks.support.processes import ResourceUsage, resource_usage
from benchmarks.support.soak_clients import CLIENT_TIMEOUT, SAMPLES, ClientCounts, SoakClients
from policies.profile import load_profile
from policies.queue import arrivals

PROFILE = "googlenet-tesla-p4-x10"
POLICIES = (
    *("greedy", "smdp:w2=16", "timeout:20", "static:6,max_wait_ms=200", "rate-matching"),
    *("max-under-deadline:slo_ms=300", "smdp:w2=4"),
)
FIRST, THEN = ("error:1", "oom", "slow:0.5", "oom", "error:3"), ("error:1", "slow:0.5", "error:3")
_RAISES = {"oom": "OutOfMemoryError", "error": "RuntimeError"}
_HALVED = 8  # largest batch after two out-of-memory errors
_CROWD = 100  # simultaneous calls that make some batch as large as possible
LOAD, BURST, CALM_S, BURST_S = 0.8, 3.0, 30.0, 1.0
_OUTCOMES = {"200": "ok", "400": "bad_input", "503": "rejected", "504": "expired", "500": "failed"}
_FILLING_S = 3.0  # s at the start in which the queue fills, so that memory reaches its maximum early
_RAISED_WITHIN = 60.0  # s in which an ordered fault is raised: some policies launch no batch that is large enough
_AGAIN_S = 10.0  # s after which a fault is ordered again: a recovery, which is not counted, may have met it
_AFTER_ERROR_S = 5.0  # s after an ordered error in which good samples may get a 500
_SAMPLE_S = 2.0
_DRAIN_LOAD, _DRAIN_POLICY = 0.5, "static:8,max_wait_ms=1000"  # calls are open at any time; faults may have left 8
_DRAIN_S, _DRAINED_AT, _EXIT_WITHIN = 6.0, 3.0, 60.0
_JUST_SENT_S = 0.05  # s before the signal, in which the server may not have read a call yet
_EARLY = 2.0  # minutes after which memory is compared
_COMPARED = 15  # samples, half a minute
_FEW, _RELEASED_S = 32, 12.0  # waiting requests that count as calm; s in which a full queue's 150 MB are released
_MORE_FILES = 3  # open files of an idle server more than before the load
_RECORDED = 10  # every tenth sample is recorded


_T = TypeVar("_T")
_Call = Callable[[], asyncio.Task[None]]  # starts one call


@dataclass(frozen=True)
class Sample:
    """The server's resource usage and queue length at an instant, s after the start."""

    at: float
    usage: ResourceUsage
    waiting: int


class Soak:
    """One run against a server.

    Attributes:
        samples: of resource usage.
        faults: instant of each order, s after the start, and the fault.
        swaps: number of swaps to each policy.
        counts: what the clients saw.
    """

    def __init__(self, server: Server, order: Path, seconds: float) -> None:
        """Run for some seconds; `order` is the file from which the device reads its faults."""
        self._server, self._order, self._seconds = server, order, seconds
        self.began = time.monotonic()
        self.samples: list[Sample] = []
        self.faults: list[tuple[float, str]] = []
        self.swaps: dict[str, int] = {}
        self.counts = ClientCounts()

    def _now(self) -> float:
        return time.monotonic() - self.began

    async def run(self) -> None:
        """Offer load, swap policies, inject faults and sample, until every call has ended."""
        timeout, connector = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            clients = SoakClients(self._server.url, session, np.random.default_rng(1))
            self.counts = clients.counts
            await clients.learn()
            self.began = time.monotonic()
            step = _pace(self._seconds / 60)
            async with asyncio.TaskGroup() as calls:  # calls outlive the tasks that start them

                def call() -> asyncio.Task[None]:
                    return calls.create_task(clients.call())

                others: list[Coroutine[Any, Any, None]] = [
                    self._swap(session, 20.0 * step),
                    self._inject(call, 30.0 * step),
                    self._sample(),
                ]
                tasks = [asyncio.create_task(other) for other in others]
                await self._offer(call)
                for task in tasks:
                    if task.done():
                        task.result()
                    task.cancel()
            order_fault(self._order, "none")

    async def _offer(self, call: _Call) -> None:
        capacity = load_profile(PROFILE).truncated(_HALVED).capacity
        rates, lengths = [LOAD * capacity / SAMPLES, BURST * capacity / SAMPLES], [CALM_S, BURST_S]
        rng = np.random.default_rng(2)
        first = arrivals.poisson(rates[1], _FILLING_S, rng)
        rest = arrivals.mmpp(rates, lengths, self._seconds - _FILLING_S, rng)
        instants = [*first.tolist(), *(_FILLING_S + rest).tolist()]
        for instant in instants:
            while (ahead := instant - self._now()) > 0:  # noqa: ASYNC110  (no event marks the instant)
                await asyncio.sleep(max(ahead, 1e-3))
            call()

    async def _swap(self, session: aiohttp.ClientSession, every: float) -> None:
        url = f"{self._server.url}/admin/models/googlenet/policy"
        for policy in cycle(POLICIES):
            await asyncio.sleep(every)
            try:
                async with session.put(url, json={"policy": policy}) as response:
                    status, text = response.status, await response.text()
            except aiohttp.ClientError as error:
                status, text = 0, str(error)
            if status != 200:
                self.counts.wrong.append(f"swap to {policy}: {status} {text[:200]}")
            self.swaps[policy] = self.swaps.get(policy, 0) + (status == 200)

    async def _inject(self, call: _Call, every: float) -> None:
        for kind in chain(FIRST, cycle(THEN)):
            await asyncio.sleep(every)
            largest = await _until_answered(largest_batch, self._server)
            fault = f"oom:{largest - 1}" if kind == "oom" else kind
            error = _RAISES.get(fault.partition(":")[0])
            before = await _until_answered(raised, self._server, error)
            ordered = self._now()
            self._order_fault(fault)
            while error and await _until_answered(raised, self._server, error) == before:
                await asyncio.wait([call() for _ in range(_CROWD)])
                if self._now() > ordered + _RAISED_WITHIN:
                    self.counts.wrong.append(f"{fault} was ordered, and no batch raised {error}")
                    break
                if self._now() > self.faults[-1][0] + _AGAIN_S:
                    self._order_fault(fault)

    def _order_fault(self, fault: str) -> None:
        order_fault(self._order, fault)
        self.faults.append((self._now(), fault))

    async def _sample(self) -> None:
        for number in count():
            await asyncio.sleep(max(0.0, number * _SAMPLE_S - self._now()))
            waiting = await _until_answered(self._server.total, "batchwright_queue_length")
            self.samples.append(Sample(self._now(), resource_usage(self._server.process.pid), round(waiting)))


async def _until_answered(query: Callable[..., _T], *arguments: Any) -> _T:
    """Query the loaded server in a thread, again after each failed connection, for at most CLIENT_TIMEOUT."""
    end = time.monotonic() + CLIENT_TIMEOUT
    while True:
        try:
            return await asyncio.to_thread(query, *arguments)
        except (OSError, HTTPException):  # TimeoutError is an OSError
            if time.monotonic() > end:
                raise


def largest_batch(server: Server) -> int:
    """The largest batch of the profile in use."""
    with urllib.request.urlopen(f"{server.url}/live/policy", timeout=10) as response:
        return int(json.load(response)["profile"]["max_batch_size"])


def raised(server: Server, error: str | None) -> float:
    """Number of batches that failed with this exception."""
    return server.by_label("batchwright_device_faults_total", "error").get(str(error), 0.0)


def outcomes(server: Server) -> dict[str, int]:
    """The server's number of requests by outcome."""
    found = server.by_label("batchwright_requests_total", "outcome")
    return {outcome: round(count) for outcome, count in found.items()}


def audit(counts: ClientCounts, counted: dict[str, int]) -> list[str]:
    """Contradictions between the server's counts and the clients'.

    An abandoned call may count under any outcome, once for each of its samples. A call of several samples whose end
    comes before its body is read counts as one request, since its number of samples is unknown.
    """
    problems, calls, samples = [], counts.left, counts.left_samples
    fewest = most = counted.get("cancelled", 0)  # requests of abandoned calls that the server counted
    for status, outcome in _OUTCOMES.items():
        here = counted.get(outcome, 0)
        least = here - counts.samples_of(status)
        greatest = here - counts.calls_of(status) if outcome in ("rejected", "expired") else least
        fewest, most = fewest + least, most + greatest
        if greatest < 0 or least > samples:
            problems.append(f"{outcome}: the server counted {least:+d} beside the clients' count; {samples} abandoned")
    if fewest > samples or most < calls:
        about = f"{calls} calls of {samples} requests"
        problems.append(f"{about} were abandoned, the server counted {fewest} to {most} requests of them")
    return problems


def _unexplained(soak: Soak) -> list[str]:
    """500s for good samples that no ordered error explains, and lost answers."""
    ordered = [soak.began + at for at, fault in soak.faults if fault.startswith("error")]
    found = []
    for sent, ended in soak.counts.failed:
        if not any(sent - _AFTER_ERROR_S <= at <= ended for at in ordered):
            found.append(f"500 for a good sample, sent at {sent - soak.began:.1f} s, and no error was ordered")
    found += [f"{error}, sent at {sent - soak.began:.1f} s" for sent, _, error in soak.counts.lost]
    return found


def _calm(samples: Sequence[Sample]) -> list[Sample]:
    """The samples before which few requests waited for a while; all samples where there are none."""
    busy = [sample.at for sample in samples if sample.waiting > _FEW]
    return [s for s in samples if not any(s.at - _RELEASED_S <= at <= s.at for at in busy)] or [*samples]


def _medians(samples: Sequence[Sample]) -> ResourceUsage:
    return ResourceUsage(
        round(median(s.usage.rss_mb for s in samples), 1),
        round(median(s.usage.files for s in samples)),
        round(median(s.usage.threads for s in samples)),
        round(median(s.usage.private_mb for s in samples), 1),
    )


def _grown(
    early: ResourceUsage,
    late: ResourceUsage,
    idle: tuple[ResourceUsage, ResourceUsage],
    tolerance: float,
) -> list[str]:
    problems = []
    for then, name in ((late, "under load"), (idle[1], "when all calls had ended")):
        if then.rss_mb / early.rss_mb - 1 > tolerance:
            problems.append(f"memory went from {early.rss_mb} to {then.rss_mb} MB {name}")
    if late.threads > early.threads + 1:
        problems.append(f"threads went from {early.threads} to {late.threads}")
    if idle[1].files > idle[0].files + _MORE_FILES:
        problems.append(f"open files of the idle server went from {idle[0].files} to {idle[1].files}")
    return problems


def _idle_usage(pid: int, files: int) -> ResourceUsage:
    """What an idle server uses, once a process that solves or predicts has ended, for which it waits at most 20 s."""
    end = time.monotonic() + 20.0
    usage = resource_usage(pid)
    while usage.files > files + _MORE_FILES and time.monotonic() < end:
        time.sleep(0.5)
        usage = resource_usage(pid)
    return usage


def drain(server: Server) -> tuple[dict[str, Any], list[str]]:
    """Send SIGTERM under load 0.5, and return what happened, and what was wrong."""
    rate = _DRAIN_LOAD * load_profile(PROFILE).capacity
    server.set_policy("googlenet", _DRAIN_POLICY)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(lambda: uvloop.run(offer_pixels(server.url, rate, _DRAIN_S)))
        time.sleep(_DRAINED_AT)
        signalled = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        calls = load.result()
    code = server.process.wait(_EXIT_WITHIN)
    accepted = [call for call in calls if call.sent < signalled - _JUST_SENT_S]
    lost = [call for call in accepted if call.outcome != OK]
    wrong = [f"drain: {call.outcome}, sent {signalled - call.sent:.3f} s before SIGTERM" for call in lost]
    if code:
        wrong.append(f"drain: the exit code was {code}")
    open_then = sum(call.ended > signalled for call in accepted)
    outcomes = dict(Counter(call.outcome for call in calls))
    return {"accepted": len(accepted), "open_at_sigterm": open_then, "outcomes": outcomes, "exit_code": code}, wrong


def _pace(minutes: float) -> float:
    """The length of all intervals relative to those of a long run: a short run has the same sequence, faster."""
    return min(1.0, minutes / 2)


def soak(minutes: float) -> dict[str, Any]:
    """Run the soak of some minutes and check it; `wrong` of the record is empty if everything is right."""
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "order"
        order_fault(order, "none")
        os.environ["DRILL_FILE"] = str(order)
        command = [sys.executable, "-m", "benchmarks.servers.fault_injection", "googlenet", "--policy", "greedy"]
        command += ["--device", f"emulated:{PROFILE}", *BUDGET_FLAGS]
        with running(*command) as server:
            before = resource_usage(server.process.pid)
            run = Soak(server, order, 60 * minutes)
            uvloop.run(run.run())
            _settle(server)
            time.sleep(_RELEASED_S * _pace(minutes))
            after = _idle_usage(server.process.pid, before.files)
            counted = outcomes(server)
            held = bytes_held(server)
            drained, wrong = drain(server)
    calm, begin = _calm(run.samples), 60.0 * min(_EARLY, minutes / 8)
    early = _medians([sample for sample in calm if sample.at >= begin][:_COMPARED] or calm)
    late = _medians(calm[-_COMPARED:])
    tolerance = 0.05 if minutes >= 5 else 2.0  # a short run ends while memory still rises to the level of its bursts
    wrong += [*run.counts.wrong, *audit(run.counts, counted), *_unexplained(run)]
    wrong += _grown(early, late, (before, after), tolerance)
    if held:
        wrong.append(f"{held} bytes were reserved when no call was open")
    return {
        "minutes": minutes,
        "calls": sum(run.counts.ends.values()),
        "ends": {f"{kind}: {status}": n for (kind, status), n in sorted(run.counts.ends.items())},
        "counted_by_the_server": counted,
        "swaps": run.swaps,
        "faults": dict(Counter(fault for _, fault in run.faults)),
        "rss_mb": {"idle before": before.rss_mb, "early": early.rss_mb, "end": late.rss_mb, "idle after": after.rss_mb},
        "private_mb": {
            "idle before": before.private_mb,
            "early": early.private_mb,
            "end": late.private_mb,
            "idle after": after.private_mb,
        },
        "files": {"idle before": before.files, "early": early.files, "end": late.files, "idle after": after.files},
        "threads": {"early": early.threads, "end": late.threads},
        "early_s": begin,
        "samples": [
            {"t_s": round(s.at, 1), "rss_mb": s.usage.rss_mb, "files": s.usage.files, "waiting": s.waiting}
            for s in run.samples[::_RECORDED]
        ],
        "bytes_held_when_idle": held,
        "drain": drained,
        "wrong": wrong[:50],
        "wrong_in_all": len(wrong),
    }


def _settle(server: Server) -> None:
    """Wait, at most 10 s, until the counts no longer change and the queue is empty."""
    end, before = time.monotonic() + 10.0, -1.0
    while time.monotonic() < end:
        now = sum(outcomes(server).values())
        if now == before and not server.total("batchwright_queue_length"):
            return
        before = now
        time.sleep(1.0)


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    calls = markdown_table(
        ("calls", "ended with", "how many"), ((*key.split(": "), n) for key, n in record["ends"].items())
    )
    lines = [
        f"The server counted {record['counted_by_the_server']}.",
        f"{record['swaps']} swaps, {record['faults']} faults.",
        f"Drain: {record['drain']}.",
        f"Memory {record['rss_mb']} MB, private {record['private_mb']} MB.",
        f"Files {record['files']}, threads {record['threads']}.",
        f"Wrong: {record['wrong_in_all']}",
    ]
    return "\n".join([calls, "", *lines, *record["wrong"]]) + "\n"


def main() -> None:
    """Soak, print and record; exit code 1 if anything was wrong."""
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--record", default="soak", help="name of the record (default: %(default)s)")
    chosen = parser.parse_args()
    record = soak(chosen.minutes)
    save_record(chosen.record, record)
    print(table(record))
    raise SystemExit(1 if record["wrong_in_all"] else 0)


if __name__ == "__main__":
    main()
