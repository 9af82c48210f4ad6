"""The routes of the Open Inference Protocol v2."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from server.calls import Answer
from server.documents import (
    VERSION,
    ModelFacts,
    model_config,
    model_metadata,
    repository_index,
    server_metadata,
    statistics,
    wants_ready_only,
)
from server.encoding import compress
from server.errors import NotFoundError
from server.http import Caller, Headers, caller_of, client_timeout, headers_of, read_body, respond
from server.inference import MAX_BODY_BYTES, Inference
from server.intake import Share
from server.models import AnyModel
from server.protocol import InferCall, parse_header_length, parse_infer, render_infer
from server.tensors import RAW, TensorSpec
from server.text import TextCodec
from server.text_calls import text_input, text_output, texts_of

_log = logging.getLogger("batchwright.gateway")
_SMALL = 1024  # bytes; compressing less costs more than it saves
_MANY_NUMBERS = 20_000  # reading or writing more takes a millisecond
_LONG_JSON = 65536  # bytes; reading more takes milliseconds


def model_facts(model: AnyModel) -> ModelFacts:
    """What the protocol's documents tell of a model."""
    codec = model.codec
    if isinstance(codec, TextCodec):
        taken, given = text_input(codec), text_output(codec, len(model.labels))
    else:
        taken = TensorSpec("image", {"UINT8": (codec.height, codec.width, 3), "BYTES": ()})
        given = TensorSpec("logits", {"FP32": (len(model.labels),)})
    return ModelFacts(
        name=model.name,
        platform="emulated" if model.weights == "emulated" else "pytorch",
        input=taken,
        outputs=(given,),
        max_batch_size=model.max_batch_size,
    )


class Infer:
    """POST /v2/models/{m}[/versions/{v}]/infer on bare ASGI: this is the route that has to be fast."""

    _PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")

    def __init__(self, inference: Inference) -> None:
        """`inference` serves the calls."""
        self._inference = inference
        self._facts = {name: model_facts(model) for name, model in inference.models.items()}

    def matches(self, scope: Scope) -> bool:
        """Whether the request is one of ours."""
        return scope["type"] == "http" and scope["method"] == "POST" and bool(self._PATH.fullmatch(scope["path"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call; whatever goes wrong is answered too."""
        caller = caller_of(scope, receive)
        path = self._PATH.fullmatch(scope["path"])
        name, version = path.groups() if path else ("", None)
        async with self._inference.answering(name, scope, send, caller):
            _check_version(version)
            await self._answer(name, headers_of(scope), send, caller)

    async def _answer(self, name: str, headers: Mapping[bytes, bytes], send: Send, caller: Caller) -> None:
        model = self._inference.model(name)
        caller.timeout = client_timeout(headers)
        with self._inference.intake.share() as share:
            call = await self._read(model, headers, share, caller)
            caller.timeout = min(caller.timeout, call.timeout or inf)
            inputs = await self._samples(model, call, share, caller)
            share.arrive()
            answers = await self._inference.ask(model, inputs, caller)
        (given,) = self._facts[name].outputs
        output = _stacked(model, answers)
        parameters = self._inference.describe(name, answers)
        render = partial(render_infer, call, name, {given.name: output}, model.labels, parameters)
        body, length = await self._inference.off_the_loop(render) if output.size > _MANY_NUMBERS else render()
        await self._send(send, body, length, headers.get(b"accept-encoding"))

    async def _read(self, model: AnyModel, headers: Mapping[bytes, bytes], share: Share, caller: Caller) -> InferCall:
        announced = headers.get(b"inference-header-content-length")
        length = parse_header_length(None if announced is None else announced.decode("latin-1"))
        body = await self._inference.read(model, headers, share, caller)
        facts = self._facts[model.name]
        names = [output.name for output in facts.outputs]
        parse = partial(parse_infer, body, length, facts.input, names, self._inference.capacity)
        document = len(body) if length is None else length
        return await self._inference.off_the_loop(parse) if document > _LONG_JSON else parse()

    async def _samples(self, model: AnyModel, call: InferCall, share: Share, caller: Caller) -> list[Any]:
        tensor, codec = call.tensor, model.codec
        if isinstance(codec, TextCodec):
            read = partial(texts_of, codec, call)
            many = math.prod(tensor.shape) > _MANY_NUMBERS
            texts: list[Any] = await self._inference.off_the_loop(read) if many else read()
            return texts
        if isinstance(tensor.data, np.ndarray):
            return list(tensor.data)
        if tensor.datatype == RAW and codec.holds_pixels(tensor.data[0]):
            return [codec.pixels(tensor.data[0])]
        return await self._inference.decode(model, tensor.data, share, caller)

    async def _send(self, send: Send, body: bytes, length: int | None, accepted: bytes | None) -> None:
        headers: Headers = []
        if length is not None:
            headers.append((b"inference-header-content-length", str(length).encode()))
        if accepted is not None and len(body) > _SMALL:
            body, encoding = await self._inference.off_the_loop(compress, body, accepted.decode("latin-1"))
            if encoding is not None:
                headers.append((b"content-encoding", encoding.encode()))
        await respond(send, body, b"application/json" if length is None else b"application/octet-stream", headers)


def _stacked(model: AnyModel, answers: Sequence[Answer]) -> NDArray[Any]:
    """float32 [samples, classes], or int64 [samples, longest] of what was generated."""
    if isinstance(model.codec, TextCodec) and model.codec.generates:
        return model.codec.padded([answer.output.tokens for answer in answers])
    return np.stack([answer.output for answer in answers]) if len(answers) > 1 else answers[0].output[None]


def _check_version(version: str | None) -> None:
    if version not in (None, VERSION):
        raise NotFoundError(f"no version {version[:20]!r} of the model; there is {VERSION}")


class Documents:
    """The routes that describe the server and its models."""

    def __init__(self, inference: Inference, version: str) -> None:
        """`version` is the server's."""
        self._inference = inference
        self._version = version

    def _model(self, request: Request) -> AnyModel:
        _check_version(request.path_params.get("version"))
        return self._inference.model(request.path_params["model"])

    async def server(self, _: Request) -> Response:
        """GET /v2."""
        return JSONResponse(server_metadata("batchwright", self._version))

    async def metadata(self, request: Request) -> Response:
        """GET /v2/models/{m}: with a note on where the weights come from, and on the bounds of texts."""
        model = self._model(request)
        bounds = model.codec.bounds() if isinstance(model.codec, TextCodec) else {}
        return JSONResponse(model_metadata(model_facts(model)) | {"parameters": {"weights": model.weights, **bounds}})

    async def config(self, request: Request) -> Response:
        """GET /v2/models/{m}/config."""
        return JSONResponse(model_config(model_facts(self._model(request))))

    async def ready(self, request: Request) -> Response:
        """GET /v2/models/{m}/ready."""
        model = self._model(request)
        ready = self._inference.fleet.ready
        return JSONResponse({"name": model.name, "ready": ready}, 200 if ready else 503)

    async def model_statistics(self, request: Request) -> Response:
        """GET /v2/models/{m}/stats."""
        model = self._model(request)
        return JSONResponse(statistics([self._inference.metrics.statistics.of(model.name)]))

    async def all_statistics(self, _: Request) -> Response:
        """GET /v2/models/stats."""
        return JSONResponse(statistics(self._inference.metrics.statistics.of(name) for name in self._inference.models))

    async def index(self, request: Request) -> Response:
        """POST /v2/repository/index: a bare array."""
        body = await read_body(headers_of(request.scope), request.receive, MAX_BODY_BYTES)
        ready_only = wants_ready_only(body)
        state = "READY" if self._inference.fleet.ready else "UNAVAILABLE"
        entries = repository_index([(name, state) for name in self._inference.models], ready_only)
        return Response(orjson.dumps(entries), media_type="application/json")


def open_inference_routes(infer: Infer, documents: Documents) -> list[BaseRoute]:
    """All routes of the protocol."""
    of_model = [("/ready", documents.ready), ("/config", documents.config), ("/stats", documents.model_statistics)]
    routes: list[BaseRoute] = []
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes.append(Route(f"{base}/infer", infer, methods=["POST"]))
        routes += [Route(base + path, handler, methods=["GET"]) for path, handler in of_model]
    return [
        Route("/v2", documents.server, methods=["GET"]),
        Route("/v2/models/stats", documents.all_statistics, methods=["GET"]),
        Route("/v2/repository/index", documents.index, methods=["POST"]),
        *routes,
        Route("/v2/models/{model}", documents.metadata, methods=["GET"]),
        Route("/v2/models/{model}/versions/{version}", documents.metadata, methods=["GET"]),
    ]
