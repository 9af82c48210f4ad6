"""The callers of the soak: good ones, of one sample or several, hurried ones, rubbish, poison, those who leave."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from PIL import Image

GIVE_UP = 60.0  # s; a call that takes longer hangs
# Of poison little: finding one bad sample in a batch costs several batches.
_KINDS = {
    "good": 0.638,
    "several": 0.1,
    "hurried": 0.15,
    "corrupt": 0.06,
    "leaver": 0.05,
    "poison": 0.001,
    "not finite": 0.001,
}
_SEVERAL = (2, 3, 4, 5)  # samples of one call
SAMPLES = 1.0 + _KINDS["several"] * (sum(_SEVERAL) / len(_SEVERAL) - 1.0)  # of a call, on average
_OUTPUT = 4000  # bytes of one sample's logits
_LEAVING = ("while sending", "before the answer")
_NEVER_CAME = "never came"


@dataclass
class Books:
    """What the callers know.

    Attributes:
        ends: how many calls ended how, by kind and status.
        samples: and how many samples they had.
        wrong: what must not be: one line each.
        failed_at: instants of 500s that no sample was the reason of, s after the start.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    samples: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed_at: list[float] = field(default_factory=list)

    def end(self, kind: str, status: object, samples: int = 1) -> None:
        """A call is over."""
        self.ends[kind, str(status)] += 1
        self.samples[kind, str(status)] += samples

    def calls_of(self, status: str) -> int:
        """How many calls ended with it."""
        return sum(n for (_, ended), n in self.ends.items() if ended == status)

    def samples_of(self, status: str) -> int:
        """How many samples they had."""
        return sum(n for (_, ended), n in self.samples.items() if ended == status)

    @property
    def left(self) -> int:
        """How many clients came and left."""
        return sum(n for (kind, how), n in self.ends.items() if kind == "leaver" and how != _NEVER_CAME)


@dataclass(frozen=True)
class Message:
    """One call's body and the length of the JSON at its beginning."""

    body: bytes
    length: int

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        return {"Inference-Header-Content-Length": str(self.length), "Content-Type": "application/octet-stream"}


def message(samples: Sequence[bytes], timeout: float | None = None, datatype: str = "BYTES") -> Message:
    """A call with these samples: encoded pictures, or pixels; `timeout` in s."""
    prefixed = (len(sample).to_bytes(4, "little") + sample if datatype == "BYTES" else sample for sample in samples)
    data, shape = b"".join(prefixed), [len(samples), *([] if datatype == "BYTES" else [224, 224, 3])]
    entry = {"name": "image", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
    parameters: dict[str, bool | int] = {"binary_data_output": True}
    if timeout is not None:
        parameters["timeout"] = max(1, round(1e6 * timeout))
    document = json.dumps({"inputs": [entry], "parameters": parameters}).encode()
    return Message(document + data, len(document))


def draw_pictures(count: int, rng: np.random.Generator) -> list[bytes]:
    """Different small JPEGs."""
    found = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
        buffer = BytesIO()
        coarse.resize((48, 48), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=80)
        found.append(buffer.getvalue())
    return found


def _corrupt(picture: bytes, rng: np.random.Generator) -> Message:
    """A cut picture, a wrong shape, bad JSON, or bytes that do not come."""
    right = message([picture])
    wrong_shape = right.body.replace(b'"shape": [1]', b'"shape": [2]')
    return [
        message([picture[: len(picture) // 2]]),
        Message(wrong_shape, right.length),
        Message(right.body, right.length - 3),
        Message(right.body[:-5], right.length),
        Message(b'{"inputs": 1e400}', 17),
    ][rng.integers(5)]


class Callers:
    """Makes calls of every kind against the server at `url`, and keeps the books."""

    def __init__(self, url: str, session: aiohttp.ClientSession, rng: np.random.Generator) -> None:
        """`session` waits GIVE_UP for an answer."""
        self._url = f"{url}/v2/models/googlenet/infer"
        self._session = session
        self._rng = rng
        self.pictures = draw_pictures(200, rng)
        self.alone: list[bytes] = []
        self.books = Books()

    async def learn(self) -> None:
        """Ask for each picture alone, and remember its answer."""
        for picture in self.pictures:
            status, answer = await self._post(message([picture]))
            assert (status, len(answer)) == (200, _OUTPUT), answer[:200]
            self.alone.append(answer)
            self.books.end("alone", status)
        assert len(set(self.alone)) == len(self.alone), "different pictures, different answers"

    async def call(self, instant: float) -> None:
        """Make one call of a drawn kind; `instant` is the present, s after the start."""
        kind = str(self._rng.choice([*_KINDS], p=[*_KINDS.values()]))
        n = int(self._rng.choice(_SEVERAL)) if kind == "several" else 1
        chosen = self._rng.integers(len(self.pictures), size=n).tolist()
        pictures = [self.pictures[index] for index in chosen]
        if kind == "leaver":
            await self._leave(message(pictures))
            return
        body, allowed = self._body(kind, pictures)
        try:
            status, answer = await self._post(body)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            self.books.end(kind, "lost", n)
            self.books.wrong.append(f"{kind}: no answer: {type(error).__name__} {error}"[:200])
            return
        self.books.end(kind, status, n)
        good = kind in ("good", "several", "hurried")
        if status == 200 and good and answer != b"".join(self.alone[index] for index in chosen):
            self.books.wrong.append(f"{kind}: not its own answer, or not all of it")
        elif status == 500 and good:
            self.books.failed_at.append(instant)
        elif status not in allowed:
            self.books.wrong.append(f"{kind}: {status} {answer[:200]!r}")

    def _body(self, kind: str, pictures: list[bytes]) -> tuple[Message, tuple[int, ...]]:
        """What to send, and which statuses are right; a fault's 500 is judged apart."""
        match kind:
            case "hurried":
                return message(pictures, float(np.exp(self._rng.uniform(np.log(0.02), np.log(2.0))))), (200, 503, 504)
            case "corrupt":
                return _corrupt(pictures[0], self._rng), (400, 503)  # a full queue refuses before it reads pictures
            case "poison" | "not finite":
                begin = b"POISON" if kind == "poison" else b"NOTNUM"
                return message([begin + bytes(224 * 224 * 3 - len(begin))], None, "UINT8"), (500, 503)
            case _:
                return message(pictures), (200, 503)

    async def _post(self, sent: Message) -> tuple[int, bytes]:
        async with self._session.post(self._url, data=sent.body, headers=sent.headers) as response:
            body = await response.read()
            begin = int(response.headers.get("Inference-Header-Content-Length", 0))
            return response.status, body[begin:]

    async def _leave(self, sent: Message) -> None:
        """Close the connection while sending, or at a random time after it."""
        address = urlsplit(self._url)
        head = f"POST {address.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent.body)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in sent.headers.items()) + "\r\n"
        how = _LEAVING[self._rng.integers(2)]
        part = sent.body if how == "before the answer" else sent.body[: len(sent.body) // 2]
        stay = float(self._rng.uniform(0.005, 0.12))
        writer: asyncio.StreamWriter | None = None
        with suppress(OSError):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(head.encode() + part)
            await asyncio.sleep(stay)
            writer.close()
            await writer.wait_closed()
        self.books.end("leaver", how if writer is not None else _NEVER_CAME)
