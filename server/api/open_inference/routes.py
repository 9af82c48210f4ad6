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

from server.api.inference import ANY_BODY, JSON_BODY, JSON_REMEDY, Inference
from server.api.open_inference.documents import (
    VERSION,
    ModelFacts,
    model_config,
    model_metadata,
    repository_index,
    server_metadata,
    statistics,
    wants_ready_only,
)
from server.api.open_inference.protocol import (
    InferCall,
    document_of,
    parse_header_length,
    parse_infer,
    render_infer,
)
from server.api.open_inference.tensors import RAW, TensorSpec
from server.api.open_inference.text_tensors import text_input, text_output, texts_of
from server.errors import NotFoundError, TooLargeError
from server.models.model import AnyModel
from server.models.text import TextCodec
from server.scheduling.calls import Answer
from server.transport.asgi import Caller, Headers, caller_of, client_timeout, headers_of, read_body, respond
from server.transport.content_encoding import compress
from server.transport.memory_budget import Share

_log = logging.getLogger("batchwright.gateway")
_SMALL = 1024  # bytes; compressing less costs more than it saves
_ID_BYTES = 40  # of a token id in a list
_MANY_NUMBERS = 20_000  # reading or writing more takes a millisecond
_MAX_INDEX_BYTES = 1024  # of the body of POST /v2/repository/index


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
        async with self._inference.answering(name, scope, send, caller) as share:
            _check_version(version)
            model, headers = self._inference.model(name), headers_of(scope)
            body, answer_headers = await self._answer(model, headers, share, caller)
            share.settle(len(body))  # all else that the call held is gone
            await respond(send, body, *answer_headers)

    async def _answer(
        self, model: AnyModel, headers: Mapping[bytes, bytes], share: Share, caller: Caller
    ) -> tuple[bytes, tuple[bytes, Headers]]:
        """The answer to a call: its body, its content type and what else its headers say."""
        caller.timeout = client_timeout(headers)
        call, answers = await self._serve(model, headers, share, caller)
        (given,) = self._facts[model.name].outputs
        output = _stacked(model, answers)
        parameters = self._inference.describe(model.name, answers)
        render = partial(render_infer, call, model.name, {given.name: output}, model.labels, parameters)
        body, length = await self._inference.off_the_loop(render) if output.size > _MANY_NUMBERS else render()
        more: Headers = [] if length is None else [(b"inference-header-content-length", str(length).encode())]
        accepted = headers.get(b"accept-encoding")
        if accepted is not None and len(body) > _SMALL:
            body, encoding = await self._inference.off_the_loop(compress, body, accepted.decode("latin-1"))
            if encoding is not None:
                more.append((b"content-encoding", encoding.encode()))
        return body, (b"application/json" if length is None else b"application/octet-stream", more)

    async def _serve(
        self, model: AnyModel, headers: Mapping[bytes, bytes], share: Share, caller: Caller
    ) -> tuple[InferCall, Sequence[Answer]]:
        """A call without its inputs, which end here, and the answers to its samples."""
        call = await self._read(model, headers, share, caller)
        caller.timeout = min(caller.timeout, call.timeout or inf)
        inputs = await self._samples(model, call, share, caller)
        share.arrive()
        call.drop_inputs()
        return call, await self._inference.ask(model, inputs, caller)

    async def _read(self, model: AnyModel, headers: Mapping[bytes, bytes], share: Share, caller: Caller) -> InferCall:
        announced = headers.get(b"inference-header-content-length")
        length = parse_header_length(None if announced is None else announced.decode("latin-1"))
        if length is not None and length > JSON_BODY.max_bytes:
            raise TooLargeError(f"the JSON has {length} bytes, over {JSON_BODY.max_bytes}; {JSON_REMEDY}")
        bound = JSON_BODY if length is None else ANY_BODY
        body = await self._inference.read(model, headers, share, caller, bound)
        facts = self._facts[model.name]
        names = [output.name for output in facts.outputs]
        parse = partial(parse_infer, body, length, facts.input, names, self._inference.capacity)
        return await self._inference.parse(parse, document_of(body, length), share)

    async def _samples(self, model: AnyModel, call: InferCall, share: Share, caller: Caller) -> list[Any]:
        tensor, codec = call.tensor, model.codec
        if isinstance(codec, TextCodec):
            read = partial(texts_of, codec, call)
            ids = math.prod(tensor.shape)
            self._inference.reserve(model, tensor.shape[0], _ID_BYTES * ids, share, caller)
            many = ids > _MANY_NUMBERS
            texts: list[Any] = await self._inference.off_the_loop(read) if many else read()
            return texts
        if isinstance(tensor.data, np.ndarray):
            return list(tensor.data)
        if tensor.datatype == RAW and codec.holds_pixels(tensor.data[0]):
            return [codec.pixels(tensor.data[0])]
        return await self._inference.decode(model, tensor.data, share, caller)


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
        with self._inference.intake.share() as share:
            headers = headers_of(request.scope)
            body = await read_body(
                headers, request.receive, _MAX_INDEX_BYTES, share.reach, "send none or 'ready' alone"
            )
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
