"""Pipelines of the real server process: answers, errors, cancellation, deaths of their processes, and refusals."""

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.http

from benchmarks.support.harness import Server, serving
from tests.support.fork_server import run_serve_model
from tests.support.http_client import Response, fetch
from tests.support.logged_server import logged_server, until
from tests.system.test_tracing import collector

MODELS = """
import time
from batchwright import BadInput, Model, Tensor
class Count(Model):
    inputs = {"x": Tensor("FP32", [4])}
    outputs = {"n": Tensor("INT64", [1])}
    def run(self, x):
        if (x[:, :1] == 13).any():
            raise BadInput("thirteen")
        return {"n": x[:, :1].astype("int64")}
class Square(Model):
    inputs = {"v": Tensor("FP32", [1])}
    outputs = {"s": Tensor("FP32", [1])}
    max_batch_size = 8
    def run(self, v):
        time.sleep(0.002)
        return {"s": v * v}
    def decode(self, body, content_type):
        import numpy
        return {"v": numpy.array([float(body)], "float32")}
class Words(Model):
    inputs = {"what": Tensor("BYTES", [1])}
    outputs = {"same": Tensor("BYTES", [1])}
    def run(self, what):
        return {"same": what}
class Slow(Model):
    inputs = {"v": Tensor("FP32", [1])}
    outputs = {"s": Tensor("FP32", [1])}
    max_batch_size = 1
    def run(self, v):
        time.sleep(0.2)
        return {"s": v}
"""
PIPELINES = """
import asyncio, ctypes, os, time
from batchwright import BadInput, InferenceError, Pipeline, Tensor
class Sum(Pipeline):
    inputs = {"x": Tensor("FP32", [4])}
    outputs = {"total": Tensor("FP32", [1])}
    models = ("count", "square")
    async def run(self, models, x):
        n = int((await models.count(x=x))["n"][0])
        parts = await asyncio.gather(*(models.square(v=x[:1] + i) for i in range(n)))
        return {"total": sum((part["s"] for part in parts), 0 * x[:1])}
    def decode(self, body, content_type):
        import numpy
        return {"x": numpy.full(4, float(body), "float32")}
    def render(self, outputs):
        return float(outputs["total"][0])
class Odd(Pipeline):
    inputs = {"what": Tensor("BYTES", [1])}
    outputs = {"said": Tensor("BYTES", [-1])}
    models = ("sum", "square", "slow", "words")
    def decode(self, body, content_type):
        return {"what": [body]}
    def render(self, outputs):
        return [each.decode() for each in outputs["said"]]
    async def run(self, models, what):
        word = what[0].decode()
        if word == "crash":
            ctypes.string_at(0)
        if word == "hang":
            time.sleep(1e3)
        if word == "fail":
            raise KeyError(word)
        if word == "refuse":
            raise BadInput("not this word")
        if word == "nested":
            found = await models.sum(x=[2.0] * 4)
            return {"said": [str(found["total"][0])]}
        if word == "body":
            return {"said": [str((await models["square"].predict(b"5"))["s"][0])]}
        if word == "unknown":
            await models.count(x=[1.0] * 4)
        if word == "shape":
            await models.square(v=[1.0, 2.0])
        if word == "name":
            await models.square(w=[1.0])
        if word == "output":
            return {"other": []}
        if word == "many":
            await asyncio.gather(*(models.square(v=[0.0]) for _ in range(1100)))
        if word == "caught":
            try:
                await models.sum(x=[13.0] * 4)
            except InferenceError as error:
                return {"said": [f"{error.status} {error}"]}
        if word == "group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(models.sum(x=[13.0] * 4))
                tasks.create_task(models.slow(v=[1.0]))
        if word == "left":
            await asyncio.gather(models.sum(x=[13.0] * 4), *(models.slow(v=[1.0]) for _ in range(4)))
        if word == "tasks":
            return {"said": [str(len(asyncio.all_tasks()))]}
        if word == "cancelled":
            raise asyncio.CancelledError
        if word == "sleep":
            await asyncio.sleep(1.0)
        if word == "busy":
            raise InferenceError(503, "too much of it")
        if word == "number":
            await models.words(what=[1.0])
        if word == "abandon":
            try:
                await asyncio.wait_for(models.slow(v=[1.0]), 0.05)
            except TimeoutError:
                return {"said": ["given up"]}
        if word == "slow":
            for _ in range(5):
                await models.slow(v=[1.0])
        return {"said": [word, str(os.getpid())]}
"""
FLAGS = ("--device", "cpu", "--policy", "greedy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "models.py").write_text(MODELS)
    (folder / "pipelines.py").write_text(PIPELINES)
    return folder


@pytest.fixture(autouse=True, scope="module")
def cache(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


def models(folder: Path, *names: str) -> list[str]:
    files = dict.fromkeys(("count", "square", "slow", "words"), "models.py") | dict.fromkeys(
        ("sum", "odd"), "pipelines.py"
    )
    return [f"{name}={folder}/{files[name]}:{name.capitalize()}" for name in names]


ALL = ("odd", "sum", "count", "square", "slow", "words")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Server]:
    """A server of many tests, which do not change it."""
    with serving(*models(folder, *ALL), *FLAGS) as server:
        yield server


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serving(*models(folder, *ALL), *FLAGS, "--hung-after-s", "3") as server:
        yield server


def say(server: Server, word: str, **headers: str) -> Response:
    return fetch(server.url, "/predict/odd", word.encode(), headers=headers)


def pipeline(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in fetch(server.url, "/admin/pipelines").json if p["name"] == name)
    return found


def nothing_is_left(server: Server) -> bool:
    live = fetch(server.url, "/live?model=square").json
    queued = sum(step["queue_length"] for each in live["pipelines"] for step in each["steps"])
    open_calls = sum(each["open_calls"] for each in (*live["pipelines"], *live["devices"]))
    return bool(queued == open_calls == 0)


def test_a_call_is_answered_by_requests_of_other_models(server: Server) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda n: fetch(server.url, "/predict/sum", b"%d" % n), range(8))]
    for n, answer in enumerate(answers):
        assert answer.status == 200, answer.body
        assert answer.json["outputs"] == sum((n + i) ** 2 for i in range(n))
        steps = answer.json["steps"]
        assert Counter(step["model"] for step in steps) == Counter({"count": 1, "square": n}) - Counter()
        assert answer.json["batch_size"] == max(step["batch_size"] for step in steps)
        assert answer.json["service_ms"] == pytest.approx(sum(step["service_ms"] for step in steps), abs=0.1)
    assert max(step["batch_size"] for answer in answers for step in answer.json["steps"]) > 1, (
        "batches of several calls"
    )
    assert nothing_is_left(server)
    metrics = fetch(server.url, "/metrics").body.decode()
    assert 'batchwright_requests_total{model="sum",outcome="ok"} 8.0' in metrics
    assert f'batchwright_pipeline_step_seconds_count{{pipeline="sum",step="square"}} {sum(range(8))}.0' in metrics


def test_the_open_inference_protocol_serves_a_pipeline(shared: Server) -> None:
    client = tritonclient.http.InferenceServerClient(shared.url.removeprefix("http://"))
    until(lambda: client.is_model_ready("sum"))  # another test may have killed its process
    assert client.get_model_metadata("sum")["outputs"] == [{"name": "total", "datatype": "FP32", "shape": [-1, 1]}]
    given = tritonclient.http.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(np.array([[1.0] * 4, [3.0] * 4], np.float32))
    answer = client.infer("sum", [given])
    assert answer.as_numpy("total").tolist() == [[1.0], [9.0 + 16.0 + 25.0]]
    assert '"model":"count"' in answer.get_response()["parameters"]["steps"]
    assert {each["name"] for each in client.get_model_repository_index()} == set(ALL)


@pytest.mark.parametrize(
    ("word", "status", "text"),
    [
        ("fail", 500, "the pipeline failed with KeyError in pipelines.py line 32"),
        ("refuse", 400, "not this word"),
        ("unknown", 500, "the pipeline failed with AttributeError"),
        ("shape", 400, "square: input v has the shape [2]; it takes [1]"),
        ("name", 400, "square takes v, not w"),
        ("output", 500, "the model returned no output said"),
        ("many", 500, "more than 1024 requests"),
        ("group", 400, "thirteen"),
        ("cancelled", 500, "the pipeline failed with CancelledError"),
        ("busy", 503, "too much of it"),
        ("number", 400, "words: input what has values of type float64; it takes BYTES"),
    ],
)
def test_an_error_answers_the_call_with_the_status_of_the_step(
    shared: Server, word: str, status: int, text: str
) -> None:
    answer = say(shared, word)
    assert answer.status == status
    assert text in answer.json["error"]
    assert "\n" not in answer.json["error"]
    until(lambda: nothing_is_left(shared))


@pytest.mark.parametrize(
    ("word", "said"),
    [("caught", "400 thirteen"), ("nested", "13.0"), ("body", "25.0"), ("abandon", "given up")],
)
def test_a_pipeline_catches_errors_gives_up_steps_and_calls_pipelines(shared: Server, word: str, said: str) -> None:
    assert say(shared, word).json["outputs"] == [said]
    until(lambda: nothing_is_left(shared))


def test_steps_that_their_call_leaves_open_are_cancelled_on_both_sides(shared: Server) -> None:
    before = say(shared, "tasks").json["outputs"]
    assert say(shared, "left").status == 400
    until(lambda: nothing_is_left(shared))
    assert say(shared, "tasks").json["outputs"] == before


def test_open_calls_are_bounded_by_the_capacity_of_the_queue(folder: Path) -> None:
    with serving(*models(folder, *ALL), *FLAGS, "--queue-capacity", "32") as server:
        with ThreadPoolExecutor(40) as pool:
            statuses = Counter(answer.status for answer in pool.map(lambda _: say(server, "sleep"), range(40)))
        assert statuses.keys() == {200, 503}
        assert statuses[503] >= 8


def test_a_timeout_ends_the_call_and_its_steps(server: Server) -> None:
    answer = say(server, "slow", **{"X-Timeout-Ms": "300"})
    assert answer.status in (503, 504), "503 where a late start leaves less time than the next step takes"
    until(lambda: nothing_is_left(server))
    assert say(server, "fine").json["outputs"][0] == "fine"


def test_a_client_that_disconnects_ends_the_call_and_its_steps(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /predict/odd HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nslow")
        until(lambda: pipeline(server, "odd")["open_calls"] == 1)
    until(lambda: nothing_is_left(server))
    metrics = fetch(server.url, "/metrics").body.decode()
    assert 'batchwright_requests_total{model="odd",outcome="cancelled"} 1.0' in metrics


@pytest.mark.parametrize(("word", "text"), [("crash", "was killed by SIGSEGV"), ("hang", "was killed by SIGKILL")])
def test_a_process_that_ends_costs_the_calls_in_it(server: Server, word: str, text: str) -> None:
    before = pipeline(server, "odd")["processes"][0]["pid"]
    answer = say(server, word)
    assert answer.status == 500
    assert text in answer.json["error"]
    assert int(say(server, "fine").json["outputs"][1]) != before
    (process,) = pipeline(server, "odd")["processes"]
    assert process["restarts"] == 1
    assert text in process["last_fault"]


def test_two_processes_share_the_calls(folder: Path) -> None:
    flags = (*FLAGS, "--pipeline-processes", "2")
    with serving(*models(folder, *ALL), *flags) as server, ThreadPoolExecutor(1) as pool:

        def used() -> set[str]:
            slow = pool.submit(say, server, "slow")
            until(lambda: pipeline(server, "odd")["open_calls"] == 1)
            return {say(server, "fine").json["outputs"][1], slow.result().json["outputs"][1]}

        until(lambda: len(used()) == 2)  # once both have started
        assert used() == {str(each["pid"]) for each in pipeline(server, "odd")["processes"]}


def test_a_process_that_is_killed_under_load_costs_only_its_calls(server: Server) -> None:
    stop = time.monotonic() + 6.0

    def process(restarts: int) -> dict[str, Any]:
        until(lambda: pipeline(server, "sum")["processes"][0]["restarts"] == restarts)
        found: dict[str, Any] = pipeline(server, "sum")["processes"][0]
        return found

    def client(n: int) -> Counter[tuple[int, bool]]:
        ends = Counter[tuple[int, bool]]()
        while time.monotonic() < stop:
            answer = fetch(server.url, "/predict/sum", b"%d" % n)
            right = answer.status != 200 or answer.json["outputs"] == sum((n + i) ** 2 for i in range(n))
            ends[answer.status, right] += 1
        return ends

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, n) for n in range(6)]
        for number in range(3):
            time.sleep(1.0)
            os.kill(process(number)["pid"], signal.SIGKILL)
        ends = sum((each.result() for each in clients), Counter[tuple[int, bool]]())
    assert ends.keys() <= {(200, True), (500, True)}
    assert ends[500, True] <= 3 * 6, "at most those in the process"
    assert ends[200, True] > 100
    until(lambda: nothing_is_left(server))


def test_many_calls_timeouts_and_cancellations_leave_nothing(server: Server) -> None:
    async def one(session: aiohttp.ClientSession, number: int) -> Any:
        if number % 5 == 0:
            try:
                async with asyncio.timeout(0.05), session.post(f"{server.url}/predict/odd", data=b"slow") as answer:
                    return answer.status
            except TimeoutError:
                return "cancelled"
        n = number % 4
        headers = {"X-Timeout-Ms": str(number % 60 + 1)} if number % 7 == 0 else {}
        async with session.post(f"{server.url}/predict/sum", data=b"%d" % n, headers=headers) as answer:
            if answer.status == 200:
                assert (await answer.json())["outputs"] == sum((n + i) ** 2 for i in range(n))
            return answer.status

    async def run() -> Counter[Any]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return Counter(await asyncio.gather(*(one(session, number) for number in range(2000))))

    ends = asyncio.run(run())
    assert sum(ends.values()) == 2000
    assert ends.keys() <= {200, 503, 504, "cancelled"}
    assert ends[200] > 1000
    until(lambda: nothing_is_left(server))
    assert say(server, "fine").status == 200


def test_accepted_calls_are_answered_before_the_server_ends(folder: Path) -> None:
    with logged_server(folder, *models(folder, *ALL), *FLAGS) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(say, server, "slow")
        until(lambda: pipeline(server, "odd")["open_calls"] == 1)
        server.process.terminate()
        assert answer.result().json["outputs"][0] == "slow"
        assert server.process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("names", "flags", "text"),
    [
        (("sum", "count"), (), "pipeline sum calls square, which is not served; serve it, too, as square=SPEC"),
        (("sum", "count", "square"), ("--policy", "sum=greedy"), "sum is a pipeline, which has no --policy sum=greedy"),
    ],
)
def test_a_pipeline_that_cannot_be_served_is_refused(
    folder: Path, names: tuple[str, ...], flags: tuple[str, ...], text: str
) -> None:
    ended = run_serve_model(*models(folder, *names), "--device", "cpu", *flags)
    assert ended.returncode == 2
    assert text in ended.stderr


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('models = ("a",)\n    async def run(self, models, x): ...', "pipelines call each other in a cycle: a -> a"),
        ('models = ("a",)\n    def run(self, models, x): ...', "has no coroutine `run`; write async def run"),
        ("async def run(self, models, x): ...", 'needs `models`, such as ("det", "rec")'),
        (
            'models = ("a",)\n    async def run(self, models, x): ...\n    def load(self, device): ...',
            "has a method `load`",
        ),
        ('models = ("a",)\n    steps = {"b": 1}\n    async def run(self, models, x): ...', "steps is {'b': 1}"),
    ],
)
def test_a_pipeline_that_is_wrong_is_refused(folder: Path, code: str, text: str) -> None:
    tensors = "inputs = outputs = {'x': Tensor('FP32', [1])}"
    head = f"from batchwright import Pipeline, Tensor\nclass P(Pipeline):\n    {tensors}\n"
    (folder / "wrong.py").write_text(f"{head}    {code}\n")
    ended = run_serve_model(f"a={folder}/wrong.py:P", *models(folder, "square"), "--device", "cpu")
    assert ended.returncode == 2
    assert text in ended.stderr


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/admin/models/sum/policy", 400),
        ("GET", "/admin/models/sum/profile", 400),
        ("POST", "/admin/models/sum/solve", 400),
        ("POST", "/v2/repository/models/sum/load", 400),
        ("GET", "/live?model=sum", 400),
        ("GET", "/live/form?model=sum", 200),
        ("GET", "/v2/models/sum/ready", 200),
        ("GET", "/v2/models/sum/config", 200),
        ("GET", "/v2/models/sum/stats", 200),
        ("GET", "/v2/models/stats", 200),
        ("GET", "/", 200),
        ("GET", "/docs", 200),
    ],
)
def test_routes_of_models_know_pipelines(shared: Server, method: str, path: str, status: int) -> None:
    answer = fetch(shared.url, path, method=method)
    assert answer.status == status, answer.body
    if status == 400:
        assert "sum is a pipeline" in answer.json["error"]


def test_a_timeout_below_the_least_time_of_the_steps_is_rejected_at_once(server: Server) -> None:
    assert say(server, "slow").status == 200
    answer = say(server, "fine", **{"X-Timeout-Ms": "100"})
    assert answer.status == 503
    assert "the steps of odd take at least" in answer.json["error"]


def test_the_steps_of_a_call_are_spans_below_its_own(folder: Path) -> None:
    with collector() as (endpoint, spans):
        with serving(*models(folder, *ALL), *FLAGS, "--otlp-endpoint", endpoint) as server:
            trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
            fetch(server.url, "/predict/sum", b"2", headers={"traceparent": f"00-{trace}-{parent}-01"})
        until(lambda: sum(span.name.startswith("step ") for span in spans) == 3)
    (call,) = [span for span in spans if span.parent_span_id.hex() == parent]
    steps = [span for span in spans if span.parent_span_id == call.span_id]
    assert sorted(span.name for span in steps) == ["step count", "step square", "step square"]
    assert {span.trace_id.hex() for span in steps} == {trace}
    linked = {link.span_id for span in spans if span.name == "batch" for link in span.links}
    assert {span.span_id for span in steps} <= linked, "the batches are linked with the steps"


BOUND = """
import asyncio
from batchwright import Pipeline, Tensor
class Two(Pipeline):
    inputs = {"v": Tensor("FP32", [1])}
    outputs = {"s": Tensor("FP32", [1])}
    models = ("square", "slow")
    steps = {"square": 1, "slow": 2}
    async def run(self, models, v):
        await models.square(v=v)
        await asyncio.gather(models.slow(v=v), models.slow(v=v))
        return {"s": v}
"""


def test_the_bound_of_a_pipeline_is_split_over_its_models(folder: Path) -> None:
    (folder / "bound.py").write_text(BOUND)
    served = [f"two={folder}/bound.py:Two", *models(folder, "square", "slow"), "--slo-p95-ms", "two=400"]
    with serving(*served, "--device", "emulated:googlenet-tesla-p4-x10") as server:
        specs = [fetch(server.url, f"/admin/models/{name}/policy").json["spec"] for name in ("square", "slow")]
        limits, shares = zip(
            *(map(float, spec.removeprefix("smdp:slo_share=").split(":")) for spec in specs), strict=True
        )
        assert 200 < sum(limits) <= 400
        assert shares == pytest.approx((0.975, 0.9875))
        assert fetch(server.url, "/predict/two", b'{"inputs": {"v": [1]}}').status == 200
        metrics = fetch(server.url, "/metrics").body.decode()
        assert 'batchwright_objective_seconds{model="two"} 0.4' in metrics
        assert 'batchwright_objective_share{model="slow"} 0.9875' in metrics
    refused = run_serve_model(*served, "--device", "emulated:googlenet-tesla-p4-x10", "--w2", "1")
    assert refused.returncode == 2
    assert "square gets its bound from two; leave out its own policy, w2 and slo_p95_ms" in refused.stderr


def test_the_bound_of_what_is_not_served_is_refused(folder: Path) -> None:
    ended = run_serve_model(*models(folder, "square"), "--device", "cpu", "--slo-p95-ms", "other=50")
    assert ended.returncode == 2
    assert "--slo-p95-ms other=50 is for 'other', which is not served; name one of square" in ended.stderr
