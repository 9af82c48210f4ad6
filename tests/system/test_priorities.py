"""Priority levels of a running server: by the protocol's parameter, the header and the key."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from signal import SIGKILL
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support.fork_server import run_serve_model
from tests.support.grpc_client import grpc_server
from tests.support.logged_server import LoggedServer, logged_server

MODEL = """
import time
from batchwright import Model, Tensor
class Slow(Model):
    inputs = {"x": Tensor("FP32", [1])}
    outputs = {"y": Tensor("FP32", [1])}
    def run(self, x):
        time.sleep(0.05)
        return {"y": 2 * x}
class Plain(Slow):
    pass
"""
KEYS = {"fast": "", "bulk": " max_level=2"}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-key"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoggedServer, str]]:
    folder = tmp_path_factory.mktemp("priorities")
    (folder / "slow.py").write_text(MODEL)
    lines = (f"{name} predict {sha256(f'{name}-key'.encode()).hexdigest()}{level}\n" for name, level in KEYS.items())
    (folder / "keys").write_text("".join(lines))
    models = (f"slow={folder}/slow.py:Slow", f"plain={folder}/slow.py:Plain")
    flags = ("--device", "cpu", "--max-batch-size", "2", "--policy", "greedy", "--priority-weights", "slow=8,1")
    limits = ("--queue-capacity", "24", "--reserved-share", "0.5", "--api-key-file", str(folder / "keys"))
    with grpc_server(folder, *models, *flags, *limits) as started:
        yield started


def by_level(server: LoggedServer) -> dict[str, float]:
    return server.by_label("batchwright_level_response_seconds_count", "level")


def counted(server: LoggedServer, before: dict[str, float]) -> dict[str, float]:
    """By level, the requests answered since then."""
    now = by_level(server)
    return {level: count - before.get(level, 0.0) for level, count in now.items() if count > before.get(level, 0.0)}


def tensor(module: Any) -> Any:
    found = module.InferInput("x", [1, 1], "FP32")
    found.set_data_from_numpy(np.ones((1, 1), np.float32))
    return found


@pytest.mark.parametrize(
    ("priority", "key", "level"),
    [(1, "fast", "1"), (2, "fast", "2"), (0, "fast", "2"), (1, "bulk", "2")],
)
@pytest.mark.parametrize("module", [triton, triton_grpc], ids=["HTTP", "gRPC"])
def test_tritons_client_names_the_level(
    started: tuple[LoggedServer, str], module: Any, priority: int, key: str, level: str
) -> None:
    server, address = started
    before = by_level(server)
    target = server.url.removeprefix("http://") if module is triton else address
    headers = bearer(key) if module is triton else {"authorization": bearer(key)["Authorization"]}
    with module.InferenceServerClient(target) as client:
        found = client.infer("slow", [tensor(module)], priority=priority, headers=headers)
    assert found.as_numpy("y").tolist() == [[2.0]]
    assert counted(server, before) == {level: 1.0}


@pytest.mark.parametrize("module", [triton, triton_grpc], ids=["HTTP", "gRPC"])
@pytest.mark.parametrize(
    ("model", "priority", "remedy"), [("slow", 3, "1 to 2, or 0 for the last"), ("plain", 2, "0 or 1")]
)
def test_a_level_beyond_the_last_is_refused(
    started: tuple[LoggedServer, str], module: Any, model: str, priority: int, remedy: str
) -> None:
    server, address = started
    target = server.url.removeprefix("http://") if module is triton else address
    headers = {"authorization": bearer("fast")["Authorization"]}
    with module.InferenceServerClient(target) as client:
        with pytest.raises(InferenceServerException, match=f"`priority` is {priority}, .*; send {remedy}"):
            client.infer(model, [tensor(module)], priority=priority, headers=headers)
        assert client.infer(model, [tensor(module)], priority=1, headers=headers).as_numpy("y").tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("header", "key", "level"),
    [("u=0", "fast", "1"), ("u=2, i", "fast", "1"), ("u=3", "fast", "2"), (None, "fast", "2"), ("u=0", "bulk", "2")],
)
def test_the_header_of_http_names_the_urgency(
    started: tuple[LoggedServer, str], header: str | None, key: str, level: str
) -> None:
    server, _ = started
    before = by_level(server)

    async def predict() -> int:
        headers = bearer(key) | ({} if header is None else {"Priority": header})
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/predict/slow", json={"inputs": {"x": [1.0]}}, headers=headers) as response,
        ):
            return response.status

    assert asyncio.run(predict()) == 200
    assert counted(server, before) == {level: 1.0}


def test_the_page_has_the_queue_of_each_level(started: tuple[LoggedServer, str]) -> None:
    server, _ = started

    async def state(session: aiohttp.ClientSession, model: str) -> list[dict[str, Any]]:
        async with session.get(f"{server.url}/live?model={model}", headers=bearer("fast")) as response:
            found: list[dict[str, Any]] = (await response.json())["levels"]
            return found

    async def run() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            for urgency in ("u=7",) * 9 + ("u=0",) * 5:
                headers = bearer("fast") | {"Priority": urgency}
                body = {"inputs": {"x": [1.0]}}
                tasks.create_task(session.post(f"{server.url}/predict/slow", json=body, headers=headers))
            await asyncio.sleep(0.02)
            return await state(session, "slow"), await state(session, "plain")

    levels, plain = asyncio.run(run())
    assert plain == []
    assert [(each["level"], each["queue_length"] > 0) for each in levels] == [(1, True), (2, True)]
    assert levels[0].keys() == {"level", "queue_length", "predicted", "measured"}


def test_a_later_call_of_the_first_level_overtakes_bulk(started: tuple[LoggedServer, str]) -> None:
    server, _ = started
    answered: list[str] = []

    async def predict(session: aiohttp.ClientSession, name: str, urgency: str) -> None:
        headers = bearer("fast") | {"Priority": urgency}
        async with session.post(
            f"{server.url}/predict/slow", json={"inputs": {"x": [1.0]}}, headers=headers
        ) as response:
            assert response.status == 200
        answered.append(name)

    async def run() -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            for _ in range(12):
                tasks.create_task(predict(session, "bulk", "u=7"))
            await asyncio.sleep(0.08)  # the second of six batches of two is served
            tasks.create_task(predict(session, "first", "u=0"))

    asyncio.run(run())
    assert answered.index("first") < 8, "it was in the next batch"


def test_the_first_level_has_places_when_bulk_is_refused(started: tuple[LoggedServer, str]) -> None:
    url = f"{started[0].url}/v2/models/slow/infer"

    async def infer(session: aiohttp.ClientSession, priority: int) -> int:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
        document = {"inputs": [tensor], "parameters": {"priority": priority}}
        async with session.post(url, json=document, headers=bearer("fast")) as response:
            return response.status

    async def run() -> tuple[list[int], int]:
        async with aiohttp.ClientSession() as session:
            bulk = [asyncio.ensure_future(infer(session, 2)) for _ in range(24)]
            await asyncio.wait(bulk, return_when=asyncio.FIRST_COMPLETED)  # those beyond twelve are refused at once
            first = await infer(session, 1)
            return await asyncio.gather(*bulk), first

    bulk, first = asyncio.run(run())
    assert first == 200
    assert 503 in bulk
    assert bulk.count(200) >= 12


def test_no_level_is_lost_in_swaps_reloads_and_kills(tmp_path: Path) -> None:
    """Level 1 alone is more than the server can answer, so that bulk waits for its longest wait."""
    (tmp_path / "slow.py").write_text(MODEL)
    flags = (
        "--device",
        "cpu",
        "--max-batch-size",
        "2",
        "--priority-weights",
        "8,1",
        "--priority-max-wait-ms",
        "inf,300",
    )
    with logged_server(tmp_path, f"slow={tmp_path}/slow.py:Slow", *flags) as server:
        before, sent, answered = by_level(server), Counter[str](), Counter[tuple[str, int]]()

        async def client(session: aiohttp.ClientSession, level: str, urgency: str) -> None:
            while not ended.is_set():
                sent[level] += 1
                body, headers = {"inputs": {"x": [1.0]}}, {"Priority": urgency}
                async with session.post(f"{server.url}/predict", json=body, headers=headers) as response:
                    assert (await response.json())["outputs"] == {"y": [2.0]}
                    answered[level, response.status] += 1

        async def disturb(session: aiohttp.ClientSession) -> None:
            for policy in ("greedy", "smdp:w2=0"):
                async with session.put(f"{server.url}/admin/models/slow/policy", json={"policy": policy}) as response:
                    assert response.status == 200
                async with session.post(f"{server.url}/v2/repository/models/slow/load") as response:
                    assert response.status == 200
                async with session.get(f"{server.url}/admin/devices") as response:
                    os.kill((await response.json())[0]["models"]["slow"]["pid"], SIGKILL)
                await asyncio.sleep(2.0)
            ended.set()

        async def run() -> None:
            async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
                for level, urgency, clients in (("1", "u=0", 12), ("2", "u=7", 4)):
                    for _ in range(clients):
                        tasks.create_task(client(session, level, urgency))
                tasks.create_task(disturb(session))

        ended = asyncio.Event()
        asyncio.run(run())
        assert {level: answered[level, 200] for level in sent} == sent
        assert counted(server, before) == sent
        assert sent["2"] > 4, "bulk was served beside the overload"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--priority-weights", "1,8"],
            "priority weights '1,8': give 2 to 8 numbers of at least 0, the greatest first",
        ),
        (["--priority-weights", "8,1", "--reserved-share", "1"], "--reserved-share: "),
        (["--priority-max-wait-ms", "10,20"], "--priority-max-wait-ms 10,20 is for levels"),
        (["--priority-weights", "8,1", "--priority-max-wait-ms", "10"], "give a time above 0, or inf, for each of 2"),
    ],
)
def test_malformed_levels_are_refused_at_start(flags: list[str], message: str) -> None:
    done = run_serve_model("resnet18", "--device", "emulated:googlenet-tesla-p4", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
