"""The clients of the soak: good calls of one sample or several, short time-outs, corrupt bodies, abandoned calls."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from benchmarks.support.harness import synthetic_image

CLIENT_TIMEOUT = 60.0  # s; a call that takes longer has no answer
_KINDS = {
    "good": 0.638,
    "several": 0.1,
    "hurried": 0.15,
    "corrupt": 0.06,
    "leaver": 0.05,
    "poison": 0.001,  # few, since isolating a bad sample costs several batches
    "not finite": 0.001,
}
_SEVERAL = (2, 3, 4, 5)  # samples of one call
SAMPLES = 1.0 + _KINDS["several"] * (sum(_SEVERAL) / len(_SEVERAL) - 1.0)  # mean over calls
_OUTPUT = 4000  # bytes of one sample's logits
_DELAYS = (0.005, 0.12)  # s from the last byte of an abandoned call until its connection is closed
_LEAVING = ("while sending", "before the answer")
_NEVER_CAME = "never came"


@dataclass
class ClientCounts:
    """What the clients saw.

    Attributes:
        ends: number of calls by kind and status.
        samples: number of samples by kind and status.
        wrong: descriptions of wrong answers.
        failed: 500s for good samples: when the calls were sent and ended, s of time.monotonic.
        lost: calls without an answer: when they were sent and ended, s of time.monotonic, and the error.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    samples: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[tuple[float, float]] = field(default_factory=list)
    lost: list[tuple[float, float, str]] = field(default_factory=list)

    def end(self, kind: str, status: object, samples: int = 1) -> None:
        """Count a call that has ended."""
        self.ends[kind, str(status)] += 1
        self.samples[kind, str(status)] += samples

    def calls_of(self, status: str) -> int:
        """Number of calls that ended with a status."""
        return sum(n for (_, ended), n in self.ends.items() if ended == status)

    def samples_of(self, status: str) -> int:
        """Number of samples of these calls."""
        return sum(n for (_, ended), n in self.samples.items() if ended == status)

    @property
    def left(self) -> int:
        """Number of abandoned calls of which the server received something."""
        return self._left_of(self.ends)

    @property
    def left_samples(self) -> int:
        """Number of samples of these calls."""
        return self._left_of(self.samples)

    def _left_of(self, counts: Counter[tuple[str, str]]) -> int:
        return sum(n for (kind, how), n in counts.items() if kind == "leaver" and how != _NEVER_CAME)


@dataclass(frozen=True)
class Message:
    """One call's body, and the length of the JSON at its beginning."""

    body: bytes
    length: int

    @property
    def headers(self) -> dict[str, str]:
        """The call's headers."""
        return {"Inference-Header-Content-Length": str(self.length), "Content-Type": "application/octet-stream"}


def message(samples: Sequence[bytes], timeout: float | None = None, datatype: str = "BYTES") -> Message:
    """A call with these samples, encoded images (BYTES) or pixels (UINT8); `timeout` in s."""
    prefixed = (len(sample).to_bytes(4, "little") + sample if datatype == "BYTES" else sample for sample in samples)
    data, shape = b"".join(prefixed), [len(samples), *([] if datatype == "BYTES" else [224, 224, 3])]
    entry = {"name": "image", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
    parameters: dict[str, bool | int] = {"binary_data_output": True}
    if timeout is not None:
        parameters["timeout"] = max(1, round(1e6 * timeout))
    document = json.dumps({"inputs": [entry], "parameters": parameters}).encode()
    return Message(document + data, len(document))


def _corrupt(image: bytes, rng: np.random.Generator) -> Message:
    """A cut image, a wrong shape, a wrong header length, missing bytes, or bad JSON."""
    right = message([image])
    wrong_shape = right.body.replace(b'"shape": [1]', b'"shape": [2]')
    return [
        message([image[: len(image) // 2]]),
        Message(wrong_shape, right.length),
        Message(right.body, right.length - 3),
        Message(right.body[:-5], right.length),
        Message(b'{"inputs": 1e400}', 17),
    ][rng.integers(5)]


class SoakClients:
    """Makes calls of every kind, checks the answers and counts them.

    Attributes:
        images: different small JPEGs.
        alone: the answer to each image alone.
        counts: of all calls.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, rng: np.random.Generator) -> None:
        """Call the server at `url` by a session with a timeout of CLIENT_TIMEOUT."""
        self._url = f"{url}/v2/models/googlenet/infer"
        self._session = session
        self._rng = rng
        self.images = [synthetic_image(rng, 4, 48, "JPEG", quality=80) for _ in range(200)]
        self.alone: list[bytes] = []
        self.counts = ClientCounts()

    async def learn(self) -> None:
        """Get the answer to each image alone."""
        for image in self.images:
            status, answer = await self._post(message([image]))
            assert (status, len(answer)) == (200, _OUTPUT), answer[:200]
            self.alone.append(answer)
            self.counts.end("alone", status)
        assert len(set(self.alone)) == len(self.alone), "different images must have different answers"

    async def call(self) -> None:
        """Make one call of a drawn kind."""
        kind = str(self._rng.choice([*_KINDS], p=[*_KINDS.values()]))
        n = int(self._rng.choice(_SEVERAL)) if kind == "several" else 1
        chosen = self._rng.integers(len(self.images), size=n).tolist()
        images = [self.images[index] for index in chosen]
        if kind == "leaver":
            await self._abandon(message(images))
            return
        body, allowed = self._body(kind, images)
        began = time.monotonic()
        try:
            status, answer = await self._post(body)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            self.counts.end(kind, "lost", n)
            text = f"{kind}: no answer: {type(error).__name__} {error}"[:200]
            self.counts.lost.append((began, time.monotonic(), text))
            return
        self.counts.end(kind, status, n)
        good = kind in ("good", "several", "hurried")
        if status == 200 and good and answer != b"".join(self.alone[index] for index in chosen):
            self.counts.wrong.append(f"{kind}: the answer is not that of its own images")
        elif status == 500 and good:
            self.counts.failed.append((began, time.monotonic()))
        elif status not in allowed:
            self.counts.wrong.append(f"{kind}: {status} {answer[:200]!r}")

    def _body(self, kind: str, images: list[bytes]) -> tuple[Message, tuple[int, ...]]:
        """The call of a kind and its right statuses, without the 500 of an injected fault."""
        match kind:
            case "hurried":
                return message(images, float(np.exp(self._rng.uniform(np.log(0.02), np.log(2.0))))), (200, 503, 504)
            case "corrupt":
                return _corrupt(images[0], self._rng), (400, 503)  # a full queue rejects before the body is read
            case "poison" | "not finite":
                begin = b"POISON" if kind == "poison" else b"NOTNUM"
                return message([begin + bytes(224 * 224 * 3 - len(begin))], None, "UINT8"), (500, 503)
            case _:
                return message(images), (200, 503)

    async def _post(self, sent: Message) -> tuple[int, bytes]:
        async with self._session.post(self._url, data=sent.body, headers=sent.headers) as response:
            body = await response.read()
            begin = int(response.headers.get("Inference-Header-Content-Length", 0))
            return response.status, body[begin:]

    async def _abandon(self, sent: Message) -> None:
        self.counts.end("leaver", await abandon(self._url, sent.body, sent.headers, self._rng, _DELAYS))


async def abandon(
    url: str, body: bytes, headers: Mapping[str, str], rng: np.random.Generator, delays: tuple[float, float]
) -> str:
    """Close the connection of a call while sending, or at a random time after it; return how the call ended.

    Args:
        url: of the call.
        body: of the call.
        headers: of the call.
        rng: draws when the connection is closed.
        delays: least and greatest time after what was sent, s.
    """
    address = urlsplit(url)
    head = f"POST {address.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    how = _LEAVING[rng.integers(2)]
    part = body if how == "before the answer" else body[: len(body) // 2]
    delay = float(rng.uniform(*delays))
    writer: asyncio.StreamWriter | None = None
    with suppress(OSError):
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(head.encode() + part)
        await asyncio.sleep(delay)
        writer.close()
        await writer.wait_closed()
    return how if writer is not None else _NEVER_CAME
