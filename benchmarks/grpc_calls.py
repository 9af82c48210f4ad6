"""The Open Inference Protocol over gRPC beside HTTP: answers compared with their inputs, and calls a second.

Both protocols are served by one server, and called by NVIDIA's clients for asyncio.
Part one makes 5,000 calls of different inputs at once, over HTTP on 1,000 connections, and compares each answer with
its own input. Part two is a closed loop of 32 tasks, HTTP and gRPC in turns, with a device that takes a microsecond for
each batch.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support import harness
from benchmarks.support.processes import cpu_seconds

NAME = "grpc_calls"
CALLS = 5_000
CONNECTIONS = 1_000  # of HTTP; a server closes those beyond 4,096
TASKS = 32
SIZES = {"1 KB": ("kilobyte", 256), "150,528 bytes": ("image", 37_632)}  # models and floats
PROTOCOLS = ("HTTP", "gRPC")
_SOURCE = harness.ROOT / "benchmarks" / "servers" / "float_models.py"
_MODELS = (f"kilobyte={_SOURCE}:KilobyteOfFloats", f"image={_SOURCE}:ImageOfFloats")
_Infer = Callable[[str, NDArray[np.float32]], Awaitable[NDArray[np.float32]]]


@asynccontextmanager
async def client(protocol: str, address: str) -> AsyncIterator[_Infer]:
    """A function that makes one call of a model by this protocol."""
    module: Any = import_module(f"tritonclient.{protocol.lower()}.aio")
    limits = {} if protocol == "gRPC" else {"conn_limit": CONNECTIONS, "conn_timeout": 300.0}
    made = module.InferenceServerClient(address, **limits)

    async def infer(model: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        tensor = module.InferInput("x", [1, len(values)], "FP32")
        tensor.set_data_from_numpy(values[None])
        return np.asarray((await made.infer(model, [tensor])).as_numpy("y")[0])

    try:
        yield infer
    finally:
        await made.close()


async def compare(protocol: str, address: str) -> dict[str, int]:
    """Keep all calls open at once, and count answers that are not twice their input, and errors."""
    inputs = np.random.default_rng(0).standard_normal((CALLS, SIZES["1 KB"][1])).astype(np.float32)
    async with client(protocol, address) as infer:
        answers = await asyncio.gather(*(infer("kilobyte", each) for each in inputs), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    wrong = sum(
        not np.array_equal(answer, 2 * sent)
        for sent, answer in zip(inputs, answers, strict=True)
        if not isinstance(answer, BaseException)
    )
    for error in errors[:3]:
        print(f"  {error!r}", flush=True)
    return {"calls": CALLS, "wrong": wrong, "errors": len(errors)}


async def load(protocol: str, address: str, size: str, seconds: float) -> int:
    """Number of calls answered by a closed loop."""
    model, floats = SIZES[size]
    values, answered = np.zeros(floats, np.float32), 0

    async def loop(infer: _Infer, end: float) -> None:
        nonlocal answered
        while time.monotonic() < end:
            await infer(model, values)
            answered += 1

    async with client(protocol, address) as infer:
        await infer(model, values)
        end = time.monotonic() + seconds
        await asyncio.gather(*(loop(infer, end) for _ in range(TASKS)))
    return answered


def measure(profile: Path, seconds: float, rounds: int) -> dict[str, Any]:
    """Both parts on one server."""
    port = harness.free_port()
    flags = (
        "--device",
        "cpu",
        "--profile",
        str(profile),
        "--policy",
        "greedy",
        "--grpc-port",
        str(port),
    )
    with harness.serving(*_MODELS, *flags, "--queue-capacity", str(2 * CALLS)) as server:
        address = {"HTTP": server.url.removeprefix("http://"), "gRPC": f"127.0.0.1:{port}"}
        identity = {protocol: asyncio.run(compare(protocol, address[protocol])) for protocol in PROTOCOLS}
        rates: dict[str, list[dict[str, Any]]] = {protocol: [] for protocol in PROTOCOLS}
        for turn, size in product(range(rounds), SIZES):
            for protocol in PROTOCOLS[:: 1 if turn % 2 == 0 else -1]:
                before = cpu_seconds(server.process.pid)
                answered = asyncio.run(load(protocol, address[protocol], size, seconds))
                cpu = cpu_seconds(server.process.pid) - before
                cell = {"size": size, "calls_per_s": answered / seconds, "cpu_s_per_1000": 1e3 * cpu / answered}
                rates[protocol].append(cell)
                print(f"{size}, {protocol}: {answered / seconds:.0f}/s", flush=True)
    return {"identity": identity, "rates": rates}


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = []
    for size in SIZES:
        cells = [
            {key: median(run[key] for run in record["rates"][p] if run["size"] == size) for key in _COLUMNS}
            for p in PROTOCOLS
        ]
        http, grpc = cells
        columns = [f"{cell[key]:{form}}" for key, form in _COLUMNS.items() for cell in cells]
        ratio = grpc["calls_per_s"] / http["calls_per_s"]
        rows.append((size, *columns, f"{ratio:.2f}"))
    named = ("calls/s", "CPU s per 1,000 calls")
    columns = [f"{protocol}, {name}" for name in named for protocol in PROTOCOLS]
    text = harness.markdown_table(("body", *columns, "gRPC / HTTP, calls/s"), rows)
    counts = [*record["identity"].values()]
    calls, wrong, errors = (sum(count[key] for count in counts) for key in ("calls", "wrong", "errors"))
    return f"{text}\n\nAnswers compared with their own input: {calls}; wrong: {wrong}; errors: {errors}.\n"


_COLUMNS = {"calls_per_s": ".0f", "cpu_s_per_1000": ".2f"}


def main() -> None:
    """Measure and record."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a run (default: 6)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    chosen = parser.parse_args()
    with TemporaryDirectory() as folder:
        profile = harness.instant_profile(Path(folder))
        record = measure(profile, chosen.seconds, chosen.rounds)
    harness.save_record(NAME, record)
    harness.save_table(NAME, "gRPC beside HTTP", table(record))


if __name__ == "__main__":
    main()
