"""HTTP calls of the same body, and an open loop of them."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadgen.client import GIVE_UP_AFTER, JSON_LENGTH, Response, RunLog, offer, open_session


@dataclass(frozen=True)
class HttpCall:
    """A POST request: its URL, body and headers."""

    url: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class _Poster:
    """Makes the same call again and again; a loadgen.client.Sender."""

    session: aiohttp.ClientSession
    call: HttpCall

    async def send(self) -> Response:
        """Make one call."""
        call = self.call
        async with self.session.post(call.url, data=call.body, headers=call.headers) as response:
            await response.read()
            return Response(response.status)


async def offer_calls(
    call: HttpCall, instants: Iterable[float], give_up_after: float = GIVE_UP_AFTER
) -> tuple[RunLog, float]:
    """Make a call at each instant, and wait for all responses.

    Args:
        call: the call.
        instants: s after the start, sorted.
        give_up_after: the client's time-out, s.

    Returns:
        The log, and the start of the run, s of the monotonic clock.
    """
    log, start = RunLog(), time.monotonic()
    async with open_session(give_up_after) as session:
        await offer(_Poster(session, call), instants, log, start=start, precise=True)
    return log, start


def tensor_call(url: str, tensor: Mapping[str, Any], data: bytes, outputs: Sequence[Mapping[str, Any]]) -> HttpCall:
    """A call of the Open Inference Protocol with one binary tensor.

    Args:
        url: of the model's infer path.
        tensor: name, shape and datatype.
        data: of the tensor.
        outputs: the requested outputs with their parameters.
    """
    entry = {**tensor, "parameters": {"binary_data_size": len(data)}}
    document = json.dumps({"inputs": [entry], "outputs": outputs}).encode()
    return HttpCall(url, document + data, {JSON_LENGTH: str(len(document))})


def image_call(url: str) -> HttpCall:
    """A call with one image of 150,528 bytes that asks for the best class alone."""
    tensor = {"name": "image", "shape": [1, 224, 224, 3], "datatype": "UINT8"}
    return tensor_call(url, tensor, bytes(range(256)) * 588, [{"name": "logits", "parameters": {"classification": 1}}])


def floats_call(url: str, count: int) -> HttpCall:
    """A call with one sample of `count` floats for a model of benchmarks/servers/float_models.py."""
    tensor = {"name": "x", "shape": [1, count], "datatype": "FP32"}
    return tensor_call(url, tensor, bytes(4 * count), [{"name": "y", "parameters": {"binary_data": True}}])
