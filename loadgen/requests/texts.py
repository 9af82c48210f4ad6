"""Requests to a text model: one fixed text, or a text of a given length for each request.

The length is the number of generated tokens for a generator, and the number of prompt tokens for a classifier.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from urllib.parse import quote

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from loadgen.client import RequestContent
from loadgen.requests.metadata import ModelMetadata
from policies.types import SpecError

SAMPLE = "What is a batch?"
PROMPT = 16  # tokens of a generator's prompt when lengths are given
_IDS = "input_ids"
_HEADERS = {"Content-Type": "application/json"}


class _Bounds(BaseModel):
    max_tokens: int
    vocabulary: int
    pad_token_id: int
    max_new_tokens: int = 0  # 0 for a classifier


def takes_texts(model: ModelMetadata) -> bool:
    """Whether the model takes token ids, and its metadata have the limits of texts."""
    return model.inputs[0].name == _IDS and _bounds(model) is not None


def text_content(model: ModelMetadata, lengths: Sequence[int] | None) -> RequestContent:
    """Send texts to a model that takes them.

    Args:
        model: the model's metadata.
        lengths: length of each request in order, tokens; None sends the fixed text with the server's own limit.

    Raises:
        SpecError: a length is above the model's limit.
    """
    if lengths is None:
        path = f"/predict/{quote(model.name, safe='')}"
        return RequestContent(path, repeat(orjson.dumps({"text": SAMPLE})), _HEADERS)
    bounds = _bounds(model)
    assert bounds is not None
    limit = bounds.max_new_tokens or bounds.max_tokens
    if max(lengths) > limit:
        raise SpecError(f"--sizes has {max(lengths)} tokens, the limit of {model.name} is {limit}; lower --size-scale")
    return RequestContent(model.infer_path, _bodies(bounds, lengths), _HEADERS)


def _bounds(model: ModelMetadata) -> _Bounds | None:
    try:
        return _Bounds.model_validate(model.parameters)
    except ValidationError:
        return None


def _bodies(bounds: _Bounds, lengths: Sequence[int]) -> Iterator[bytes]:
    """Bodies of the Open Inference Protocol with token ids, which give exact lengths; no id is the padding id."""
    generates = bounds.max_new_tokens > 0
    ids = np.random.default_rng(0).integers(0, bounds.vocabulary - 1, PROMPT if generates else max(lengths))
    ids = np.where((ids < bounds.pad_token_id) | (bounds.pad_token_id < 0), ids, ids + 1)[: bounds.max_tokens]
    for length in lengths:
        prompt = ids.tolist() if generates else ids[:length].tolist()
        tensor = {"name": _IDS, "datatype": "INT64", "shape": [1, len(prompt)], "data": prompt}
        parameters = {"max_new_tokens": length, "ignore_eos": True} if generates else {}
        yield orjson.dumps({"inputs": [tensor], "parameters": parameters})
