"""Open-loop client: each request is sent at its scheduled instant, independently of earlier responses.

Response times count from the scheduled instant, so that delays of the client itself are included.
"""

import asyncio
import importlib.util
import mimetypes
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import aiohttp
import numpy as np
import orjson
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from loadgen.report import OK, Record, Status
from policies.types import SpecError

GIVE_UP_AFTER = 300.0
_SETUP_TIMEOUT = aiohttp.ClientTimeout(total=10.0)  # for requests before the load starts
KEY_ERRORS = {401: "requires an API key", 403: "rejects this API key"}
_MIN_SLEEP = 1e-3  # s; uvloop rounds shorter sleeps down to 0, which would be a busy wait


class Response(NamedTuple):
    """Response of the server: status, and how the request was served; None where the response does not say."""

    status: Status
    batch_size: int | None = None
    waiting: float | None = None
    service: float | None = None
    energy: float | None = None


class Sender(Protocol):
    """Sends one request and waits for its response."""

    async def send(self) -> Response:
        """Send one request and return its response.

        Raises:
            TimeoutError: no response within the client's time-out.
            aiohttp.ClientError: the connection could not be made, or broke.
        """
        ...


@dataclass
class RunLog:
    """Log of a run, complete up to the present even if the run is interrupted.

    Attributes:
        sent: number of requests sent.
        errors: number of completed requests whose status is not 200.
        records: records of completed requests, in order of completion.
    """

    sent: int = 0
    errors: int = 0
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Add the record of a completed request."""
        self.records.append(record)
        self.errors += record.status != OK


async def offer(
    sender: Sender,
    instants: Iterable[float],
    log: RunLog,
    clock: Callable[[], float] = time.monotonic,
    start: float | None = None,
) -> None:
    """Send one request at each instant and wait for all responses.

    Args:
        sender: sends each request.
        instants: scheduled instants, s after the start, sorted.
        log: log of the run; requests in flight when this coroutine is cancelled are recorded as interrupted.
        clock: current time, s; not the loop's clock, which uvloop advances in steps of 1 ms.
        start: start of the run by that clock, s; None is now.
    """
    origin = clock() if start is None else start

    def elapsed() -> float:
        return clock() - origin

    async with asyncio.TaskGroup() as exchanges:
        for instant in instants:
            await _until(instant, elapsed)
            log.sent += 1
            exchanges.create_task(_exchange(sender, instant, elapsed, log))


async def _until(instant: float, elapsed: Callable[[], float]) -> None:
    """Sleep until the instant; return without yielding if it has passed, so that due requests are sent together."""
    while (remaining := instant - elapsed()) > 0:  # noqa: ASYNC110  (there is no event to await)
        await asyncio.sleep(max(remaining, _MIN_SLEEP))  # in a loop because uvloop's timers may fire early


async def _exchange(sender: Sender, scheduled: float, elapsed: Callable[[], float], log: RunLog) -> None:
    sent, response = elapsed(), Response("interrupted")
    try:
        response = await sender.send()
    except TimeoutError:
        response = Response("timeout")
    except (aiohttp.ClientError, OSError):
        response = Response("connection")
    finally:
        log.add(Record(scheduled, sent, elapsed(), *response))


def open_session(give_up_after: float = GIVE_UP_AFTER, key: str | None = None) -> aiohttp.ClientSession:
    """Open a session with keep-alive and one connection per request in flight; call it within the event loop.

    Args:
        give_up_after: time-out of a request, s.
        key: API key sent with every request; None for a server without keys.
    """
    headers = {"Accept-Encoding": "identity"}  # aiohttp's default asks for compressed responses
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
        timeout=aiohttp.ClientTimeout(total=give_up_after),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
    )


@dataclass(frozen=True)
class PostSender:
    """Sends one POST request for each body, in order, to /predict or by the Open Inference Protocol."""

    session: aiohttp.ClientSession
    url: str
    bodies: Iterator[bytes]
    headers: dict[str, str]

    async def send(self) -> Response:
        """Send one request; see Sender."""
        post = self.session.post(self.url, data=next(self.bodies), headers=self.headers, allow_redirects=False)
        async with post as response:
            status, document = response.status, read_object(await response.read())
        return to_response(status, document.get("parameters", document))  # /predict has the facts at the top level


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object; return an empty one if it is none."""
    with suppress(orjson.JSONDecodeError):
        document = orjson.loads(body)
        if isinstance(document, dict):
            return document
    return {}


def to_response(status: int, facts: Any) -> Response:
    """Make a Response of a status and the server's facts, which other servers' responses lack."""
    if status != OK or not isinstance(facts, dict):
        return Response(status)
    size = _number(facts, "batch_size")
    return Response(
        status,
        batch_size=int(size) if size and size >= 1 else None,
        waiting=_number(facts, "waiting_ms", 1e3),
        service=_number(facts, "service_ms", 1e3),
        energy=_number(facts, "energy_mj", 1e3),
    )


def _number(facts: dict[str, Any], key: str, divisor: float = 1.0) -> float | None:
    value = facts.get(key)
    return value / divisor if isinstance(value, int | float) else None


async def image_sender(session: aiohttp.ClientSession, url: str, model: str | None, image: Path | None) -> PostSender:
    """Prepare to send an image to the server at `url`; None is matplotlib's sample photograph.

    Raises:
        SpecError: there is no such file, no server, or no such model on it.
    """
    path = image or sample_photograph()
    try:
        body = path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read the image {str(path)!r} ({error.strerror}); give --image an image file") from None
    name = await find_model(session, url, model)
    target = f"{url}/predict" if name is None else f"{url}/predict/{quote(name, safe='')}"
    content_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return PostSender(session, target, repeat(body), {"Content-Type": content_type})


async def pixel_sender(session: aiohttp.ClientSession, url: str, model: str | None) -> PostSender:
    """Prepare to send pixels of the size in the model's metadata.

    Raises:
        SpecError: there is no server at `url`, no such model on it, or the model takes no pixels.
    """
    name = await find_model(session, url, model)
    if name is None:
        raise SpecError(f"{url} does not list its models; name one with --model")
    path = f"{url}/v2/models/{quote(name, safe='')}"
    status, body = await fetch(session, "GET", url, path)
    if status != OK:
        raise SpecError(f"{path} responds {status} instead of the model's metadata; check the URL and --model")
    document, tensor = _pixel_request(_read_metadata(body, path))
    headers = {"Inference-Header-Content-Length": str(len(document)), "Content-Type": "application/octet-stream"}
    return PostSender(session, f"{path}/infer", repeat(document + tensor), headers)


def sample_photograph() -> Path:
    """Path of matplotlib's sample photograph, found without importing matplotlib, which takes half a second."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise SpecError("matplotlib and its sample photograph are not installed; give --image FILE")
    return Path(spec.origin).parent / "mpl-data" / "sample_data" / "grace_hopper.jpg"


class _Tensor(BaseModel):
    name: str
    datatype: str
    shape: list[int]


class _Metadata(BaseModel):
    inputs: list[_Tensor] = Field(min_length=1)
    outputs: list[_Tensor] = Field(min_length=1)


class _Listed(BaseModel):
    name: str
    state: str = "READY"


def _read_metadata(body: bytes, path: str) -> _Metadata:
    try:
        metadata = _Metadata.model_validate_json(body)
    except ValidationError as error:
        raise SpecError(f"{path} is no model metadata ({error.errors()[0]['msg']}); check the URL") from None
    tensor = metadata.inputs[0]
    if tensor.datatype != "UINT8" or len(tensor.shape) != 4 or min(tensor.shape[1:]) < 1 or tensor.shape[3] != 3:
        raise SpecError(f"{path} takes {tensor.datatype} {tensor.shape}, not UINT8 [-1, H, W, 3]; leave out --pixels")
    return metadata


def _pixel_request(metadata: _Metadata) -> tuple[bytes, bytes]:
    """Make the JSON document and the binary tensor; the output is limited to the best class to keep responses small."""
    tensor, output = metadata.inputs[0], metadata.outputs[0]
    shape = [1, *tensor.shape[1:]]
    values = np.random.default_rng(0).integers(0, 256, shape, np.uint8).tobytes()
    entry = {"name": tensor.name, "datatype": "UINT8", "shape": shape, "parameters": {"binary_data_size": len(values)}}
    best = {"name": output.name, "parameters": {"classification": 1, "binary_data": False}}
    return orjson.dumps({"inputs": [entry], "outputs": [best]}), values


async def find_model(session: aiohttp.ClientSession, url: str, model: str | None) -> str | None:
    """Find the model to send requests to; None if the server does not list its models (it may still serve one).

    Raises:
        SpecError: no server, no such model, several to choose from, or an API key that is missing or wrong.
    """
    status, body = await fetch(session, "POST", url, f"{url}/v2/repository/index")
    if status in KEY_ERRORS:
        raise SpecError(f"{url} {KEY_ERRORS[status]}; give --api-key KEY, or set BATCHWRIGHT_API_KEY")
    try:
        listed = TypeAdapter(list[_Listed]).validate_json(body) if status == OK else None
    except ValidationError:
        listed = None
    if listed is None:
        return model
    ready = [entry.name for entry in listed if entry.state == "READY"]
    if model in ready or (model is None and len(ready) == 1):
        return model or ready[0]
    names = ", ".join(ready) or "none"
    problem = "is ready with several or no models" if model is None else f"has no model {model!r} that is ready"
    raise SpecError(f"{url} {problem} (ready: {names}); choose one with --model, or wait for it")


async def fetch(session: aiohttp.ClientSession, method: str, url: str, path: str) -> tuple[int, bytes]:
    """Send one request to the server at `url` before the load starts; return status and body.

    Raises:
        SpecError: no server responds.
    """
    try:
        async with session.request(method, path, timeout=_SETUP_TIMEOUT) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SpecError(f"no server responds at {url} ({reason}); start one with serve-model, or fix the URL") from None
