"""Requests to a text model: one fixed text, or a text of a given length for each request.

The length is the number of generated tokens for a generator, and the number of prompt tokens for a classifier.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from urllib.parse import quote

import aiohttp
import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from loadgen.client import PostSender, fetch, find_model
from policies.types import SpecError

SAMPLE = "What is a batch?"
PROMPT = 16  # tokens of a generator's prompt when lengths are given
_HEADERS = {"Content-Type": "application/json"}


class _Bounds(BaseModel):
    max_tokens: int
    vocabulary: int
    pad_token_id: int
    max_new_tokens: int = 0  # 0 for a classifier


class _Metadata(BaseModel):
    parameters: _Bounds


async def text_sender(
    session: aiohttp.ClientSession, url: str, model: str | None, lengths: Sequence[int] | None
) -> PostSender | None:
    """Prepare to send texts to the server at `url`; return None if the model takes no text.

    Args:
        session: HTTP session.
        url: URL of the server.
        model: model name; None if the server has only one.
        lengths: length of each request in order, tokens; None sends the fixed text with the server's own limit.

    Raises:
        SpecError: no server, no such model, or a length above the model's limit.
    """
    name = await find_model(session, url, model)
    bounds = None if name is None else await _bounds(session, url, name)
    if name is None or bounds is None:
        return None
    path = quote(name, safe="")
    if lengths is None:
        return PostSender(session, f"{url}/predict/{path}", repeat(orjson.dumps({"text": SAMPLE})), _HEADERS)
    limit = bounds.max_new_tokens or bounds.max_tokens
    if max(lengths) > limit:
        raise SpecError(f"--sizes has {max(lengths)} tokens, the limit of {name} is {limit}; lower --size-scale")
    return PostSender(session, f"{url}/v2/models/{path}/infer", _bodies(bounds, lengths), _HEADERS)


async def _bounds(session: aiohttp.ClientSession, url: str, name: str) -> _Bounds | None:
    """Token limits in the model's metadata; None if it takes no text."""
    _, body = await fetch(session, "GET", url, f"{url}/v2/models/{quote(name, safe='')}")
    try:
        return _Metadata.model_validate_json(body).parameters
    except ValidationError:
        return None


def _bodies(bounds: _Bounds, lengths: Sequence[int]) -> Iterator[bytes]:
    """Bodies of the Open Inference Protocol with token ids, which give exact lengths; no id is the padding id."""
    generates = bounds.max_new_tokens > 0
    ids = np.random.default_rng(0).integers(0, bounds.vocabulary - 1, PROMPT if generates else max(lengths))
    ids = np.where((ids < bounds.pad_token_id) | (bounds.pad_token_id < 0), ids, ids + 1)[: bounds.max_tokens]
    for length in lengths:
        prompt = ids.tolist() if generates else ids[:length].tolist()
        tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, len(prompt)], "data": prompt}
        parameters = {"max_new_tokens": length, "ignore_eos": True} if generates else {}
        yield orjson.dumps({"inputs": [tensor], "parameters": parameters})
