"""The OpenAPI document: the parameters, request body, response and errors of every route.

It is written by hand, since the inference routes are bare ASGI, which FastAPI does not document. One test compares it
with the routes of the application, another checks the running server against it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from server.api.openapi_schemas import INFER_HEADERS, SCHEMAS, array_of, reference

_Json = dict[str, Any]

_ERRORS: Mapping[int, str] = {
    400: "Invalid input; the message says why and what to send",
    401: "Missing or unknown API key; send Authorization: Bearer KEY",
    403: "The key's scope does not include the route, or the browser protections reject the request",
    404: "Unknown model, version or device",
    408: "The request was not received within the time limit",
    413: "The body is over the size limit",
    415: "Unsupported content encoding or media type",
    429: "Over the key's rate limit; Retry-After says when to send again",
    431: "The headers are over the size limit",
    500: "The device failed on this sample",
    503: "Queue or memory budget full, response expected too late, or server stopping; send again after Retry-After",
    504: "The client's time-out passed before the response",
}
_OPEN = (400, 408, 431)
_KEYED = (*_OPEN, 401, 403, 429)
_OF_MODEL = (*_KEYED, 404)
_BODY = (*_KEYED, 413)
_INFERENCE = (*_OF_MODEL, 413, 415, 500, 503, 504)
_IMAGE_TYPES = ("image/jpeg", "image/png")
_BINARY = {"type": "string", "format": "binary"}


def api_document(models: Sequence[str], version: str) -> _Json:
    """Return the document.

    Args:
        models: names of the served models.
        version: version of the server.
    """
    model = _parameter("path", "model", {"type": "string", "enum": list(models)}, "Name of the model")
    schemes = {"key": {"type": "http", "scheme": "bearer", "description": "Required if the server has an API key file"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Batchwright", "version": version},
        "paths": {**_prediction(model), **_protocol(model), **_admin(model), **_health()},
        "components": {"schemas": dict(SCHEMAS), "securitySchemes": schemes},
    }


def _prediction(model: _Json) -> _Json:
    form = {"schema": {"type": "object", "required": ["image"], "properties": {"image": _BINARY}}}
    images = {kind: {"schema": _BINARY} for kind in _IMAGE_TYPES}
    body = _body({**images, "multipart/form-data": form, **_json("TextCall")})
    content = {"application/json": {"schema": {"anyOf": [reference("Prediction"), reference("Generation")]}}}
    responses = _responses("The five most probable classes, or the generated text", content, _INFERENCE)

    def post(summary: str, *parameters: _Json) -> _Json:
        return {"post": _operation(summary, responses, [*parameters, _timeout()], body, keyed=True)}

    return {
        "/predict": post("Predict from an image or a text with the only loaded model"),
        "/predict/{model}": post("Predict from an image or a text", model),
    }


def _timeout() -> _Json:
    milliseconds = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e9}
    return _parameter("header", "X-Timeout-Ms", milliseconds, "The client's time-out, ms", required=False)


def _protocol(model: _Json) -> _Json:
    """Open Inference Protocol v2."""
    version = _parameter("path", "version", {"type": "string", "enum": ["1"]}, "Version of the model")
    paths: _Json = {
        "/v2": _get("Metadata of the server", _json("ServerMetadata"), _KEYED),
        "/v2/models/stats": _get("Statistics of all models", _json("Statistics"), _KEYED),
        "/v2/repository/index": {"post": _index()},
    }
    for base, parameters in (
        ("/v2/models/{model}", [model]),
        ("/v2/models/{model}/versions/{version}", [model, version]),
    ):
        paths |= {
            base: _get("Metadata of the model", _json("ModelMetadata"), _OF_MODEL, parameters),
            f"{base}/ready": {"get": _ready("Whether the model is served", "ModelReady", _OF_MODEL, parameters)},
            f"{base}/config": _get("The model's configuration", _json("ModelConfig"), _OF_MODEL, parameters),
            f"{base}/stats": _get("The model's statistics", _json("Statistics"), _OF_MODEL, parameters),
            f"{base}/infer": {"post": _infer(parameters)},
        }
    return paths


def _infer(parameters: Sequence[_Json]) -> _Json:
    length = {"type": "integer", "minimum": 0, "maximum": 10**9}
    description = (
        "Bytes of JSON before the binary tensors; 0: the whole body is one sample, an encoded image or its pixels"
    )
    header = _parameter("header", "Inference-Header-Content-Length", length, description, required=False)
    body = _body(
        {"application/json": {"schema": reference("InferRequest")}, "application/octet-stream": {"schema": _BINARY}}
    )
    content = {**_json("InferResponse"), "application/octet-stream": {"schema": _BINARY}}
    responses = _responses("The outputs, as JSON or as JSON followed by binary tensors", content, _INFERENCE)
    responses["200"]["headers"] = INFER_HEADERS
    return _operation("Infer", responses, [*parameters, header, _timeout()], body, keyed=True)


def _index() -> _Json:
    schema = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
    body = _body({"application/json": {"schema": schema}}, required=False)
    content = {"application/json": {"schema": array_of("IndexEntry")}}
    return _operation("Index of the models", _responses("One entry per model", content, _BODY), [], body, keyed=True)


def _admin(model: _Json) -> _Json:
    body = _body({"application/json": {"schema": reference("PolicyChange")}})
    path = "/admin/models/{model}"
    current = _responses("The policy in use, with its expected response time and power", _json("Policy"), _OF_MODEL)
    changed = _responses("The policy now in use", _json("Policy"), (*_OF_MODEL, 413))
    index = _parameter("path", "index", {"type": "integer", "minimum": 0}, "Index of the device, from 0")
    serving = _body({"application/json": {"schema": reference("DeviceChange")}})
    device = _responses("The device after the change", _json("Device"), (*_OF_MODEL, 413, 503))
    devices = {"application/json": {"schema": array_of("Device")}}
    return {
        f"{path}/policy": {
            "get": _operation("Read the policy", current, [model], keyed=True),
            "put": _operation("Swap the policy", changed, [model], body, keyed=True),
        },
        f"{path}/solve": {"post": _operation("Solve the policy again for the profile", changed, [model], keyed=True)},
        "/admin/devices": _get("List the devices and their state", devices, _KEYED),
        "/admin/devices/{index}": {
            "put": _operation("Take a device out of service, or put it back", device, [index], serving, keyed=True)
        },
    }


def _health() -> _Json:
    text = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "text/html")}
    return {
        "/v2/health/live": {"get": _ready("Liveness: 200 while the dispatchers run", "Live", _OPEN)},
        "/v2/health/ready": {"get": _ready("Readiness: 200 while new calls are admitted", "Ready", _OPEN)},
        "/metrics": _get("Metrics in Prometheus' text format", {"text/plain": text["text/plain"]}, _OPEN, keyed=False),
        "/": _get("The dashboard", {"text/html": text["text/html"]}, _OPEN, keyed=False),
        "/docs": _get("The API reference as a page", {"text/html": text["text/html"]}, _OPEN, keyed=False),
    }


def _get(
    summary: str, content: _Json, errors: Sequence[int], parameters: Sequence[_Json] = (), *, keyed: bool = True
) -> _Json:
    return {"get": _operation(summary, _responses(summary, content, errors), parameters, keyed=keyed)}


def _ready(summary: str, schema: str, errors: Sequence[int], parameters: Sequence[_Json] = ()) -> _Json:
    """An operation that answers 200 or 503, both with a body of the same schema."""
    responses = _responses(summary, _json(schema), errors)
    responses["503"] = {"description": "Not live or not ready", "content": _json(schema)}
    return _operation(summary, responses, parameters, keyed=bool(parameters))


def _operation(
    summary: str, responses: _Json, parameters: Sequence[_Json], body: _Json | None = None, *, keyed: bool
) -> _Json:
    operation = {"summary": summary, "parameters": list(parameters), "responses": responses}
    if body is not None:
        operation["requestBody"] = body
    return operation | ({"security": [{}, {"key": []}]} if keyed else {})


def _responses(description: str, content: _Json, errors: Sequence[int]) -> _Json:
    failures = {str(code): {"description": _ERRORS[code], "content": _json("Error")} for code in sorted(errors)}
    return {"200": {"description": description, "content": content}, **failures}


def _parameter(place: str, name: str, schema: _Json, description: str, *, required: bool = True) -> _Json:
    return {"in": place, "name": name, "schema": schema, "description": description, "required": required}


def _body(content: _Json, *, required: bool = True) -> _Json:
    return {"required": required, "content": content}


def _json(name: str) -> _Json:
    return {"application/json": {"schema": reference(name)}}
