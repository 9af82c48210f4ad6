"""Models loaded again under load: nothing is lost, and what it costs the models beside them.

Two models share a device at load 0.5. One of them is replaced ten times by another version of its file, once with a
profile that is measured while both are served, once with a profile that is given. Then its file is broken, and the
model is unloaded and loaded again.
"""

import asyncio
import json
import re
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import numpy as np

from benchmarks.support.harness import ROOT, Server, argument_parser, save_record, serving
from benchmarks.support.processes import resource_usage
from policies.profile import Profile

_SOURCE = ROOT / "benchmarks" / "servers" / "reloaded_model.py"
_RATE = 110.0  # 1/s of each model; together half of what the device can serve
_AROUND = 1.0  # s from the beginning of a load, at least, whose calls count as sent while it runs
_PAUSE = 2.0  # s between two loads, by default
_WEIGHED = 10, 50, 100  # loads after which memory is measured


@dataclass(frozen=True)
class _Call:
    """One call: when it was sent and answered, s, its status, and the version of the file in its answer."""

    model: str
    sent: float
    answered: float
    status: int
    version: int | None


class _Clients:
    """Open-loop load on two models, until it is stopped."""

    def __init__(self, url: str, seed: int) -> None:
        self.calls: list[_Call] = []
        self.sent: Counter[str] = Counter()
        self._url = url
        self._rng = np.random.default_rng(seed)
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "_Clients":
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._sources = [asyncio.create_task(self._send(model)) for model in ("changing", "other")]
        return self

    async def __aexit__(self, *_: object) -> None:
        for source in self._sources:
            source.cancel()
        await asyncio.gather(*self._open)
        await self._session.close()

    async def _send(self, model: str) -> None:
        at = monotonic()
        while True:
            at += self._rng.exponential(1 / _RATE)
            await asyncio.sleep(at - monotonic())
            call = asyncio.create_task(self._call(model))
            self._open.add(call)
            call.add_done_callback(self._open.discard)

    async def _call(self, model: str) -> None:
        self.sent[model] += 1
        sent, x = monotonic(), self._rng.integers(0, 100, 4).tolist()
        async with self._session.post(f"{self._url}/predict/{model}", json={"inputs": {"x": x}}) as response:
            answer = await response.json()
        version = None
        if response.status == 200:
            assert answer["outputs"]["sum"] == sum(x), "an answer to another call"
            version = answer["outputs"]["version"]
        self.calls.append(_Call(model, sent, monotonic(), response.status, version))

    async def post(self, verb: str) -> tuple[int, str]:
        """Load or unload the changing model; return status and error."""
        url = f"{self._url}/v2/repository/models/changing/{verb}"
        async with self._session.post(url) as response:
            return response.status, "" if response.status == 200 else (await response.json())["error"]


def _write(file: Path, version: int, end: str = "") -> None:
    file.write_text(re.sub("(?m)^VERSION = .*$", f"VERSION = {version}", _SOURCE.read_text()) + end)


def _p95(calls: list[_Call]) -> float:
    return 1e3 * float(np.quantile([call.answered - call.sent for call in calls], 0.95))


async def _reload(server: Server, file: Path, loads: int, pause: float) -> dict[str, Any]:
    """Replace the model `loads` times by its next version."""
    windows: list[tuple[float, float]] = []
    statuses = []
    memory = dict[str, float]()
    async with _Clients(server.url, 1) as clients:
        await asyncio.sleep(2 * pause)
        for version in range(1, loads + 1):
            _write(file, version)
            began = monotonic()
            statuses.append((await clients.post("load"))[0])
            windows.append((began, monotonic()))
            await asyncio.sleep(pause)
            if version in _WEIGHED:
                memory[str(version)] = resource_usage(server.process.pid).rss_mb

    def within(call: _Call) -> bool:
        return any(begin <= call.sent < max(end, begin + _AROUND) for begin, end in windows)

    changing = [call for call in clients.calls if call.model == "changing"]
    mixed = [
        sum(1 for call in changing if call.version == version - 1 and call.sent > first)
        for version in range(1, loads + 1)
        if (first := min(call.answered for call in changing if call.version == version))
    ]
    other = [call for call in clients.calls if call.model == "other"]
    return {
        "loads": loads,
        "rss_mb_after_loads": memory,
        "load_statuses": statuses,
        "load_seconds": [round(end - begin, 3) for begin, end in windows],
        "sent": dict(clients.sent),
        "answered": dict(Counter(call.model for call in clients.calls if call.status == 200)),
        "statuses": {str(status): count for status, count in Counter(call.status for call in clients.calls).items()},
        "versions_answered": len({call.version for call in changing}),
        "old_after_new": sum(mixed),  # calls sent after an answer of the new version that the old one answered
        "other_p95_ms": round(_p95([call for call in other if not within(call)]), 2),
        "other_p95_ms_while_loading": round(_p95([call for call in other if within(call)]), 2),
    }


async def _break_and_unload(url: str, file: Path, pause: float) -> dict[str, Any]:
    """Load a broken file, unload the model, and load it again."""
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(_Clients(url, 2))
        await asyncio.sleep(pause)
        _write(file, 0, "raise OSError('no weights')\n")
        broken = await clients.post("load")
        _write(file, 0)
        await asyncio.sleep(pause)
        answered_by_former = {call.status for call in clients.calls}
        begin = monotonic()
        unloaded = await clients.post("unload")
        end = monotonic()
        await asyncio.sleep(pause)
        loaded_from, (loaded, _) = monotonic(), await clients.post("load")
        loaded_by = monotonic()
        await asyncio.sleep(pause)
    changing = [call for call in clients.calls if call.model == "changing"]
    return {
        "broken_file": {"status": broken[0], "error": broken[1].replace(str(file.parent), "")},
        "statuses_with_the_former_version": sorted(answered_by_former),
        "unload_status": unloaded[0],
        "before_unload": dict(Counter(str(call.status) for call in changing if call.sent < begin)),
        "while_unloaded": dict(Counter(str(call.status) for call in changing if end <= call.sent < loaded_from)),
        "load_status": loaded,
        "after_load": dict(Counter(str(call.status) for call in changing if call.sent >= loaded_by)),
        "other": dict(Counter(str(call.status) for call in clients.calls if call.model == "other")),
    }


def reload_under_load(loads: int = 10, pause: float = _PAUSE) -> dict[str, Any]:
    """Run all parts, each on a server of its own, with a pause between two loads, s."""
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        file, profile = Path(name) / "reloaded_model.py", Path(name) / "profile.json"
        profile.write_text(Profile("timed", tuple(0.010 + 0.001 * b for b in range(1, 9))).to_json())
        models = (f"changing={file}:Timed", f"other={_SOURCE}:Timed", "--device", "cpu")
        for about, flags in {"measured_profile": (), "given_profile": ("--profile", str(profile))}.items():
            _write(file, 0)
            with serving(*models, *flags) as server:
                record[about] = asyncio.run(_reload(server, file, loads, pause))
                if flags:
                    record["broken_and_unloaded"] = asyncio.run(_break_and_unload(server.url, file, pause))
    return record


def main() -> None:
    """Run, print and record; exit code 1 if a call was lost."""
    parser = argument_parser(__doc__)
    parser.add_argument("--loads", type=int, default=10)
    parser.add_argument("--pause", type=float, default=_PAUSE, help="s between two loads")
    chosen = parser.parse_args()
    record = reload_under_load(chosen.loads, chosen.pause)
    save_record("reload" if chosen.loads <= _WEIGHED[0] else "reload_often", record)
    print(json.dumps(record, indent=1))
    parts = (record["measured_profile"], record["given_profile"])
    raise SystemExit(any(part["sent"] != part["answered"] or part["old_after_new"] for part in parts))


if __name__ == "__main__":
    main()
