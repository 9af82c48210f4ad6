"""Open-loop client: each request is sent at its scheduled instant, independently of earlier responses.

Response times count from the scheduled instant, so that delays of the client itself are included.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import aiohttp
import orjson

from loadgen.precise_timer import precise_instants
from loadgen.report import OK, Record, Status

GIVE_UP_AFTER = 300.0
JSON_LENGTH = "Inference-Header-Content-Length"  # header of bodies in which binary tensors follow the JSON
_MAX_ERROR = 200  # characters of a server's error that are kept
_MIN_SLEEP = 1e-3  # s; uvloop rounds shorter sleeps down to 0, which would be a busy wait


class Response(NamedTuple):
    """Response of the server: status, how the request was served, and the error; None where it does not say."""

    status: Status
    batch_size: int | None = None
    waiting: float | None = None
    service: float | None = None
    energy: float | None = None
    cpu_time: float | None = None
    level: int | None = None
    error: str = ""


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
        first_error: the server's own text in the first response that has one and whose status is not 200.
    """

    sent: int = 0
    errors: int = 0
    records: list[Record] = field(default_factory=list)
    first_error: str = ""

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
    precise: bool = False,
) -> None:
    """Send one request at each instant and wait for all responses.

    Args:
        sender: sends each request.
        instants: scheduled instants, s after the start, sorted.
        log: log of the run; requests in flight when this coroutine is cancelled are recorded as interrupted.
        clock: current time, s; not the loop's clock, which uvloop advances in steps of 1 ms.
        start: start of the run by that clock, s; None is now.
        precise: whether a thread that sleeps precisely wakes the loop at each instant, in place of the loop's timers.
    """
    origin = clock() if start is None else start

    def elapsed() -> float:
        return clock() - origin

    due = list(instants)
    with precise_instants(due, elapsed) if precise else nullcontext() as released:
        async with asyncio.TaskGroup() as exchanges:
            for instant in due:
                await (_until(instant, elapsed) if released is None else released.acquire())
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
        log.first_error = log.first_error or response.error
        log.add(Record(scheduled, sent, elapsed(), *response[:-1]))


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
class RequestContent:
    """The content of a run's requests.

    Attributes:
        path: path on the server, of /predict or the Open Inference Protocol.
        bodies: one for each request, in order.
        headers: of every request.
    """

    path: str
    bodies: Iterator[bytes]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class PostSender:
    """Sends one POST request for each body to the server at `url`.

    Attributes:
        session: of all requests.
        url: of the server.
        content: of the requests.
        levels: level and value of the header Priority of each request, in order; None sends no header.
    """

    session: aiohttp.ClientSession
    url: str
    content: RequestContent
    levels: Iterator[tuple[int, str]] | None = None

    async def send(self) -> Response:
        """Send one request; see Sender."""
        content, level = self.content, None
        headers = content.headers
        if self.levels is not None:
            level, urgency = next(self.levels)
            headers = {**headers, "Priority": urgency}
        post = self.session.post(
            f"{self.url}{content.path}", data=next(content.bodies), headers=headers, allow_redirects=False
        )
        async with post as response:
            status, body = response.status, await response.read()
        if status != OK:
            return Response(status, level=level, error=error_text(body))
        if (length := response.headers.get(JSON_LENGTH, "")).isdecimal():
            body = body[: int(length)]  # binary tensors follow
        document = read_object(body)
        facts = document.get("parameters", document)  # /predict has them at the top level
        return to_response(facts)._replace(level=level)


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object; return an empty one if it is none."""
    with suppress(orjson.JSONDecodeError):
        document = orjson.loads(body)
        if isinstance(document, dict):
            return document
    return {}


def error_text(body: bytes) -> str:
    """Return the error in the body of a failed request on one line: the JSON object's "error", or the body's start."""
    text = str(read_object(body).get("error") or body[:_MAX_ERROR].decode(errors="replace"))
    return " ".join(text[:_MAX_ERROR].split())


def to_response(facts: Any) -> Response:
    """Make the Response of an answered request from the server's facts, which other servers' responses lack."""
    if not isinstance(facts, dict):
        return Response(OK)
    size = _number(facts, "batch_size")
    return Response(
        OK,
        batch_size=int(size) if size and size >= 1 else None,
        waiting=_number(facts, "waiting_ms", 1e3),
        service=_number(facts, "service_ms", 1e3),
        energy=_number(facts, "energy_mj", 1e3),
        cpu_time=_number(facts, "cpu_ms", 1e3),
    )


def _number(facts: dict[str, Any], key: str, divisor: float = 1.0) -> float | None:
    value = facts.get(key)
    return value / divisor if isinstance(value, int | float) else None
