"""The OpenAPI document: every route, what it takes, what it answers, and each error.

Written by hand in this one place: the hot routes are bare ASGI, of which FastAPI knows nothing. A test compares it
with the routes that there are, and schemathesis holds the running server to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from server.api.openapi_schemas import INFER_HEADERS, SCHEMAS, array_of, reference

_Json = dict[str, Any]

_ERRORS: Mapping[int, str] = {
    400: "The bytes that came cannot be used; the message says why and what to send",
    401: "A key is needed: Authorization: Bearer KEY",
    403: "The key is for something else",
    404: "There is no such model, version or device",
    408: "The request did not come within the time limit",
    413: "The body is over the limit",
    415: "A content encoding that is not spoken here",
    429: "Over the key's rate; Retry-After says when to come again",
    431: "The headers are over the limit",
    500: "The device failed on this sample",
    503: "No room, an answer that would be late, or a server that is stopping; Retry-After says when to come again",
    504: "The time-out passed before an answer",
}
_OPEN = (400, 408, 431)
_KEYED = (*_OPEN, 401, 403, 429)
_OF_MODEL = (*_KEYED, 404)
_BODY = (*_KEYED, 413)
_INFERENCE = (*_OF_MODEL, 413, 415, 500, 503, 504)
_PICTURES = ("image/jpeg", "image/png")
_BINARY = {"type": "string", "format": "binary"}


def api_document(models: Sequence[str], version: str) -> _Json:
    """The document.

    Args:
        models: names of those that are served.
        version: the server's.
    """
    model = _parameter("path", "model", {"type": "string", "enum": list(models)}, "Which model")
    schemes = {"key": {"type": "http", "scheme": "bearer", "description": "Only where the server was given keys"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Batchwright", "version": version},
        "paths": {**_prediction(model), **_protocol(model), **_admin(model), **_health()},
        "components": {"schemas": dict(SCHEMAS), "securitySchemes": schemes},
    }


def _prediction(model: _Json) -> _Json:
    form = {"schema": {"type": "object", "required": ["image"], "properties": {"image": _BINARY}}}
    pictures = {kind: {"schema": _BINARY} for kind in _PICTURES}
    body = _body({**pictures, "multipart/form-data": form, **_json("TextCall")})
    said = {"application/json": {"schema": {"anyOf": [reference("Prediction"), reference("Generation")]}}}
    answer = _answers("The five likeliest classes, or the text that was generated", said, _INFERENCE)

    def post(summary: str, *parameters: _Json) -> _Json:
        return {"post": _operation(summary, answer, [*parameters, _timeout()], body, keyed=True)}

    return {
        "/predict": post("Ask the only model loaded: a picture or a text"),
        "/predict/{model}": post("Ask a model: a picture or a text", model),
    }


def _timeout() -> _Json:
    milliseconds = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e9}
    return _parameter("header", "X-Timeout-Ms", milliseconds, "How long the client will wait, ms", required=False)


def _protocol(model: _Json) -> _Json:
    """Open Inference Protocol v2."""
    version = _parameter("path", "version", {"type": "string", "enum": ["1"]}, "Which version")
    paths: _Json = {
        "/v2": _get("What the server is and speaks", _json("ServerMetadata"), _KEYED),
        "/v2/models/stats": _get("Statistics of all models", _json("Statistics"), _KEYED),
        "/v2/repository/index": {"post": _index()},
    }
    for base, parameters in (
        ("/v2/models/{model}", [model]),
        ("/v2/models/{model}/versions/{version}", [model, version]),
    ):
        paths |= {
            base: _get("What the model takes and gives", _json("ModelMetadata"), _OF_MODEL, parameters),
            f"{base}/ready": {"get": _ready("Whether the model is served", "ModelReady", _OF_MODEL, parameters)},
            f"{base}/config": _get("The model's configuration", _json("ModelConfig"), _OF_MODEL, parameters),
            f"{base}/stats": _get("The model's statistics", _json("Statistics"), _OF_MODEL, parameters),
            f"{base}/infer": {"post": _infer(parameters)},
        }
    return paths


def _infer(parameters: Sequence[_Json]) -> _Json:
    length = {"type": "integer", "minimum": 0, "maximum": 10**9}
    words = "Bytes of JSON before the tensors; 0: the whole body is one sample, a picture or its pixels"
    header = _parameter("header", "Inference-Header-Content-Length", length, words, required=False)
    body = _body(
        {"application/json": {"schema": reference("InferRequest")}, "application/octet-stream": {"schema": _BINARY}}
    )
    content = {**_json("InferResponse"), "application/octet-stream": {"schema": _BINARY}}
    answers = _answers("The outputs, as JSON or as JSON followed by the tensors", content, _INFERENCE)
    answers["200"]["headers"] = INFER_HEADERS
    return _operation("Infer", answers, [*parameters, header, _timeout()], body, keyed=True)


def _index() -> _Json:
    wanted = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
    body = _body({"application/json": {"schema": wanted}}, required=False)
    content = {"application/json": {"schema": array_of("IndexEntry")}}
    return _operation("The models that are here", _answers("One entry a model", content, _BODY), [], body, keyed=True)


def _admin(model: _Json) -> _Json:
    body = _body({"application/json": {"schema": reference("PolicyChange")}})
    path = "/admin/models/{model}"
    answers = _answers("The policy that decides now, and what it expects", _json("Policy"), _OF_MODEL)
    changed = _answers("The policy that decides from now on", _json("Policy"), (*_OF_MODEL, 413))
    index = _parameter("path", "index", {"type": "integer", "minimum": 0}, "Which device, counted from 0")
    serving = _body({"application/json": {"schema": reference("DeviceChange")}})
    device = _answers("The device as it is now", _json("Device"), (*_OF_MODEL, 413, 503))
    devices = {"application/json": {"schema": array_of("Device")}}
    return {
        f"{path}/policy": {
            "get": _operation("What decides now, and what it expects", answers, [model], keyed=True),
            "put": _operation("Decide by another policy from now on", changed, [model], body, keyed=True),
        },
        f"{path}/solve": {"post": _operation("Solve again for the profile at hand", changed, [model], keyed=True)},
        "/admin/devices": _get("The devices, and what each of them does", devices, _KEYED),
        "/admin/devices/{index}": {
            "put": _operation("Take a device away, or bring it back", device, [index], serving, keyed=True)
        },
    }


def _health() -> _Json:
    text = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "text/html")}
    return {
        "/v2/health/live": {"get": _ready("200 while the dispatcher's loop runs", "Live", _OPEN)},
        "/v2/health/ready": {"get": _ready("200 while new calls are admitted", "Ready", _OPEN)},
        "/metrics": _get("For Prometheus", {"text/plain": text["text/plain"]}, _OPEN, keyed=False),
        "/": _get("A page for people", {"text/html": text["text/html"]}, _OPEN, keyed=False),
        "/docs": _get("This document, for people", {"text/html": text["text/html"]}, _OPEN, keyed=False),
    }


def _get(
    summary: str, content: _Json, errors: Sequence[int], parameters: Sequence[_Json] = (), *, keyed: bool = True
) -> _Json:
    return {"get": _operation(summary, _answers(summary, content, errors), parameters, keyed=keyed)}


def _ready(summary: str, schema: str, errors: Sequence[int], parameters: Sequence[_Json] = ()) -> _Json:
    """Yes is 200, no is 503, and both say so in the same words."""
    answers = _answers(summary, _json(schema), errors)
    answers["503"] = {"description": "No", "content": _json(schema)}
    return _operation(summary, answers, parameters, keyed=bool(parameters))


def _operation(
    summary: str, answers: _Json, parameters: Sequence[_Json], body: _Json | None = None, *, keyed: bool
) -> _Json:
    operation = {"summary": summary, "parameters": list(parameters), "responses": answers}
    if body is not None:
        operation["requestBody"] = body
    return operation | ({"security": [{}, {"key": []}]} if keyed else {})


def _answers(description: str, content: _Json, errors: Sequence[int]) -> _Json:
    failures = {str(code): {"description": _ERRORS[code], "content": _json("Error")} for code in sorted(errors)}
    return {"200": {"description": description, "content": content}, **failures}


def _parameter(place: str, name: str, schema: _Json, description: str, *, required: bool = True) -> _Json:
    return {"in": place, "name": name, "schema": schema, "description": description, "required": required}


def _body(content: _Json, *, required: bool = True) -> _Json:
    return {"required": required, "content": content}


def _json(name: str) -> _Json:
    return {"application/json": {"schema": reference(name)}}
