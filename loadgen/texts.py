"""What is sent to a text model: one fixed text, or a text of a given length for each request.

A generator's length is the number of tokens that it is made to generate, a classifier's that of the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from urllib.parse import quote

import aiohttp
import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from loadgen.client import Post, Response, fetch, find_model, read_object, to_answer
from policies.types import SpecError

SAMPLE = "What is a batch?"
PROMPT = 16  # tokens of a generator's prompt, where lengths are drawn
_HEADERS = {"Content-Type": "application/json"}


class _Bounds(BaseModel):
    max_tokens: int
    vocabulary: int
    pad_token_id: int
    max_new_tokens: int = 0  # of a model that classifies


class _Metadata(BaseModel):
    parameters: _Bounds


@dataclass(frozen=True)
class TextSender:
    """Sends one body after another, in the order in which it is asked to send."""

    session: aiohttp.ClientSession
    url: str
    bodies: Iterator[bytes]

    async def send(self) -> Response:
        """One exchange; see Sender."""
        status, body = await Post(self.session, self.url, next(self.bodies), _HEADERS).send()
        document = read_object(body)
        return to_answer(status, document.get("parameters", document))  # where either protocol puts the facts


async def text_sender(
    session: aiohttp.ClientSession, url: str, model: str | None, lengths: Sequence[int] | None
) -> TextSender | None:
    """Prepare to send texts to the server at `url`; None where the model takes something else.

    Args:
        session: to send with.
        url: of the server.
        model: its name; None where only one is loaded.
        lengths: tokens, of each request in order; None: the fixed text, and the server's own limit.

    Raises:
        SpecError: no server, no such model, or a length over its bound.
    """
    name = await find_model(session, url, model)
    bounds = None if name is None else await _bounds(session, url, name)
    if name is None or bounds is None:
        return None
    path = quote(name, safe="")
    if lengths is None:
        return TextSender(session, f"{url}/predict/{path}", repeat(orjson.dumps({"text": SAMPLE})))
    most = bounds.max_new_tokens or bounds.max_tokens
    if max(lengths) > most:
        raise SpecError(f"--sizes asks {name} for {max(lengths)} tokens, and {most} is its most; lower --size-scale")
    return TextSender(session, f"{url}/v2/models/{path}/infer", _bodies(bounds, lengths))


async def _bounds(session: aiohttp.ClientSession, url: str, name: str) -> _Bounds | None:
    """What the metadata tell of texts; None where they tell nothing."""
    _, body = await fetch(session, "GET", url, f"{url}/v2/models/{quote(name, safe='')}")
    try:
        return _Metadata.model_validate_json(body).parameters
    except ValidationError:
        return None


def _bodies(bounds: _Bounds, lengths: Sequence[int]) -> Iterator[bytes]:
    """By the Open Inference Protocol, as only ids are exactly so many tokens; none of them is padding."""
    generates = bounds.max_new_tokens > 0
    ids = np.random.default_rng(0).integers(0, bounds.vocabulary - 1, PROMPT if generates else max(lengths))
    ids = np.where((ids < bounds.pad_token_id) | (bounds.pad_token_id < 0), ids, ids + 1)[: bounds.max_tokens]
    for length in lengths:
        prompt = ids.tolist() if generates else ids[:length].tolist()
        tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, len(prompt)], "data": prompt}
        wishes = {"max_new_tokens": length, "ignore_eos": True} if generates else {}
        yield orjson.dumps({"inputs": [tensor], "parameters": wishes})
