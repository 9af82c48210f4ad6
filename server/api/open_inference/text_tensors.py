"""Calls to text models: token ids by the Open Inference Protocol, or a JSON document with the text itself."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from server.api.open_inference.protocol import InferCall
from server.api.open_inference.tensors import TensorSpec, show
from server.errors import BadInputError, TooLargeError
from server.models.text import Text, TextCodec
from server.transport.json_limits import parse_object

_IDS, _LIMIT, _FORCED = "input_ids", "max_new_tokens", "ignore_eos"


def text_input(codec: TextCodec) -> TensorSpec:
    """Ids padded at the end; a generator also takes how many are to be generated at most, each sample its own."""
    limits = TensorSpec(_LIMIT, {"INT32": (), "INT64": ()})
    beside = (limits,) if codec.generates else ()
    return TensorSpec(_IDS, {"INT64": (-1,), "INT32": (-1,)}, beside, (_LIMIT, _FORCED))  # a classifier rejects them


def text_output(codec: TextCodec, labels: int) -> TensorSpec:
    """Logits, or ids padded at the end."""
    return TensorSpec("output_ids", {"INT64": (-1,)}) if codec.generates else TensorSpec("logits", {"FP32": (labels,)})


def texts_of(codec: TextCodec, call: InferCall) -> list[Text]:
    """The samples of a call.

    Raises:
        BadInputError: one of them is out of bounds, or a parameter is.
    """
    ids = call.tensor.data
    if not isinstance(ids, np.ndarray):
        raise BadInputError(f"the model takes token ids, not a raw body; send {text_input(codec)}")
    if codec.generates and any(output.classification for output in call.outputs):
        raise BadInputError("the model generates tokens, it does not classify; leave `classification` out")
    limit, forced = _wishes(call.parameters)
    own = call.beside.get(_LIMIT)
    limits = [limit] * len(ids) if own is None else np.asarray(own.data).tolist()
    return [codec.sample(codec.unpadded(row), most, forced) for row, most in zip(ids, limits, strict=True)]


def read_text(codec: TextCodec, body: bytes) -> Text:
    """The sample of a JSON call: {"text": ..., "max_new_tokens": n, "ignore_eos": false}.

    Raises:
        TooLargeError: it is longer than a text within bounds can make it.
        BadInputError: it is no such document, or out of bounds.
    """
    if len(body) > codec.most_bytes:
        raise TooLargeError(f"the body has {len(body)} bytes, over {codec.most_bytes}; send a shorter text")
    document = parse_object(body, "body", 'an object with "text"')
    if type(document.get("text")) is not str:
        raise BadInputError(f'the body is {show(document)}; send an object with "text"')
    strange = sorted(document.keys() - {"text", _LIMIT, _FORCED})
    if strange:
        raise BadInputError(f"unknown key {strange[0]!r}; send text, {_LIMIT} and {_FORCED}")
    return codec.read(document["text"], *_wishes(document))


def _wishes(fields: Mapping[str, Any]) -> tuple[int | None, bool]:
    """How many tokens at most, None where nobody says, and whether it is exactly so many."""
    limit, forced = fields.get(_LIMIT), fields.get(_FORCED)
    if not (limit is None or type(limit) is int):
        raise BadInputError(f"{_LIMIT} is {show(limit)}; send an integer")
    if not (forced is None or type(forced) is bool):
        raise BadInputError(f"{_FORCED} is {show(forced)}; send true or false")
    return limit, bool(forced)
