"""POST /predict[/{m}]: a picture or a text in; five predictions, or a text, out. On bare ASGI, as it has to be fast."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import orjson
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from server.api.inference import Bound, Inference
from server.api.open_inference.text_tensors import read_text
from server.models.model import AnyModel
from server.models.text import TextCodec
from server.scheduling.calls import Answer
from server.transport.asgi import Caller, caller_of, client_timeout, headers_of, respond
from server.transport.memory_budget import Share
from server.transport.multipart import field_of, is_form

_BEST = 5


class Predict:
    """The route for people and their curl."""

    _PATH = re.compile(r"/predict(?:/([^/]+))?")

    def __init__(self, inference: Inference) -> None:
        """`inference` serves the calls."""
        self._inference = inference

    def matches(self, scope: Scope) -> bool:
        """Whether the request is one of ours."""
        return scope["type"] == "http" and scope["method"] == "POST" and bool(self._PATH.fullmatch(scope["path"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call; whatever goes wrong is answered too."""
        caller = caller_of(scope, receive)
        path = self._PATH.fullmatch(scope["path"])
        name = path[1] if path else None
        async with self._inference.answering(name, scope, send, caller) as share:
            body = await self._answer(name, headers_of(scope), share, caller)
            share.settle(len(body))  # all else that the call held is gone
            await respond(send, body, b"application/json")

    async def _answer(self, name: str | None, headers: Mapping[bytes, bytes], share: Share, caller: Caller) -> bytes:
        model = self._inference.model(name)
        caller.timeout = client_timeout(headers)
        samples = await self._samples(model, headers, share, caller)
        share.arrive()
        answers = await self._inference.ask(model, samples, caller)
        document = {"model": model.name, **_said(model, answers[0])}
        return orjson.dumps(document | self._inference.describe(model.name, answers))

    async def _samples(
        self, model: AnyModel, headers: Mapping[bytes, bytes], share: Share, caller: Caller
    ) -> list[Any]:
        if isinstance(model.codec, TextCodec):
            bound = Bound(model.codec.most_bytes, "send a shorter text")
            body = await self._inference.read(model, headers, share, caller, bound)
            return [await self._inference.parse(partial(read_text, model.codec, body), body, share)]
        picture = await self._picture(model, headers, share, caller)
        return await self._inference.decode(model, [picture], share, caller)

    async def _picture(self, model: AnyModel, headers: Mapping[bytes, bytes], share: Share, caller: Caller) -> bytes:
        body = await self._inference.read(model, headers, share, caller)
        content_type = headers.get(b"content-type", b"").decode("latin-1")
        if not is_form(content_type):
            return body
        field: bytes = await self._inference.off_the_loop(field_of, body, content_type, "image")
        return field


def predict_routes(predict: Predict) -> list[BaseRoute]:
    """Where it stands among the others, for what is not a POST."""
    return [Route(path, predict, methods=["POST"]) for path in ("/predict", "/predict/{model}")]


def _said(model: AnyModel, answer: Answer) -> dict[str, Any]:
    if isinstance(model.codec, TextCodec) and model.codec.generates:
        return {"text": model.codec.words(answer.output.tokens), "new_tokens": len(answer.output.tokens)}
    return {"predictions": best(model, answer)}


def best(model: AnyModel, answer: Answer) -> list[dict[str, Any]]:
    """The five likeliest classes of float32 [classes] logits, or all where there are fewer; the likeliest first."""
    logits = answer.output.astype(np.float64)
    likely = np.exp(logits - logits.max())
    likely /= likely.sum()
    first = np.argpartition(-likely, _BEST)[:_BEST] if len(likely) > _BEST else np.arange(len(likely))
    ordered = first[np.lexsort((first, -likely[first]))].tolist()
    return [{"class_index": i, "label": model.labels[i], "probability": float(likely[i])} for i in ordered]
