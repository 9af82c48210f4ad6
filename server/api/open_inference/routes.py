"""The routes of the Open Inference Protocol v2."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.api import schemas
from server.api.inference import ANY_BODY, JSON_BODY, JSON_REMEDY, Inference
from server.api.open_inference.documents import (
    VERSION,
    ModelDescription,
    model_config,
    model_metadata,
    server_metadata,
    statistics,
)
from server.api.open_inference.protocol import (
    CallHeader,
    InferCall,
    document_of,
    parse_header,
    parse_header_length,
    parse_infer,
    raw_call,
    read_call,
    render_infer,
)
from server.api.openapi import (
    BINARY,
    INFERENCE_ERRORS,
    JSON_LENGTH,
    KEYED_ERRORS,
    MODEL,
    MODEL_ERRORS,
    TIMEOUT,
    VERSION_PARAMETER,
    bare_asgi_route,
    documented,
    json_content,
)
from server.errors import NotFoundError, TooLargeError
from server.models.model import ServedModel
from server.transport.content_encoding import compress
from server.transport.request import JSON_CONTENT, Handler, Headers, RequestContext

_BINARY_CONTENT = (b"content-type", b"application/octet-stream")
_MIN_COMPRESSED = 1024  # bytes; compressing less costs more than it saves
_MANY_SAMPLES = 16  # stacking and rendering the outputs of more takes over a millisecond
_KNOWN_DOCUMENTS = 256  # entries in the cache of parsed headers
_SHORT_DOCUMENT = 1024  # bytes of such a document


def model_description(model: ServedModel) -> ModelDescription:
    """The model as the protocol's documents describe it."""
    return ModelDescription(
        name=model.name,
        platform=model.platform,
        signature=model.signature,
        max_batch_size=model.max_batch_size,
    )


class Infer:
    """POST /v2/models/{m}[/versions/{v}]/infer, without FastAPI, for low overhead."""

    _PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")

    def __init__(self, inference: Inference) -> None:
        """`inference` serves the calls."""
        self._inference = inference
        self._headers: dict[tuple[str, int, bytes], CallHeader] = {}  # of documents that clients repeat

    def find(self, path: str) -> Handler | None:
        """Return the handler of POST requests with this path, which answers errors; None for other paths."""
        match = self._PATH.fullmatch(path)
        if match is None:
            return None
        version = match[2]
        answer = self._answer if version in (None, VERSION) else partial(_reject_version, version)
        return partial(self._inference.serve, match[1], answer)

    async def _answer(self, model: ServedModel, context: RequestContext) -> tuple[bytes, Headers]:
        call = await self._read(model, context)
        if call.timeout is not None:
            context.timeout = min(context.timeout, call.timeout)
        inputs = model.codec.from_tensors
        answers = await self._inference.infer(model, context, inputs(call.take_tensors(), call.parameters))
        outputs = [answer.output for answer in answers]
        arguments = call, model, outputs, self._inference.describe(model.name, answers, context)
        slow = len(outputs) > _MANY_SAMPLES or any(map(model.codec.renders_slowly, outputs))
        body, length = await self._inference.run_in_thread(_render, *arguments) if slow else _render(*arguments)
        headers: Headers = [JSON_CONTENT]
        if length is not None:
            headers = [_BINARY_CONTENT, (b"inference-header-content-length", str(length).encode())]
        accepted = context.headers.get(b"accept-encoding")
        if accepted is not None and len(body) > _MIN_COMPRESSED:
            body, encoding = await self._inference.run_in_thread(compress, body, accepted.decode("latin-1"))
            if encoding is not None:
                headers.append((b"content-encoding", encoding.encode()))
        return body, headers

    async def _read(self, model: ServedModel, context: RequestContext) -> InferCall:
        length = parse_header_length(context.headers.get(b"inference-header-content-length"))
        if length is not None and length > JSON_BODY.max_bytes:
            raise TooLargeError(f"the JSON has {length} bytes, over {JSON_BODY.max_bytes}; {JSON_REMEDY}")
        body = await self._inference.read(model, context, JSON_BODY if length is None else ANY_BODY)
        if length == 0:
            return raw_call(body, model.signature)
        document = document_of(body, length)
        if len(document) > _SHORT_DOCUMENT:
            parse = partial(parse_infer, body, length, model.signature, self._inference.capacity)
            return await self._inference.parse(parse, document, context)
        key = (model.name, model.revision, document)
        header = self._headers.get(key)
        if header is None:
            parse_document = partial(parse_header, document, model.signature, self._inference.capacity)
            header = await self._inference.parse(parse_document, document, context)
            if not header.data:
                if len(self._headers) >= _KNOWN_DOCUMENTS:
                    self._headers.clear()
                self._headers[key] = header
        return read_call(header, body, len(document))


def _render(
    call: InferCall, model: ServedModel, outputs: Sequence[Any], parameters: dict[str, Any]
) -> tuple[bytes, int | None]:
    """Render the response to a call from the outputs of its samples."""
    return render_infer(call, model.name, model.codec.stack(outputs), model.labels, parameters)


async def _reject_version(version: str, *_: object) -> tuple[bytes, Headers]:
    raise _version_error(version)


def _version_error(version: str) -> NotFoundError:
    return NotFoundError(f"no version {version[:20]!r} of the model; there is {VERSION}")


def _check_version(version: str | None) -> None:
    if version not in (None, VERSION):
        raise _version_error(version)


class DescriptionRoutes:
    """The endpoints that describe the server and its models."""

    def __init__(self, inference: Inference, version: str) -> None:
        """`version` is that of the server."""
        self._inference = inference
        self._version = version

    def _model(self, request: Request) -> ServedModel:
        _check_version(request.path_params.get("version"))
        return self._inference.model(request.path_params["model"])

    async def server(self, _: Request) -> Response:
        """GET /v2."""
        return JSONResponse(server_metadata("batchwright", self._version))

    async def metadata(self, request: Request) -> Response:
        """GET /v2/models/{m}; the parameters are the origin of the weights and the limits of texts."""
        model = self._model(request)
        parameters = {"weights": model.weights, **model.codec.metadata_parameters()}
        return JSONResponse(model_metadata(model_description(model)) | {"parameters": parameters})

    async def config(self, request: Request) -> Response:
        """GET /v2/models/{m}/config."""
        return JSONResponse(model_config(model_description(self._model(request))))

    async def ready(self, request: Request) -> Response:
        """GET /v2/models/{m}/ready."""
        model = self._model(request)
        ready = self._inference.fleet.is_ready(model.name)
        return JSONResponse({"name": model.name, "ready": ready}, 200 if ready else 503)

    async def model_statistics(self, request: Request) -> Response:
        """GET /v2/models/{m}/stats."""
        model = self._model(request)
        return JSONResponse(statistics([self._inference.metrics.statistics.of(model.name)]))

    async def all_statistics(self, _: Request) -> Response:
        """GET /v2/models/stats."""
        return JSONResponse(statistics(self._inference.metrics.statistics.of(name) for name in self._inference.models))


def add_open_inference(app: FastAPI, routes: DescriptionRoutes) -> None:
    """Add the routes of the protocol."""
    model_routes = {
        "": (routes.metadata, "The model's inputs and outputs", schemas.ModelMetadata),
        "/ready": (routes.ready, "Whether the model is ready", schemas.ModelReady),
        "/config": (routes.config, "The model's configuration", schemas.ModelConfig),
        "/stats": (routes.model_statistics, "The model's statistics", schemas.Statistics),
    }
    server_route = documented("The server and its extensions", schemas.ServerMetadata, KEYED_ERRORS)
    app.get("/v2", **server_route)(routes.server)
    statistics_route = documented("Statistics of all models", schemas.Statistics, KEYED_ERRORS)
    app.get("/v2/models/stats", **statistics_route)(routes.all_statistics)
    for base, parameters in (
        ("/v2/models/{model}", [MODEL]),
        ("/v2/models/{model}/versions/{version}", [MODEL, VERSION_PARAMETER]),
    ):
        for path, (endpoint, summary, response) in model_routes.items():
            route = documented(summary, response, MODEL_ERRORS, parameters=parameters)
            if path == "/ready":
                route["responses"][503] = {"model": response, "description": "The model is not ready"}
            app.get(f"{base}{path}", **route)(endpoint)
        app.post(
            f"{base}/infer",
            **documented(
                "Infer",
                schemas.InferResponse,
                INFERENCE_ERRORS,
                parameters=[*parameters, JSON_LENGTH, TIMEOUT],
                body=json_content(schemas.InferRequest) | {"application/octet-stream": BINARY},
                content={"application/octet-stream": BINARY},
            ),
        )(bare_asgi_route)
