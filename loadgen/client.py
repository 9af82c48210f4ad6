"""The open-loop client: every request leaves at its scheduled instant, whatever became of those before it.

Response times count from the scheduled instant, so that a client or a server that falls behind cannot hide it.
"""

import asyncio
import importlib.util
import mimetypes
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
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
_INTRODUCTION = aiohttp.ClientTimeout(total=10.0)  # for the questions asked before the load starts
REFUSED = {401: "asks for a key", 403: "does not take this key"}
_TICK = 1e-3  # the shortest sleep that uvloop does not round down to none at all: shorter ones would be a busy wait


class Response(NamedTuple):
    """What came back: the HTTP code, and what the answer says of how it was served (None: nothing)."""

    status: Status
    batch_size: int | None = None
    waiting: float | None = None
    service: float | None = None
    energy: float | None = None


class Sender(Protocol):
    """Sends one request and waits for its answer."""

    async def send(self) -> Response:
        """One exchange.

        Raises:
            TimeoutError: no answer for so long that the client gives up.
            aiohttp.ClientError: the connection could not be made, or broke.
        """
        ...


@dataclass
class RunLog:
    """What has happened so far; it holds what there is even when a run is cut off.

    Attributes:
        sent: requests that have left.
        errors: requests that are over without an answer of code 200.
        records: one for each request that is over, in order of its end.
    """

    sent: int = 0
    errors: int = 0
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """A request is over."""
        self.records.append(record)
        self.errors += record.status != OK


async def offer(
    sender: Sender,
    instants: Iterable[float],
    log: RunLog,
    clock: Callable[[], float] = time.monotonic,
    start: float | None = None,
) -> None:
    """Send one request at each instant, and wait for all answers.

    Args:
        sender: what to send.
        instants: when, s after the start; sorted.
        log: grows as requests leave and end; those in flight when this is cancelled are recorded as interrupted.
        clock: s; not the loop's own, which uvloop advances in steps of a millisecond.
        start: by that clock, s; None is now.
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
    """Returns at once, without a turn of the loop, for an instant that has passed: what is due is sent together."""
    while (ahead := instant - elapsed()) > 0:  # noqa: ASYNC110  (time passes of itself: there is no event to await)
        await asyncio.sleep(max(ahead, _TICK))  # uvloop's timers also fire early, so look at the clock again


async def _exchange(sender: Sender, scheduled: float, elapsed: Callable[[], float], log: RunLog) -> None:
    sent, answer = elapsed(), Response("interrupted")
    try:
        answer = await sender.send()
    except TimeoutError:
        answer = Response("timeout")
    except (aiohttp.ClientError, OSError):
        answer = Response("connection")
    finally:
        log.add(Record(scheduled, sent, elapsed(), *answer))


def open_session(give_up_after: float = GIVE_UP_AFTER, key: str | None = None) -> aiohttp.ClientSession:
    """A session with as many connections as there are requests in flight, kept alive; call it within the loop.

    Args:
        give_up_after: how long a request waits for its answer, s.
        key: what a server with keys asks for; it goes with every request.
    """
    headers = {"Accept-Encoding": "identity"}  # aiohttp would ask the server to compress every answer
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
        timeout=aiohttp.ClientTimeout(total=give_up_after),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
    )


@dataclass(frozen=True)
class Post:
    """One prepared POST."""

    session: aiohttp.ClientSession
    url: str
    body: bytes
    headers: dict[str, str]

    async def send(self) -> tuple[int, bytes]:
        """The HTTP code and the body of the answer."""
        post = self.session.post(self.url, data=self.body, headers=self.headers, allow_redirects=False)
        async with post as response:
            return response.status, await response.read()


@dataclass(frozen=True)
class ImageSender:
    """Sends an encoded picture to /predict."""

    post: Post

    async def send(self) -> Response:
        """One exchange; see Sender."""
        status, body = await self.post.send()
        return to_answer(status, read_object(body))


@dataclass(frozen=True)
class PixelSender:
    """Sends raw pixels by the Open Inference Protocol, as a binary tensor."""

    post: Post

    async def send(self) -> Response:
        """One exchange; see Sender."""
        status, body = await self.post.send()
        return to_answer(status, read_object(body).get("parameters"))


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds; an empty one where it holds none."""
    with suppress(orjson.JSONDecodeError):
        document = orjson.loads(body)
        if isinstance(document, dict):
            return document
    return {}


def to_answer(status: int, facts: Any) -> Response:
    """The answer to a code and what was said beside it; facts may be missing: other servers answer too."""
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


async def image_sender(session: aiohttp.ClientSession, url: str, model: str | None, image: Path | None) -> ImageSender:
    """Prepare to send a picture to the server at `url`; None: matplotlib's sample photograph.

    Raises:
        SpecError: there is no such file, no server, or no such model on it.
    """
    path = image or sample_photograph()
    try:
        body = path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read the image {str(path)!r} ({error.strerror}); give --image a picture") from None
    name = await find_model(session, url, model)
    target = f"{url}/predict" if name is None else f"{url}/predict/{quote(name, safe='')}"
    content_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return ImageSender(Post(session, target, body, {"Content-Type": content_type}))


async def pixel_sender(session: aiohttp.ClientSession, url: str, model: str | None) -> PixelSender:
    """Prepare to send pixels of the size that the model's metadata ask for.

    Raises:
        SpecError: there is no server at `url`, no such model on it, or the model takes no pixels.
    """
    name = await find_model(session, url, model)
    if name is None:
        raise SpecError(f"{url} does not list its models; name one with --model")
    path = f"{url}/v2/models/{quote(name, safe='')}"
    status, body = await fetch(session, "GET", url, path)
    if status != OK:
        raise SpecError(f"{path} answers {status} instead of the model's metadata; check the URL and --model")
    document, tensor = _pixel_request(_read_metadata(body, path))
    headers = {"Inference-Header-Content-Length": str(len(document)), "Content-Type": "application/octet-stream"}
    return PixelSender(Post(session, f"{path}/infer", document + tensor, headers))


def sample_photograph() -> Path:
    """The photograph that comes with matplotlib, found without the half second that importing it takes."""
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
        raise SpecError(f"{path} answers no model metadata ({error.errors()[0]['msg']}); check the URL") from None
    tensor = metadata.inputs[0]
    if tensor.datatype != "UINT8" or len(tensor.shape) != 4 or min(tensor.shape[1:]) < 1 or tensor.shape[3] != 3:
        raise SpecError(f"{path} takes {tensor.datatype} {tensor.shape}, not UINT8 [-1, H, W, 3]; leave out --pixels")
    return metadata


def _pixel_request(metadata: _Metadata) -> tuple[bytes, bytes]:
    """The JSON document and the tensor behind it; of the output only the best class, so that the answer is small."""
    tensor, output = metadata.inputs[0], metadata.outputs[0]
    shape = [1, *tensor.shape[1:]]
    values = np.random.default_rng(0).integers(0, 256, shape, np.uint8).tobytes()
    entry = {"name": tensor.name, "datatype": "UINT8", "shape": shape, "parameters": {"binary_data_size": len(values)}}
    best = {"name": output.name, "parameters": {"classification": 1, "binary_data": False}}
    return orjson.dumps({"inputs": [entry], "outputs": [best]}), values


async def find_model(session: aiohttp.ClientSession, url: str, model: str | None) -> str | None:
    """The model to ask for; None where the server does not list its models (it may still serve one).

    Raises:
        SpecError: no server, no such model, several to choose from, or a key that is missing or wrong.
    """
    status, body = await fetch(session, "POST", url, f"{url}/v2/repository/index")
    if status in REFUSED:
        raise SpecError(f"{url} {REFUSED[status]}; give --api-key KEY, or set BATCHWRIGHT_API_KEY")
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
    wanted = "is ready with several or no models" if model is None else f"has no model {model!r} that is ready"
    raise SpecError(f"{url} {wanted} (ready: {names}); choose one with --model, or wait for it")


async def fetch(session: aiohttp.ClientSession, method: str, url: str, path: str) -> tuple[int, bytes]:
    """Ask the server at `url` before the load starts: the HTTP code and the body.

    Raises:
        SpecError: nobody answers there.
    """
    try:
        async with session.request(method, path, timeout=_INTRODUCTION) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SpecError(f"no server answers at {url} ({reason}); start one with serve-model, or mend the URL") from None
