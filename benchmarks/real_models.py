"""Real models on the CPU beside the servers that their users would take otherwise, on the same arrivals.

Three models with real weights (benchmarks/servers/real_models.py): an image classifier from JPEG bytes, an encoder of
texts with the token counts of a production trace, and a voice detector on sounds of mixed lengths. Each server has the
same class: Batchwright with its defaults and with a bound on the 95th percentile, LitServe and FastAPI without
batching, and LitServe, mosec, BentoML, Ray Serve and Triton with a grid of the largest batch and the time that it is
waited for, or, of BentoML, the latency above which it rejects. Peers have environments of their own. `--before` adds
Batchwright of another checkout. The client runs beside the server, on the same cores. Pages of text are read by
examples/read_text as a pipeline, by a client that calls its two models, and by other servers with both in one class,
which recognises the lines of a page in one batch. Those servers do not batch pages.

Loads are fractions of Batchwright's saturation, measured with as many clients as four batches. The bound is four times
the response time of a call alone at Batchwright. Servers take turns in each round, each started anew, and answer all
bodies at once, which is compared with the library's answers. A cell has Poisson arrivals, the same for each server and
another seed in each round, after some seconds at the same rate that do not count, in which a server may learn. CPU time
is that of all processes of the server. A cell beside other load, of more than a fifth of a core, is measured again.
`--add` measures further servers at the loads of the record. Intervals are 95 % over rounds. Lines of code are those of
a server's script beside the class, without docstrings.
"""

import ast
import asyncio
import base64
import csv
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
import psutil
import uvloop

from benchmarks.servers import real_models
from benchmarks.servers.real_models import MAX_TOKENS, SAMPLE_RATE, Encoder, serve_alike
from benchmarks.support.calls import HttpCall, tensor_call
from benchmarks.support.harness import (
    ROOT,
    TRACE,
    Server,
    add_trace_argument,
    argument_parser,
    command_line,
    confidence_interval,
    free_port,
    load_record,
    markdown_table,
    running,
    save_record,
    save_table,
    serving,
    temporary_cache,
)
from benchmarks.support.peer_environments import PACKAGES, peer_python, peer_version
from benchmarks.support.processes import cpu_seconds, resource_usage, running_peer
from examples.ocr.lines import random_line
from examples.read_text.page import draw_page
from examples.read_text.read import boxes_on, cut_line, fitted, read_page
from loadgen.client import JSON_LENGTH
from loadgen.precise_timer import precise_instants

NAME = "real_models"
EMBEDDINGS, PAGES = "Embeddings", "Pages"
MODELS = ("Classifier", "Encoder", "VoiceDetector", EMBEDDINGS, PAGES)
OURS, BOUNDED, BEFORE = "Batchwright", "Batchwright with the bound", "Batchwright, before"
UNBATCHED = "FastAPI, no batching"
CLIENT = "Batchwright, a client that calls both models"
IN_ORDER, INFINITY = "FastAPI, batches in order of arrival", "Infinity"
GRID = tuple(product((4, 8, 16), (0.0, 0.01)))  # largest batch, and the time that it is waited for, s
LOADS = (0.3, 0.6, 0.9, 1.5)
LOSS = "†"
_BOUND, _ALONE = 4.0, 25  # of the response time of a call alone: the bound; calls to measure that
LARGEST = 16
_SATURATING, _SATURATION_S = 4 * LARGEST, 12.0
_OTHER_LOAD, _ATTEMPTS = 0.2, 3  # cores; measurements of a cell
_BODIES = 64
_MOST_TOKENS = 250
_BY_SERVER = ("left_out", "first_answer_s", "saturation", "wrong", "runs", "versions")  # of the record of a model
_LONGEST_CELL = 600.0  # s
_WORDS = "a batch of texts takes as long as its longest one while the others wait for it and the padding costs time"


Call = Callable[[bytes], HttpCall]


@dataclass(frozen=True)
class Target:
    """A running server: its process id, the call of a body, and, where its batch sizes are recorded, our server."""

    pid: int
    call: Call
    server: Server | None = None


def raw(url: str) -> Call:
    """Calls with the body as it is."""
    return lambda body: HttpCall(url, body, {"Content-Type": "application/octet-stream"})


def in_json(url: str, document: Callable[[str], Mapping[str, Any]]) -> Call:
    """Calls with JSON that has the body in base64."""

    def call(body: bytes) -> HttpCall:
        content = json.dumps(document(base64.b64encode(body).decode())).encode()
        return HttpCall(url, content, {"Content-Type": "application/json"})

    return call


def openai(url: str) -> Call:
    """Calls of OpenAI's interface for embeddings."""

    def call(body: bytes) -> HttpCall:
        content = json.dumps({"model": "model", "input": body.decode()}).encode()
        return HttpCall(url, content, {"Content-Type": "application/json"})

    return call


def in_tensor(url: str) -> Call:
    """Calls of the Open Inference Protocol with the body as one value of type BYTES."""
    tensor, outputs = {"name": "body", "shape": [1, 1], "datatype": "BYTES"}, [{"name": "answer"}]
    return lambda body: tensor_call(url, tensor, len(body).to_bytes(4, "little") + body, outputs)


@dataclass(frozen=True)
class PageCalls(HttpCall):
    """Calls of a client that has the lines of a page detected, cuts them out, and has them recognised.

    The URL is the server's.
    """

    async def post(self, session: aiohttp.ClientSession) -> bool:
        """Make the calls; whether all are answered."""
        page = read_page(self.body)
        whole, ratio = fitted(page)
        async with _posted(session, self._call("det", whole, "boxes")) as response:
            content = await response.read()
            if response.status != 200:
                return False
        found = np.frombuffer(content[int(response.headers[JSON_LENGTH]) :], np.int32).reshape(-1, 4)
        lines = [self._call("rec", cut_line(page, box), "text") for box in boxes_on(page, found, ratio)]
        return all(await asyncio.gather(*(_post(session, line) for line in lines)))

    def _call(self, model: str, image: Any, output: str) -> HttpCall:
        tensor = {"name": "image", "shape": [1, *image.shape], "datatype": "FP32"}
        outputs = [{"name": output, "parameters": {"binary_data": True}}]
        return tensor_call(f"{self.url}/v2/models/{model}/infer", tensor, image.tobytes(), outputs)


Start = Callable[[str, bytes], AbstractContextManager[Target]]


def _batchwright(checkout: Path, *more: str) -> Start:
    @contextmanager
    def start(model: str, _: bytes) -> Iterator[Target]:
        spec = f"model={ROOT / 'benchmarks' / 'servers' / 'real_models.py'}:{model}"
        command = ["env", "-C", str(checkout), f"PYTHONPATH={checkout}", *command_line("serve-model"), spec]
        flags = ("--device", "cpu", "--max-batch-size", str(LARGEST), *more)
        with running(*command, *flags, ready_within=300) as server:
            yield Target(server.process.pid, raw(f"{server.url}/predict"))

    return start


def _peer(environment: str | None, command: Callable[[str, int], Sequence[str]], call: Callable[[str], Call]) -> Start:
    """A peer in its environment, None for ours; `command` are the interpreter's arguments for a model and a port."""

    @contextmanager
    def start(model: str, body: bytes) -> Iterator[Target]:
        port = free_port()
        python = sys.executable if environment is None else peer_python(environment)
        made = call(f"http://127.0.0.1:{port}")
        with running_peer([python, "-m", *command(model, port)], made(body), {}, ready_within=120) as pid:
            yield Target(pid, made)

    return start


def _script(name: str, *arguments: str) -> Callable[[str, int], Sequence[str]]:
    return lambda model, port: (f"benchmarks.peer_servers.{name}", model, "--port", str(port), *arguments)


def _litserve(*arguments: str) -> Start:
    script = _script("real_litserve_server", *arguments)
    return _peer("litserve", script, lambda url: in_json(f"{url}/predict", lambda body: {"body": body}))


def _litserve_batches(batch: int, wait: float) -> Start:
    return _litserve("--batch", str(batch), "--wait", str(wait))


def _fastapi(*arguments: str) -> Start:
    return _peer(None, _script("real_fastapi_server", *arguments), lambda url: raw(f"{url}/predict"))


def _mosec(batch: int, wait: float) -> Start:
    script = _script("real_mosec_server", "--batch", str(batch), "--wait", str(max(1, round(1e3 * wait))))
    return _peer("mosec", script, lambda url: raw(f"{url}/inference"))


def _bentoml(batch: int, wait: float) -> Start:
    script = _script("real_bentoml_server", "--batch", str(batch), "--wait", str(max(1, round(1e3 * wait))))
    return _peer("bentoml", script, lambda url: in_json(f"{url}/predict", lambda body: {"bodies": [body]}))


def _ray(batch: int, wait: float) -> Start:
    script = _script("real_ray_server", "--batch", str(batch), "--wait", str(wait))
    return _peer("ray", script, lambda url: raw(f"{url}/predict"))


def _triton(batch: int, wait: float) -> Start:
    script = _script("real_triton_server", "--batch", str(batch), "--wait", str(round(1e3 * wait)))
    return _peer("triton", script, lambda url: in_tensor(f"{url}/v2/models/model/infer"))


def _infinity(_: str, port: int) -> Sequence[str]:
    model = ["--model-id", str(Encoder.folder()), "--host", "127.0.0.1", "--port", str(port)]
    flags = ["--served-model-name", "model", "--batch-size", str(LARGEST), "--device", "cpu", "--engine", "torch"]
    return ["infinity_emb.cli", "v2", *model, *flags]


_SCRIPTS = {
    name: f"real_{name.split()[0].lower()}_server"
    for name in ("LitServe", "mosec", "BentoML", "Ray Serve", "Triton", "FastAPI")
}
PEERS = {"LitServe": _litserve_batches, "mosec": _mosec, "BentoML": _bentoml, "Ray Serve": _ray, "Triton": _triton}
SETTINGS = {
    "LitServe": GRID,
    "mosec": tuple((batch, max(wait, 0.001)) for batch, wait in GRID),  # 0 would mean its default, 10 ms
    "BentoML": (
        (LARGEST, 1.0),
        (LARGEST, 60.0),
        (100, 60.0),
    ),  # the latency above which it rejects, not a wait; default
    "Ray Serve": (*GRID, (10, 0.01)),  # with its default
    "Triton": GRID,
}


def _embedding_servers() -> dict[str, Start]:
    """Servers of the encoder by the interface of OpenAI, or as FastAPI's user would write it."""

    @contextmanager
    def ours(_: str, __: bytes) -> Iterator[Target]:
        spec = f"model=hf:{Encoder.folder()}"
        with serving(spec, "--device", "cpu", "--max-batch-size", str(LARGEST), ready_within=300) as server:
            yield Target(server.process.pid, openai(f"{server.url}/v1/embeddings"))

    infinity = _peer("infinity", _infinity, lambda url: openai(f"{url}/embeddings"))
    return {OURS: ours, IN_ORDER: _fastapi("--batch", str(LARGEST)), INFINITY: infinity}


def _page_servers() -> dict[str, Start]:
    """Servers of pages of text: by a pipeline, by two models that the client calls, or by both models in one."""

    def ours(call: Callable[[str], Call]) -> Start:
        @contextmanager
        def start(_: str, __: bytes) -> Iterator[Target]:
            files = {"det": "read_text/detector.py:Detector", "rec": "ocr/model.py:Recogniser"}
            files |= {"read": "read_text/read.py:ReadText"}
            specs = [f"{name}={ROOT}/examples/{file}" for name, file in files.items()]
            with serving(*specs, "--device", "cpu", ready_within=300) as server:
                yield Target(server.process.pid, call(server.url), server)

        return start

    pipeline, both = (
        ours(lambda url: raw(f"{url}/predict/read")),
        ours(lambda url: lambda body: PageCalls(url, body, {})),
    )
    peers = {name: start(1, SETTINGS[name][-1][1]) for name, start in PEERS.items()}
    return {OURS: pipeline, CLIENT: both, **peers, "FastAPI": _fastapi()}


def servers(model: str, bound: float | None = None, before: Path | None = None) -> dict[str, Start]:
    """How each server of a model is started, by name.

    Args:
        model: one of MODELS.
        bound: that Batchwright keeps for 95 % of the requests in one of its rows, ms; None: there is no such row.
        before: a checkout of another commit, for a row of its own.
    """
    if model == EMBEDDINGS:
        return _embedding_servers()
    if model == PAGES:
        return _page_servers()
    found = {OURS: _batchwright(ROOT)}
    found |= {BOUNDED: _batchwright(ROOT, "--slo-p95-ms", f"{bound:g}")} if bound else {}
    found |= {BEFORE: _batchwright(before)} if before else {}
    found |= {"LitServe, no batching": _litserve(), UNBATCHED: _fastapi()}
    for name, settings in SETTINGS.items():
        for batch, wait in settings:
            found[f"{name} {batch}, {1e3 * wait:g} ms"] = PEERS[name](batch, wait)
    return found


def bodies(model: str, trace: Path) -> list[bytes]:
    """Bodies of calls: photographs in JPEG, texts with the trace's numbers of tokens, sounds, or pages of text."""
    rng = np.random.default_rng(0)
    if model == "Classifier":
        return _photographs(rng)
    if model in ("Encoder", EMBEDDINGS):
        with trace.open() as file:
            tokens = np.array([int(row["ContextTokens"]) for row in csv.DictReader(file)])
        words, each = _WORDS.split(), 1.0
        if model == EMBEDDINGS:  # which no server cuts, so that one word in fifteen may be two tokens
            tokens, each = tokens.clip(5, _MOST_TOKENS), 1.12
        counts = np.maximum(1, (rng.choice(tokens.clip(max=MAX_TOKENS), _BODIES) - 2) / each).astype(int)
        return [" ".join(rng.choice(words, count)).encode() for count in counts]
    if model == PAGES:
        random = Random(0)
        counts = rng.integers(1, 13, _BODIES)
        return [draw_page([random_line(random, random.randint(4, 40)) for _ in range(count)]) for count in counts]
    seconds = np.clip(rng.lognormal(0.5, 0.7, _BODIES), 0.3, 8.0)
    sounds = [rng.normal(0.0, 3000.0, round(length * SAMPLE_RATE)) for length in seconds]
    return [sound.clip(-32768, 32767).astype("<i2").tobytes() for sound in sounds]


def _photographs(rng: np.random.Generator) -> list[bytes]:
    import skimage.data
    from PIL import Image

    reads: tuple[Any, ...] = (skimage.data.astronaut, skimage.data.chelsea, skimage.data.coffee)
    images = [Image.fromarray(read()) for read in reads]
    encoded = []
    for index in range(_BODIES):
        image = images[index % len(images)]
        side = int(rng.integers(200, 300))
        left, top = int(rng.integers(0, image.width - side)), int(rng.integers(0, image.height - side))
        buffer = io.BytesIO()
        image.crop((left, top, left + side, top + side)).resize((400, 400)).save(buffer, "JPEG", quality=85)
        encoded.append(buffer.getvalue())
    return encoded


def _posted(session: aiohttp.ClientSession, call: HttpCall) -> Any:
    return session.post(call.url, data=call.body, headers=call.headers)


async def _post(session: aiohttp.ClientSession, call: HttpCall) -> bool:
    if isinstance(call, PageCalls):
        return await call.post(session)
    async with _posted(session, call) as response:
        await response.read()
        answered: bool = response.status == 200
        return answered


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_LONGEST_CELL)
    )


async def _saturation(calls: Sequence[HttpCall], seconds: float) -> float:
    """Answers a second, with clients that send their next call after each answer; the first third does not count."""
    begin, end = time.monotonic() + seconds / 3, time.monotonic() + seconds
    answered = 0

    async def client(session: aiohttp.ClientSession, index: int) -> None:
        nonlocal answered
        while time.monotonic() < end:
            good = await _post(session, calls[index % len(calls)])
            answered += good and begin <= time.monotonic() < end
            index += _SATURATING

    async with _session() as session, asyncio.TaskGroup() as tasks:
        for index in range(_SATURATING):
            tasks.create_task(client(session, index))
    return answered / (end - begin)


async def open_loop(calls: Sequence[HttpCall], instants: Sequence[float]) -> tuple[list[float], int]:
    """Response times of the answers, s, from the scheduled instants, and the number of errors."""
    responses, errors = [0.0] * len(instants), 0
    start = time.monotonic()

    async def send(session: aiohttp.ClientSession, index: int, at: float) -> None:
        nonlocal errors
        try:
            good = await _post(session, calls[index % len(calls)])
        except (aiohttp.ClientError, TimeoutError):
            good = False
        errors += not good
        responses[index] = time.monotonic() - start - at if good else math.inf

    async with _session() as session, asyncio.TaskGroup() as tasks:
        with precise_instants(instants, lambda: time.monotonic() - start) as due:
            for index, at in enumerate(instants):
                await due.acquire()
                tasks.create_task(send(session, index, at))
    return responses, errors


@dataclass(frozen=True)
class Known:
    """What is known of a model before servers are compared.

    Attributes:
        saturation: answers a second of Batchwright, to which loads refer.
        bound: four times the response time of a call alone at Batchwright, ms.
        answers: of the library to each body, without a server.
    """

    saturation: float
    bound: float
    answers: Sequence[Any]


def _cell(target: Target, calls: Sequence[HttpCall], known: Known, load: float, chosen: Any, seed: int) -> Any:
    """Figures of one cell; measured again while other processes take more than a fifth of a core."""
    rng, rate = np.random.default_rng(seed), load * known.saturation
    count = min(chosen.requests, math.ceil(_LONGEST_CELL * rate))
    arrivals = np.cumsum(rng.exponential(1 / rate, count + math.ceil(chosen.warm * rate)))
    attempt = 1
    while True:
        batches, before = _batches(target), _times(target.pid)
        responses, errors = uvloop.run(open_loop(calls, arrivals.tolist()))
        wall, server, other = (after - start for after, start in zip(_times(target.pid), before, strict=True))
        if other / wall <= _OTHER_LOAD or attempt == _ATTEMPTS:
            break
        print(f"  {other / wall:.2f} cores of other load: measured again", flush=True)
        attempt += 1
    counted, begin, ends = np.array(responses[-count:]), arrivals[-count], arrivals + np.array(responses)
    good = counted[np.isfinite(counted)]
    if not len(good):
        raise RuntimeError(f"none of {count} calls at {rate:.3g}/s was answered")
    within = int((1e3 * counted <= known.bound).sum())
    p50, p95, p99 = (1e3 * float(np.quantile(good, share)) for share in (0.5, 0.95, 0.99))
    return {
        "rate": rate,
        "requests": count,
        "errors": errors,
        "mean_ms": 1e3 * float(good.mean()),
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "within": within / count,
        "answered_hz": int(((begin <= ends) & (ends <= arrivals[-1])).sum()) / float(arrivals[-1] - begin),
        "cpu_s_per_1000": 1e3 * server / max(len(responses) - errors, 1),
        "rss_mb": resource_usage(target.pid).rss_mb,
        "other_cores": other / wall,
        **({"batch_sizes": _sizes_since(target, batches)} if batches else {}),
    }


def _batches(target: Target) -> dict[str, tuple[float, float]]:
    """Number of requests and of batches of each model so far; empty where they are not recorded."""
    if target.server is None:
        return {}
    sizes, counts = (target.server.by_label(f"batchwright_batch_size_{each}", "model") for each in ("sum", "count"))
    return {name: (size, counts[name]) for name, size in sizes.items()}


def _sizes_since(target: Target, before: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Mean batch size of each model since then, requests."""
    return {
        name: (size - before[name][0]) / (count - before[name][1])
        for name, (size, count) in _batches(target).items()
        if count > before[name][1]
    }


def _times(pid: int) -> tuple[float, float, float]:
    """Instant, CPU time of the server so far, and that of all processes but the server and this one, s."""
    whole, own, server = psutil.cpu_times(), psutil.Process().cpu_times(), cpu_seconds(pid)
    busy = whole.user + whole.system + whole.nice + getattr(whole, "irq", 0.0) + getattr(whole, "softirq", 0.0)
    return time.monotonic(), server, busy - own.user - own.system - server


def _known(model: str, sent: Sequence[bytes], saturation: float | None) -> Known:
    with servers(model)[OURS](model, sent[0]) as target:
        calls = [target.call(body) for body in sent]
        alone = uvloop.run(_alone(calls))
        saturation = saturation or uvloop.run(_saturation(calls, _SATURATION_S))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        answers = pool.submit(answers_of_library, model, sent).result()
    return Known(saturation, _BOUND * 1e3 * alone, answers)


async def _alone(calls: Sequence[HttpCall]) -> float:
    """Median response time of calls one after the other, s."""
    times = []
    async with _session() as session:
        for call in calls[:_ALONE]:
            began = time.monotonic()
            await _post(session, call)
            times.append(time.monotonic() - began)
    return float(np.median(times))


def answers_of_library(model: str, sent: Sequence[bytes]) -> list[Any]:
    """The model's answer to each body, one at a time, without a server."""
    loaded: Any = real_models.MODELS[model]()
    loaded.load("cpu")
    return [loaded.render(serve_alike(loaded, [loaded.decode(body, "")])[0]) for body in sent]


async def _wrong(calls: Sequence[HttpCall], answers: Sequence[Any]) -> int:
    """The number of calls, all made at once, whose answer is not that of the library."""

    async def is_wrong(session: aiohttp.ClientSession, call: HttpCall, answer: Any) -> bool:
        async with _posted(session, call) as response:
            return response.status != 200 or not has_answer(await response.json(content_type=None), answer)

    async with _session() as session:
        return sum(await asyncio.gather(*map(partial(is_wrong, session), calls, answers)))


def has_answer(document: Any, answer: Mapping[str, Any]) -> bool:
    """Whether a response has the library's answer in it, numbers to a hundredth, since batches change last digits."""
    if isinstance(document, str) and document.startswith("{"):
        document = json.loads(document)
    if isinstance(document, list):
        return any(has_answer(each, answer) for each in document)
    if not isinstance(document, dict):
        return False
    if document.keys() >= answer.keys():
        return all(_alike(document[key], value) for key, value in answer.items())
    return any(has_answer(each, answer) for each in document.values())


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, list) and expected and not isinstance(expected[0], str):
        longer = isinstance(found, list) and len(found) >= len(expected)  # the answer may have more
        return longer and all(map(_alike, found, expected))
    if isinstance(expected, float):
        return isinstance(found, float | int) and bool(np.isclose(found, expected, rtol=1e-2, atol=1e-3))
    return bool(found == expected)


def _measure(model: str, chosen: Any, former: Mapping[str, Any] | None) -> dict[str, Any]:
    """All rounds of one model; the rows are added to a `former` record, at its loads and with its bound."""
    sent = bodies(model, chosen.trace)
    known = _known(model, sent, former["load_1_hz"] if former else chosen.saturation)
    if former:
        known = replace(known, bound=former["bound_ms"])
    all_servers = servers(model, known.bound, chosen.before)
    starts = {name: start for name, start in all_servers.items() if any(map(name.startswith, chosen.servers or [""]))}
    found: dict[str, Any] = {"bound_ms": known.bound, "load_1_hz": known.saturation, **{key: {} for key in _BY_SERVER}}
    for peer in [name for name in PACKAGES if any(name in start.lower() for start in starts)]:
        with suppress(RuntimeError):  # its rows say so below
            found["versions"][peer] = peer_version(peer)  # installs it before the time to the first answer
    for number in range(chosen.rounds):
        for name, start in starts.items():
            if name in found["left_out"]:
                continue
            began = time.monotonic()
            try:
                with start(model, sent[0]) as target:
                    calls = [target.call(body) for body in sent]
                    uvloop.run(_answer(calls[0]))
                    found["first_answer_s"].setdefault(name, []).append(time.monotonic() - began)
                    if not isinstance(calls[0], PageCalls):
                        found["wrong"][name] = found["wrong"].get(name, 0) + uvloop.run(_wrong(calls, known.answers))
                    found["saturation"].setdefault(name, []).append(uvloop.run(_saturation(calls, _SATURATION_S)))
                    for load in chosen.loads:
                        cell = _cell(target, calls, known, load, chosen, int(1000 * load) + 7 * number)
                        found["runs"].setdefault(name, []).append({"round": number, "load": load, **cell})
                        figures = f"{cell['mean_ms']:.1f} ({cell['p95_ms']:.0f}) ms"
                        print(f"{model} {number} {name} {load:g}: {figures}", flush=True)
            except Exception as error:  # noqa: BLE001  (a peer that fails must not end a day of measurements)
                print(f"{model} {name} is left out: {error!r}", flush=True)
                found["left_out"][name] = repr(error)
    if former:
        kept = {key: {name: each for name, each in former[key].items() if name not in starts} for key in _BY_SERVER}
        found |= {key: kept[key] | found[key] for key in _BY_SERVER}
    return found


def lines_beside_the_class(server: str) -> int:
    """Lines of the script with which a server serves the class, as `ast` writes them, without docstrings."""
    script = next((script for name, script in _SCRIPTS.items() if server.startswith(name)), None)
    if script is None:
        return 0  # its command takes the class, or the model
    tree = ast.parse((ROOT / "benchmarks" / "peer_servers" / f"{script}.py").read_text())
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return len([line for line in ast.unparse(tree).splitlines() if line.strip()])


async def _answer(call: HttpCall) -> None:
    async with _session() as session:
        if not await _post(session, call):
            raise RuntimeError(f"{call.url} answers with an error")


def table(record: Mapping[str, Any]) -> str:
    """The record as Markdown: response times of all models, then shares."""
    return f"{means_table(record)}\n## Shares\n\n{shares_table(record)}"


def means_table(record: Mapping[str, Any]) -> str:
    """Response times at each load, of each model; the best mean of each load is bold, and our losses are marked."""
    return "\n".join(f"### {model}{_scale(found)}\n\n{_means(found)}\n" for model, found in record.items())


def shares_table(record: Mapping[str, Any]) -> str:
    """Shares within the bound, answers a second at the highest load, memory, wrong answers and lines of code."""
    return "\n".join(f"### {model}\n\n{_shares(found)}" for model, found in record.items() if "bound_ms" in found)


def _scale(found: Mapping[str, Any]) -> str:
    """The rate of load 1, and the requests of a cell; empty for a record of former versions."""
    if "load_1_hz" not in found:
        return ""
    counts = {run["requests"] for runs in found["runs"].values() for run in runs}
    return f": load 1 is {found['load_1_hz']:.0f}/s, {max(counts)} requests a cell"


def _loads(found: Mapping[str, Any]) -> list[float]:
    return sorted({run["load"] for runs in found["runs"].values() for run in runs})


def _means(found: Mapping[str, Any]) -> str:
    loads = _loads(found)
    others = {name: runs for name, runs in found["runs"].items() if not name.startswith(OURS)}
    best, best_other = _best_means(found["runs"], loads), _best_means(others, loads)
    loads_shown = [f"load {load:g}" for load in loads]
    head = ["server", *loads_shown, "throughput, 1/s", "first answer, s", "CPU s per 1,000"]
    rows = []
    for name, runs in found["runs"].items():
        by_load = {load: [run for run in runs if run["load"] == load] for load in loads}
        cells = [_figure(by_load[load], best[load], None if name in others else best_other[load]) for load in loads]
        cpu = np.mean([run["cpu_s_per_1000"] for run in runs])
        first, most = found["first_answer_s"][name][0], np.mean(found["saturation"][name])
        rows.append([name, *cells, f"{most:.1f}", f"{first:.1f}", f"{cpu:.1f}"])
    return markdown_table(head, rows)


def _best_means(servers: Mapping[str, Any], loads: Sequence[float]) -> dict[float, float]:
    """The least mean at each load, ms, of the servers that answered nearly all calls; inf without one."""
    whole = {load: [runs for runs in servers.values() if _all(runs, load)] for load in loads}
    return {load: min((_mean(runs, load, "mean_ms") for runs in whole[load]), default=math.inf) for load in loads}


def _shares(found: Mapping[str, Any]) -> str:
    loads = _loads(found)
    head = [
        "server",
        *(f"within {found['bound_ms']:.0f} ms at {load:g}" for load in loads),
        f"answers at {loads[-1]:g}, 1/s",
        "p99 at that, ms",
        "RSS, MB",
        "wrong answers",
        "lines of code",
    ]
    rows = []
    for name, runs in found["runs"].items():
        shares = [f"{_mean(runs, load, 'within'):.3f}" for load in loads]
        answered, p99 = (_mean(runs, loads[-1], key) for key in ("answered_hz", "p99_ms"))
        memory = max(run["rss_mb"] for run in runs)
        wrong, lines = str(found["wrong"].get(name, "")), str(lines_beside_the_class(name))
        rows.append([name, *shares, f"{answered:.1f}", f"{p99:.0f}", f"{memory:.0f}", wrong, lines])
    left_out = "".join(f"\n- {name} is left out: {reason}\n" for name, reason in found["left_out"].items())
    versions = ", ".join(f"{peer} {version}" for peer, version in found.get("versions", {}).items())
    return f"{markdown_table(head, rows)}\n{left_out}" + (f"\nVersions: {versions}.\n" if versions else "")


def _mean(runs: Sequence[Mapping[str, Any]], load: float, key: str) -> float:
    return float(np.mean([run[key] for run in runs if run["load"] == load] or [math.nan]))


def _all(runs: Sequence[Mapping[str, Any]], load: float) -> bool:
    """Whether a server was measured at a load, and answered nearly all calls: means of a part are no comparison."""
    cells = [run for run in runs if run["load"] == load]
    return bool(cells) and sum(run["errors"] for run in cells) <= 0.01 * sum(run["requests"] for run in cells)


def marked_loss(ours: float, best: float) -> str:
    """A mark for our mean where another server's is less by more than 3 per cent."""
    return LOSS if ours > 1.03 * best else ""


def _figure(runs: Sequence[Mapping[str, Any]], best: float, best_other: float | None) -> str:
    """Mean and 95th percentile of a cell; a loss to `best_other` is marked, None for a server that is not ours."""
    if not runs:
        return ""
    mean, width = confidence_interval([run["mean_ms"] for run in runs])
    mark = "" if best_other is None else marked_loss(mean, best_other)
    shown = f"**{mean:.0f}**" if mean <= best else f"{mean:.0f}{mark}"
    half = f" ± {width:.0f}" if len(runs) > 1 else ""
    errors = sum(run["errors"] for run in runs)
    late = f", {errors} errors" if errors else ""
    return f"{shown}{half} ({np.mean([run['p95_ms'] for run in runs]):.0f}){late}"


def main() -> None:
    """Measure, print and record."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--servers", nargs="+", help="with what their names begin (default: all)")
    parser.add_argument("--before", type=Path, help="checkout of another commit, whose server is measured, too")
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000, help="that count in each cell; at most ten minutes")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds of each cell that do not count")
    parser.add_argument("--saturation", type=float, help="1/s, to which loads refer (default: Batchwright's, measured)")
    parser.add_argument("--add", action="store_true", help="keep the record's other servers, its loads and its bound")
    parser.add_argument("--record", default=NAME, help="name of the record")
    add_trace_argument(parser)
    parser.set_defaults(trace=TRACE)
    chosen = parser.parse_args()
    record: dict[str, Any] = load_record(chosen.record)
    with temporary_cache():
        for model in chosen.models:
            record[model] = _measure(model, chosen, record.get(model) if chosen.add else None)
            save_record(chosen.record, record)
    save_table(chosen.record, "Real models on a CPU", table(record))


if __name__ == "__main__":
    main()
