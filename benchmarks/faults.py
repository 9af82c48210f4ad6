"""Deaths and hangs of a model's process under load 0.5: what its clients see, and those of a model beside it.

The model is a Python class on the CPU. The model beside it is on another device, an emulated one of another server. A
fault is a signal to the process, or an input on which the model fails: that input's call has to get a 500, and every
other call its own answer.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import uvloop

from benchmarks.servers.failing_model import EACH, FAULTS, FIXED, LARGEST
from benchmarks.support.harness import ROOT, Server, argument_parser, markdown_table, save_record, save_table, serving
from policies.profile import load_profile
from policies.queue import arrivals

_PROFILE = "googlenet-tesla-p4-x10"
_LOAD = 0.5
_PAUSE = 5.0  # s between two faults, in which the queue is empty again
_BEFORE = 10.0  # s of load without faults
_TIMEOUT = 1.0  # s of a batch, after which it hangs
_KILL = "SIGKILL"
_PIXELS = bytes(range(1, 225)) * (224 * 3)
_RAW = {"Inference-Header-Content-Length": "0"}


@dataclass
class _Calls:
    """Calls of one model.

    Attributes:
        ends: number by status, or "wrong" for another call's answer, or "lost" for none.
        answered: sending and answer of each right one, s of time.monotonic.
    """

    ends: Counter[str] = field(default_factory=Counter)
    answered: list[tuple[float, float]] = field(default_factory=list)

    def p99(self, begin: float, end: float) -> float:
        """The 99th percentile of the response times of calls sent in an interval, ms."""
        return round(1e3 * float(np.quantile([end - sent for sent, end in self._sent(begin, end)], 0.99)), 1)

    def _sent(self, begin: float, end: float) -> list[tuple[float, float]]:
        return [call for call in self.answered if begin <= call[0] < end]

    def first_answer(self, after: float) -> float:
        """Time from an instant to the first answer of a call that was sent after it, s."""
        return min(answered for sent, answered in self.answered if sent >= after) - after


class _Run:
    """Open loops of calls of both models, and the faults meanwhile."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self._server, self._session = server, session
        self._rng = np.random.default_rng(7)
        self.failing, self.beside = _Calls(), _Calls()

    async def loads(self, seconds: float) -> None:
        """Offer both loads for some time."""
        capacity = LARGEST / (FIXED + LARGEST * EACH)
        other = load_profile(_PROFILE).capacity
        await asyncio.gather(
            self._offer(_LOAD * capacity, seconds, self._call_failing),
            self._offer(_LOAD * other, seconds, self._call_beside),
        )

    async def _offer(self, rate: float, seconds: float, call: Any) -> None:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number, instant in enumerate(arrivals.poisson(rate, seconds, self._rng).tolist()):
                await asyncio.sleep(max(0.0, began + instant - time.monotonic()))
                tasks.create_task(call(number % 1000))

    async def _call_failing(self, number: int) -> None:
        await self._call(self.failing, "/predict/failing", {"json": {"inputs": {"x": [number]}}}, 2 * number)

    async def _call_beside(self, _: int) -> None:
        await self._call(self.beside, "/v2/models/beside/infer", {"data": _PIXELS, "headers": _RAW}, None)

    async def _call(self, calls: _Calls, path: str, sent: dict[str, Any], right: float | None) -> None:
        began = time.monotonic()
        try:
            async with self._session.post(path, **sent) as response:
                await response.read()
                status = str(response.status)
                if status == "200" and right is not None and (await response.json())["outputs"]["y"] != [right]:
                    status = "wrong"
        except (aiohttp.ClientError, OSError):
            status = "lost"
        calls.ends[status] += 1
        if status == "200":
            calls.answered.append((began, time.monotonic()))

    async def worker(self) -> dict[str, Any]:
        """Facts of the process of the model that fails."""
        async with self._session.get("/admin/devices") as response:
            devices = await response.json()
        found: dict[str, Any] = next(device["models"]["failing"] for device in devices if "failing" in device["models"])
        return found

    async def fault(self, fault: int) -> str:
        """Cause a fault, and return the status of its call; 0 is a signal."""
        if fault:
            async with self._session.post("/predict/failing", json={"inputs": {"x": [fault]}}) as response:
                return str(response.status)
        os.kill((await self.worker())["pid"], signal.SIGKILL)
        return ""


async def _measure(server: Server, fault: int, times: int) -> dict[str, Any]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as session:
        run = _Run(server, session)
        load = asyncio.create_task(run.loads(_BEFORE + times * _PAUSE + 3.0))
        began = time.monotonic()
        await asyncio.sleep(_BEFORE)
        faults, poisonous = list[float](), list[asyncio.Task[str]]()
        restarts = (await run.worker())["restarts"]
        for number in range(times):
            faults.append(time.monotonic())
            poisonous.append(asyncio.create_task(run.fault(fault)))
            await asyncio.sleep(max(0.0, began + _BEFORE + (number + 1) * _PAUSE - time.monotonic()))
        statuses = Counter(await asyncio.gather(*poisonous))
        end = time.monotonic()
        await load
        after = await run.worker()
    first = sorted(run.failing.first_answer(at) for at in faults)
    return {
        "faults": times,
        "poisonous": dict(statuses) if fault else {},
        "others": dict(run.failing.ends),
        "first_answer_s": {"median": round(first[len(first) // 2], 3), "longest": round(first[-1], 3)},
        "restarts": after["restarts"] - restarts,
        "last_fault": after["last_fault"],
        "beside": dict(run.beside.ends),
        "beside_p99_ms": {
            "before": run.beside.p99(began + 1.0, began + _BEFORE),
            "meanwhile": run.beside.p99(began + _BEFORE, end),
        },
        "main_process_is_the_same": server.process.poll() is None,
    }


def measure(times: int) -> dict[str, Any]:
    """Each fault `times` times, on a server of its own."""
    record = dict[str, Any]()
    file = ROOT / "benchmarks" / "servers" / "failing_model.py"
    for fault, name in {0: _KILL, **FAULTS}.items():
        with serving("googlenet", "--device", f"emulated:{_PROFILE}", "--policy", "greedy") as upstream:
            port = urlsplit(upstream.url).port
            models = f"failing={file}:Failing", f"beside=oip:http://127.0.0.1:{port}/googlenet"
            flags = (
                "--device",
                "cpu",
                "--policy",
                "greedy",
                "--hung-after-s",
                str(_TIMEOUT),
                "--max-batch-size",
                str(LARGEST),
            )
            with serving(*models, *flags) as server:
                record[name] = uvloop.run(_measure(server, fault, times))
        print(name, record[name], flush=True)
    return record


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    head = (
        *("fault", "times", "its own calls", "all others", "first answer after, s: median, longest", "restarts"),
        *("beside: calls", "beside: p99 before, meanwhile, ms"),
    )
    rows = [
        (
            *(name, each["faults"], _counts(each["poisonous"]), _counts(each["others"])),
            "{median}, {longest}".format(**each["first_answer_s"]),
            *(each["restarts"], _counts(each["beside"])),
            "{before}, {meanwhile}".format(**each["beside_p99_ms"]),
        )
        for name, each in record.items()
    ]
    return markdown_table(head, rows)


def _counts(ends: dict[str, int]) -> str:
    return ", ".join(f"{count} x {end}" for end, count in sorted(ends.items())) or "none"


def main() -> None:
    """Measure, print and record; exit code 1 if a call was lost, or had a wrong answer."""
    parser = argument_parser(__doc__)
    parser.add_argument("--times", type=int, default=20)
    chosen = parser.parse_args()
    record = measure(chosen.times)
    save_record("faults", record)
    save_table("faults", "Faults of a model's process", table(record))
    wrong = [
        name
        for name, each in record.items()
        if {*each["others"], *each["beside"]} != {"200"} or {*each["poisonous"]} - {"500"}
    ]
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
