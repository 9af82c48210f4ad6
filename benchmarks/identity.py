"""Checks that every request gets its own answer.

- A network on the CPU: different images at once, compared with the answers for each alone. While they are served the
  policy is swapped at random, so that batch sizes vary, and corrupt images are sent among them. Then the same while
  the model's process is killed again and again.
- Calls of every kind (benchmarks/support/mixed_calls.py) to two models of an emulated device, while policies are
  swapped and one of the models is loaded again and again. Some have a short time-out, and some clients close the
  connection at a random time. At the end nothing may be left: no waiting request, no byte of the memory budget.
  The server's counts must be those of the clients. They may differ by the calls that a client abandoned, since the
  server may have answered these; by the samples of a call whose end came before the server knew their number; by no
  more.
- The same for one model of named tensors in a process of its own, on the CPU. That process is killed again and again.
"""

import asyncio
import io
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop

from benchmarks.soak import audit, outcomes
from benchmarks.support.harness import (
    Server,
    argument_parser,
    load_record,
    save_record,
    serving,
    synthetic_image,
    wait_until,
)
from benchmarks.support.memory_held import BUDGET_FLAGS, bytes_held
from benchmarks.support.mixed_calls import FEATURES, IMAGES, TENSORS, MixedCall, MixedCalls
from benchmarks.support.soak_clients import CLIENT_TIMEOUT, ClientCounts, abandon

_RAW = {"Inference-Header-Content-Length": "0"}
_AT_ONCE = 400  # images
_PROFILE = "googlenet-tesla-p4"
_CLIENTS = 64
_POLICIES = ("greedy", "timeout:5", "static:6,max_wait_ms=20", "rate-matching", "serial", "static:32,max_wait_ms=10")
_SWAP_S, _RELOAD_S, _KILL_S = 0.3, 1.0, 2.0  # a process has to be loaded before the next one is killed
_ABANDONED, _HURRIED, _CORRUPT = 0.08, 0.1, 0.02  # shares of all calls
_TIMEOUT_S = (0.001, 0.1)
_DELAYS = (0.0, 0.05)  # s until a client closes the connection


@dataclass(frozen=True)
class Outcome:
    """The comparison's result.

    Attributes:
        pictures: good images, 400 of them at once.
        corrupt: corrupt images sent among them.
        refused: corrupt images that were answered 400.
        others: good images that were not answered 200.
        error: largest difference of a logit from the answer for the image alone, over the largest logit.
        difference: smallest difference between two neighbouring images' answers, scaled likewise.
        batch_sizes: number of different batch sizes.
        kills: number of times that the model's process was killed.
    """

    pictures: int
    corrupt: int
    refused: int
    others: int
    error: float
    difference: float
    batch_sizes: int
    kills: int

    @property
    def is_wrong(self) -> bool:
        """Whether an image had no answer or another image's, or a corrupt one was not refused."""
        return bool(self.others or self.refused < self.corrupt or self.error > self.difference / 10)


async def _infer(session: aiohttp.ClientSession, url: str, image: bytes) -> tuple[int, bytes]:
    async with session.post(url, data=image, headers=_RAW) as response:
        body = await response.read()
        length = response.headers.get("Inference-Header-Content-Length")
        return response.status, body if length is None else body[int(length) :]


async def _swap(session: aiohttp.ClientSession, url: str, rng: np.random.Generator) -> None:
    while True:
        change = {"policy": f"static:{rng.integers(1, 33)},max_wait_ms=100"}
        async with session.put(url, json=change) as response:
            response.raise_for_status()
        await asyncio.sleep(0.2)


async def _kill_process(session: aiohttp.ClientSession, base: str, model: str) -> bool:
    """Kill the process of a model on the server's one device; return whether it ran."""
    async with session.get(f"{base}/admin/devices") as response:
        (device,) = await response.json()
    try:
        os.kill(device["models"][model]["pid"], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


async def _kill_when_ready(session: aiohttp.ClientSession, base: str, model: str, kills: list[str]) -> None:
    """Kill the model's process a random time after it is ready, again and again, and note each kill."""
    rng = np.random.default_rng(5)
    while True:
        async with session.get(f"{base}/v2/health/ready") as response:
            ready = response.status == 200
        await asyncio.sleep(rng.uniform(0.2, _KILL_S) if ready else 0.2)
        if ready and await _kill_process(session, base, model):
            kills.append(model)
            await asyncio.sleep(0.5)  # until the server has seen it


async def _compare(base: str, model: str, images: list[bytes], corrupt: int, kills: bool) -> Outcome:
    infer, policy = f"{base}/v2/models/{model}/infer", f"{base}/admin/models/{model}/policy"
    rng = np.random.default_rng(2)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        alone = np.array([np.frombuffer((await _infer(session, infer, p))[1], np.float32) for p in images])
        killed: list[str] = []
        disturbing = [asyncio.create_task(_swap(session, policy, rng))]
        if kills:
            disturbing.append(asyncio.create_task(_kill_when_ready(session, base, model, killed)))
        sent = [*((n, p) for n, p in enumerate(images)), *((-1, p[: len(p) // 2]) for p in images[:corrupt])]
        shuffled = [sent[i] for i in rng.permutation(len(sent))]
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def answer(image: bytes) -> tuple[int, bytes]:
            async with at_once:
                return await _infer(session, infer, image)

        answers = await asyncio.gather(*(answer(image) for _, image in shuffled))
        for task in disturbing:
            if task.done():
                task.result()  # without swaps the batch sizes would not vary
            task.cancel()
        async with session.get(f"{base}/v2/models/{model}/stats") as response:
            stats = (await response.json())["model_stats"][0]
    good = [(n, body) for (n, _), (status, body) in zip(shuffled, answers, strict=True) if n >= 0 and status == 200]
    largest = np.abs(alone).max()
    errors = [np.abs(np.frombuffer(body, np.float32) - alone[n]).max() for n, body in good]
    return Outcome(
        pictures=len(images),
        corrupt=corrupt,
        refused=sum(n < 0 and status == 400 for (n, _), (status, _) in zip(shuffled, answers, strict=True)),
        others=len(images) - len(good),
        error=float(max(errors) / largest),
        difference=float(np.abs(alone - np.roll(alone, 1, axis=0)).max(axis=1).min() / largest),
        batch_sizes=len(stats["batch_stats"]),
        kills=len(killed),
    )


def check(model: str, images: int, corrupt: int, *arguments: str, kills: bool = False) -> Outcome:
    """Serve `model` on the CPU and compare, with `kills` while its process is killed again and again."""
    flags = ["--device", "cpu", "--weights", "random", "--queue-capacity", "4096", "--policy", "greedy", *arguments]
    rng = np.random.default_rng(1)
    with serving(model, *flags) as server:
        drawn = [synthetic_image(rng, 6, 256, "PNG", compress_level=1) for _ in range(images)]
        return asyncio.run(_compare(server.url, model, drawn, corrupt, kills))


class _MixedRun:
    """One run of calls of every kind.

    Attributes:
        counts: what the clients saw.
        swaps: number of policies that were swapped.
        loads: number of times that a model was loaded again.
        kills: number of processes that were killed.
        killed_loads: number of loads that failed because their process was killed.
        seconds: time until the last call ended.
    """

    def __init__(self, server: Server, calls: int, folder: Path, kills: bool) -> None:
        self.counts = ClientCounts()
        self.swaps = self.loads = self.kills = self.killed_loads = 0
        self.seconds = 0.0
        self._server = server
        self._left = calls
        self._kills = kills
        self._models = [IMAGES, TENSORS] if not kills else [TENSORS]
        self._drawn = MixedCalls(folder / FEATURES.name, np.random.default_rng(3), kills)
        self._rng = np.random.default_rng(4)

    async def run(self) -> None:
        """Make all calls, swap policies and load the tensor model again."""
        began = time.monotonic()
        timeout, connector = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT), aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(self._server.url, timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._swap(session))
            tasks.create_task(self._reload(session))
            if self._kills:
                tasks.create_task(self._kill(session))
            await asyncio.gather(*[tasks.create_task(self._call(session)) for _ in range(_CLIENTS)])
            self.seconds = time.monotonic() - began

    async def _swap(self, session: aiohttp.ClientSession) -> None:
        policies = cycle(_POLICIES)
        while self._left > 0:
            path = f"/admin/models/{self._models[self.swaps % len(self._models)]}/policy"
            await self._order(session.put(path, json={"policy": next(policies)}))
            self.swaps += 1
            await asyncio.sleep(_SWAP_S)

    async def _reload(self, session: aiohttp.ClientSession) -> None:
        while self._left > 0:
            await self._order(session.post(f"/v2/repository/models/{TENSORS}/load"))
            self.loads += 1
            await asyncio.sleep(_RELOAD_S)

    async def _kill(self, session: aiohttp.ClientSession) -> None:
        while self._left > 0:
            await asyncio.sleep(_KILL_S)
            self.kills += await _kill_process(session, self._server.url, TENSORS)

    async def _order(self, sent: Any) -> None:
        async with sent as response:
            text = await response.text()
            if response.status == 400 and self._kills and "WorkerDiedError: the model's process" in text:
                self.killed_loads += 1  # the process that loaded the model was the newest one
            elif response.status != 200:
                self.counts.wrong.append(f"{response.url.path}: {response.status} {text[:200]}")

    async def _call(self, session: aiohttp.ClientSession) -> None:
        """Make one call after the other."""
        while self._left > 0:
            self._left -= 1
            chance = self._rng.random()
            if chance < _ABANDONED:
                call = self._drawn.draw()
                how = await abandon(self._server.url + call.path, call.body, call.headers, self._rng, _DELAYS)
                self.counts.end("leaver", how, call.samples)
            elif chance < _ABANDONED + _CORRUPT and not self._kills:
                await self._answered(session, self._drawn.draw_corrupt(), (400,))
            elif chance < _ABANDONED + _CORRUPT + _HURRIED:
                await self._answered(session, self._hurried(self._drawn.draw()), (200, 503, 504))
            else:
                await self._answered(session, self._drawn.draw(), (200,))

    def _hurried(self, call: MixedCall) -> MixedCall:
        timeout = float(np.exp(self._rng.uniform(*np.log(_TIMEOUT_S))))
        headers = call.headers | {"X-Timeout-Ms": f"{1e3 * timeout:.1f}"}
        return replace(call, kind="hurried", headers=headers)

    async def _answered(self, session: aiohttp.ClientSession, call: MixedCall, allowed: tuple[int, ...]) -> None:
        try:
            async with session.post(call.path, data=io.BytesIO(call.body), headers=call.headers) as response:
                status, body = response.status, await response.read()
                length = int(response.headers.get("Inference-Header-Content-Length", 0))
        except (aiohttp.ClientError, OSError) as error:
            self.counts.end(call.kind, "lost", call.samples)
            self.counts.wrong.append(f"{call.kind}: no answer: {type(error).__name__} {error}"[:200])
            return
        self.counts.end(call.kind, status, call.samples)
        if status not in allowed:
            self.counts.wrong.append(f"{call.kind}: {status} {body[:200]!r}")
        elif status == 200 and not call.is_right(body, length):
            self.counts.wrong.append(f"{call.kind}: the answer of {call.samples} samples is not that of its own inputs")


def check_mixed(calls: int, kills: bool = False) -> dict[str, Any]:
    """Make calls of every kind to a server; `wrong` is empty if everything is right.

    With `kills` the device is the CPU, and has only the tensor model, whose process is killed.
    """
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / FEATURES.name
        file.write_text(FEATURES.read_text())
        models: tuple[str, ...] = (IMAGES, f"{TENSORS}={file}:Features", "--device", f"emulated:{_PROFILE}")
        if kills:  # a model of the name by which the memory budget is read
            models = (f"{IMAGES}={file}:Features", f"{TENSORS}={file}:Features", "--device", "cpu")
        with serving(*models, "--policy", "greedy", *BUDGET_FLAGS) as server:
            run = _MixedRun(server, calls, Path(name), kills)
            uvloop.run(run.run())
            counted = _settled(lambda: outcomes(server))
            held = bytes_held(server)
            waiting = round(server.total("batchwright_queue_length"))
    wrong = [*run.counts.wrong, *audit(run.counts, counted)]
    if waiting or held:
        wrong.append(f"{waiting} requests wait, and {held} bytes are reserved, when no call is open")
    ends = {f"{kind}: {end}": count for (kind, end), count in sorted(run.counts.ends.items())}
    return {
        "calls": calls,
        "seconds": round(run.seconds, 1),
        "samples_seen_by_clients": {status: run.counts.samples_of(status) for status in ("200", "400", "503", "504")},
        "abandoned": {"calls": run.counts.left, "samples": run.counts.left_samples},
        "counted_by_the_server": counted,
        "ends": ends,
        "swaps": run.swaps,
        "loads": run.loads,
        "kills": run.kills,
        "loads_that_were_killed": run.killed_loads,
        "bytes_held_when_idle": held,
        "wrong": wrong[:50],
        "wrong_in_all": len(wrong),
    }


def _settled(count: Callable[[], dict[str, int]]) -> dict[str, int]:
    """The server's counts once they do not change any more."""
    found: dict[str, int] = {}

    def same() -> bool:
        before = dict(found)
        found.update(count())
        return found == before

    wait_until(same, 30.0, 0.5)
    return found


def main() -> None:
    """Check, print and record; exit code 1 if anything was wrong."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--pictures", type=int, default=2000, help="images for the network; 0 skips it")
    parser.add_argument("--corrupt", type=int, default=50)
    parser.add_argument("--calls", type=int, default=20_000, help="calls of every kind; 0 skips them")
    parser.add_argument("--only", choices=("network", "mixed", "killed"))
    parser.add_argument("--record", default="identity", help="name of the record")
    chosen = parser.parse_args()
    record: dict[str, Any] = load_record(chosen.record)
    wrong = False
    if chosen.pictures and chosen.only in (None, "network"):
        for name, kills in (("network", False), ("killed_network", True)):
            outcome = check(chosen.model, chosen.pictures, chosen.corrupt, kills=kills)
            record[name] = {"model": chosen.model, **asdict(outcome)}
            wrong |= outcome.is_wrong
    for name, kills in (("mixed", False), ("killed", True)):
        if chosen.calls and chosen.only in (None, name):
            record[name] = check_mixed(chosen.calls, kills)
            wrong |= bool(record[name]["wrong_in_all"])
    save_record(chosen.record, record)
    print(json.dumps(record, indent=1))
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
