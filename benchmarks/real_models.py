"""Real models on the CPU beside the servers that their users would take otherwise, on the same arrivals.

Three models with real weights (benchmarks/servers/real_models.py): an image classifier from JPEG bytes, an encoder of
texts with the token counts of a production trace, and a voice detector on sounds of mixed lengths. Each server has the
same class: Batchwright with its defaults, LitServe without batching and with a grid of max_batch_size and
batch_timeout, and FastAPI without batching in a thread pool. `--before` adds Batchwright of another checkout. The
client runs beside the server, on the same cores. Pages of text are read by examples/read_text as a pipeline, by a
client that calls its two models, and by other servers with both in one class, which recognises the lines of a page in
one batch.

Loads are fractions of Batchwright's saturation, measured with as many clients as four batches. Servers take turns in
each round, each started anew. A cell has Poisson arrivals, the same for each server and another seed in each round,
after some seconds at the same rate that do not count, in which a server may learn. CPU time is that of all processes of
the server. A cell beside other load, of more than a fifth of a core, is measured again. Intervals are 95 % over rounds.
"""

import asyncio
import base64
import csv
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal

import aiohttp
import numpy as np
import psutil
import uvloop

from benchmarks.servers.real_models import MAX_TOKENS, SAMPLE_RATE, Encoder
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
from benchmarks.support.processes import cpu_seconds, running_peer
from examples.ocr.lines import random_line
from examples.read_text.page import draw_page
from examples.read_text.read import boxes_on, cut_line, fitted, read_page
from loadgen.client import JSON_LENGTH
from loadgen.precise_timer import precise_instants

NAME = "real_models"
EMBEDDINGS, PAGES = "Embeddings", "Pages"
MODELS = ("Classifier", "Encoder", "VoiceDetector", EMBEDDINGS, PAGES)
OURS, BEFORE, UNBATCHED = "Batchwright", "Batchwright, before", "FastAPI, no batching"
CLIENT = "Batchwright, a client that calls both models"
IN_ORDER, INFINITY = "FastAPI, batches in order of arrival", "Infinity"
GRID = tuple(product((4, 8, 16), (0.0, 0.01)))  # of LitServe: max_batch_size, batch_timeout, s
LOADS = (0.3, 0.6, 0.9)
LARGEST = 16
_SATURATING, _SATURATION_S = 4 * LARGEST, 12.0
_OTHER_LOAD, _ATTEMPTS = 0.2, 3  # cores; measurements of a cell
_BODIES = 64
_MOST_TOKENS = 250
_LONGEST_CELL = 600.0  # s
_WORDS = "a batch of texts takes as long as its longest one while the others wait for it and the padding costs time"


@dataclass(frozen=True)
class Target:
    """A running server: its process id, its URL, and how it takes a body: raw, in base64, or as OpenAI's interface.

    In the form "both" the client calls two models; `server` is one whose batch sizes are recorded.
    """

    pid: int
    url: str
    form: Literal["raw", "base64", "openai", "both"] = "raw"
    server: Server | None = None

    def call(self, body: bytes) -> HttpCall:
        """The call of a body."""
        if self.form == "both":
            return PageCalls(self.url, body, {})
        if self.form != "raw":
            document = {"body": base64.b64encode(body).decode()}
            if self.form == "openai":
                document = {"model": "model", "input": body.decode()}
            return HttpCall(self.url, json.dumps(document).encode(), {"Content-Type": "application/json"})
        return HttpCall(self.url, body, {"Content-Type": "application/octet-stream"})


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


def _batchwright(checkout: Path) -> Start:
    @contextmanager
    def start(model: str, _: bytes) -> Iterator[Target]:
        spec = f"model={ROOT / 'benchmarks' / 'servers' / 'real_models.py'}:{model}"
        command = ["env", "-C", str(checkout), f"PYTHONPATH={checkout}", *command_line("serve-model"), spec]
        with running(*command, "--device", "cpu", "--max-batch-size", str(LARGEST), ready_within=300) as server:
            yield Target(server.process.pid, f"{server.url}/predict")

    return start


def _peer(module: str, form: Literal["raw", "base64"], *arguments: str) -> Start:
    @contextmanager
    def start(model: str, body: bytes) -> Iterator[Target]:
        port = free_port()
        url = f"http://127.0.0.1:{port}/predict"
        command = [sys.executable, "-m", f"benchmarks.peer_servers.{module}", model, "--port", str(port), *arguments]
        with running_peer(command, Target(0, url, form).call(body), {}) as pid:
            yield Target(pid, url, form)

    return start


def _encoder_servers(infinity: str | None) -> dict[str, Start]:
    """Servers of the encoder by the interface of OpenAI, or as FastAPI's user would write it."""

    @contextmanager
    def ours(_: str, __: bytes) -> Iterator[Target]:
        spec = f"model=hf:{Encoder.folder()}"
        with serving(spec, "--device", "cpu", "--max-batch-size", str(LARGEST), ready_within=300) as server:
            yield Target(server.process.pid, f"{server.url}/v1/embeddings", "openai")

    @contextmanager
    def theirs(_: str, body: bytes) -> Iterator[Target]:
        assert infinity is not None
        port = free_port()
        url = f"http://127.0.0.1:{port}/embeddings"
        flags = ["--served-model-name", "model", "--batch-size", str(LARGEST), "--device", "cpu", "--engine", "torch"]
        model = ["--model-id", str(Encoder.folder()), "--host", "127.0.0.1", "--port", str(port)]
        with running_peer([infinity, "v2", *model, *flags], Target(0, url, "openai").call(body), {}) as pid:
            yield Target(pid, url, "openai")

    found: dict[str, Start] = {OURS: ours, IN_ORDER: _peer("real_fastapi_server", "raw", "--batch", str(LARGEST))}
    return found | ({INFINITY: theirs} if infinity else {})


def _page_servers() -> dict[str, Start]:
    """Servers of pages of text: by a pipeline, by two models that the client calls, or by both models in one."""

    def ours(form: Literal["raw", "both"]) -> Start:
        @contextmanager
        def start(_: str, __: bytes) -> Iterator[Target]:
            files = {"det": "read_text/detector.py:Detector", "rec": "ocr/model.py:Recogniser"}
            files |= {"read": "read_text/read.py:ReadText"}
            specs = [f"{name}={ROOT}/examples/{file}" for name, file in files.items()]
            with serving(*specs, "--device", "cpu", ready_within=300) as server:
                url = server.url if form == "both" else f"{server.url}/predict/read"
                yield Target(server.process.pid, url, form, server)

        return start

    lit, fast = _peer("real_litserve_server", "base64"), _peer("real_fastapi_server", "raw")
    return {OURS: ours("raw"), CLIENT: ours("both"), "LitServe": lit, "FastAPI": fast}


def servers(model: str, before: Path | None = None, infinity: str | None = None) -> dict[str, Start]:
    """How each server of a model is started, by name; `before` is a checkout of another commit."""
    if model == EMBEDDINGS:
        return _encoder_servers(infinity)
    if model == PAGES:
        return _page_servers()
    lit = {
        f"LitServe {size}, {1e3 * wait:g} ms": _peer(
            "real_litserve_server", "base64", "--batch", str(size), "--wait", str(wait)
        )
        for size, wait in GRID
    }
    return {
        OURS: _batchwright(ROOT),
        **({BEFORE: _batchwright(before)} if before else {}),
        "LitServe, no batching": _peer("real_litserve_server", "base64"),
        **lit,
        UNBATCHED: _peer("real_fastapi_server", "raw"),
    }


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


def _cell(target: Target, calls: Sequence[HttpCall], rate: float, requests: int, warm: float, seed: int) -> Any:
    """Figures of one cell; measured again while other processes take more than a fifth of a core."""
    rng = np.random.default_rng(seed)
    count = min(requests, math.ceil(_LONGEST_CELL * rate))
    arrivals = np.cumsum(rng.exponential(1 / rate, count + math.ceil(warm * rate)))
    attempt = 1
    while True:
        batches, before = _batches(target), _times(target.pid)
        responses, errors = uvloop.run(open_loop(calls, arrivals.tolist()))
        wall, server, other = (after - start for after, start in zip(_times(target.pid), before, strict=True))
        if other / wall <= _OTHER_LOAD or attempt == _ATTEMPTS:
            break
        print(f"  {other / wall:.2f} cores of other load: measured again", flush=True)
        attempt += 1
    counted = np.array(responses[-count:])
    good = counted[np.isfinite(counted)]
    return {
        "rate": rate,
        "requests": count,
        "errors": errors,
        "mean_ms": 1e3 * float(good.mean()),
        "p50_ms": 1e3 * float(np.quantile(good, 0.5)),
        "p95_ms": 1e3 * float(np.quantile(good, 0.95)),
        "cpu_s_per_1000": 1e3 * server / len(responses),
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


def _measure(model: str, names: Sequence[str] | None, chosen: Any) -> dict[str, Any]:
    """All rounds of one model."""
    known = servers(model, chosen.before, chosen.infinity)
    starts = {name: start for name, start in known.items() if not names or name in names}
    sent = bodies(model, chosen.trace)
    found: dict[str, Any] = {"first_answer_s": {}, "saturation": {}, "runs": {name: [] for name in starts}}
    saturation = chosen.saturation
    for number in range(chosen.rounds):
        for name, start in starts.items():
            began = time.monotonic()
            with start(model, sent[0]) as target:
                calls = [target.call(body) for body in sent]
                uvloop.run(_answer(calls[0]))
                found["first_answer_s"].setdefault(name, []).append(time.monotonic() - began)
                saturated = uvloop.run(_saturation(calls, _SATURATION_S))
                found["saturation"].setdefault(name, []).append(saturated)
                saturation = saturation or saturated
                for load in chosen.loads:
                    seed = int(1000 * load) + 7 * number
                    cell = _cell(target, calls, load * saturation, chosen.requests, chosen.warm, seed)
                    found["runs"][name].append({"round": number, "load": load, **cell})
                    print(
                        f"{model} {number} {name} {load}: {cell['mean_ms']:.1f} ({cell['p95_ms']:.0f}) ms", flush=True
                    )
    return found


async def _answer(call: HttpCall) -> None:
    async with _session() as session:
        if not await _post(session, call):
            raise RuntimeError(f"{call.url} answers with an error")


def table(record: Mapping[str, Any]) -> str:
    """The record as a Markdown table of each model: mean (p95), ms, by load, saturation, and the first answer."""
    parts = []
    for model, found in record.items():
        loads = sorted({run["load"] for runs in found["runs"].values() for run in runs})
        head = ["server", *(f"load {load:g}" for load in loads), "saturation, 1/s", "first answer, s", "CPU s a 1,000"]
        rows = []
        for name, runs in found["runs"].items():
            cells = [_figure([run for run in runs if run["load"] == load]) for load in loads]
            cpu = np.mean([run["cpu_s_per_1000"] for run in runs])
            first, most = found["first_answer_s"][name][0], np.mean(found["saturation"][name])
            rows.append([name, *cells, f"{most:.1f}", f"{first:.1f}", f"{cpu:.1f}"])
        parts.append(f"### {model}\n\n{markdown_table(head, rows)}\n")
    return "\n".join(parts)


def _figure(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return ""
    mean, width = confidence_interval([run["mean_ms"] for run in runs])
    half = f" ± {width:.0f}" if len(runs) > 1 else ""
    errors = sum(run["errors"] for run in runs)
    return f"{mean:.0f}{half} ({np.mean([run['p95_ms'] for run in runs]):.0f})" + (
        f", {errors} errors" if errors else ""
    )


def main() -> None:
    """Measure, print and record."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--servers", nargs="+", help="default: all")
    parser.add_argument("--infinity", help="path of the command infinity_emb, in an environment of its own")
    parser.add_argument("--before", type=Path, help="checkout of another commit, whose server is measured, too")
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000, help="that count in each cell; at most ten minutes")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds of each cell that do not count")
    parser.add_argument("--saturation", type=float, help="1/s, to which loads refer (default: Batchwright's, measured)")
    parser.add_argument("--record", default=NAME, help="name of the record")
    add_trace_argument(parser)
    parser.set_defaults(trace=TRACE)
    chosen = parser.parse_args()
    record: dict[str, Any] = load_record(chosen.record)
    with temporary_cache():
        for model in chosen.models:
            record[model] = _measure(model, chosen.servers, chosen)
            save_record(chosen.record, record)
    save_table(chosen.record, "Real models on a CPU", table(record))


if __name__ == "__main__":
    main()
