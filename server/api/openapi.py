"""What routes declare for the OpenAPI document that FastAPI generates: errors, parameters, bodies.

The routes for inference are bare ASGI, which FastAPI does not see, so their bodies are declared here. schemathesis
compares the document with the running server.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from server.api import schemas

_Json = dict[str, Any]
_DESCRIPTIONS = {
    400: "The request cannot be used; the message says why and what to send",
    401: "An API key is needed: Authorization: Bearer KEY",
    403: "The API key may not do this",
    404: "There is no such model, version or device",
    408: "The request was not complete within the time limit",
    413: "The body is over the limit",
    415: "The content encoding is not supported",
    429: "Over the key's rate limit; Retry-After says when to send it again",
    431: "The headers are over the limit",
    500: "The device failed on this sample",
    503: "The queue is full, the answer would be late, or the server is stopping; see Retry-After",
    504: "The timeout passed before the answer",
}
PUBLIC = (400, 408, 431)  # errors of routes that need no key
KEYED = (*PUBLIC, 401, 403, 429)
OF_MODEL = (*KEYED, 404)
INFERENCE = (*OF_MODEL, 413, 415, 500, 503, 504)
BINARY: _Json = {"schema": {"type": "string", "format": "binary"}}
MODEL: _Json = {"in": "path", "name": "model", "required": True, "schema": {"type": "string"}}
VERSION_PARAMETER: _Json = {"in": "path", "name": "version", "required": True, "schema": {"type": "string"}}
TIMEOUT: _Json = {
    "in": "header",
    "name": "X-Timeout-Ms",
    "schema": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e9},
    "description": "How long the client waits for the answer, ms",
}
JSON_LENGTH: _Json = {
    "in": "header",
    "name": "Inference-Header-Content-Length",
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**9},
    "description": "Bytes of JSON before the tensors; 0: the whole body is one sample, a picture or its pixels",
}


_REQUESTS = (
    schemas.TextCall,
    schemas.InferRequest,
    schemas.IndexRequest,
    schemas.PolicyChange,
    schemas.DeviceChange,
)


def documented(
    summary: str,
    answer: Any,
    errors: Sequence[int],
    *,
    parameters: Sequence[_Json] = (),
    body: _Json | None = None,
    content: _Json | None = None,
) -> _Json:
    """Keyword arguments for a route of FastAPI.

    Args:
        summary: one sentence.
        answer: pydantic model of the answer; None where `content` says it all.
        errors: statuses of errors.
        parameters: OpenAPI objects beside those of the path.
        body: content of the request by media type.
        content: content of the answer by media type, beside `answer`.
    """
    responses: dict[int | str, _Json] = {
        code: {"model": schemas.Error, "description": _DESCRIPTIONS[code]} for code in errors
    }
    responses[200] = {"description": summary} | ({"content": content} if content else {})
    extra: _Json = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": body}
    if 401 in errors:
        extra["security"] = [{}, {"key": []}]
    return {"summary": summary, "response_model": answer, "responses": responses, "openapi_extra": extra}


async def served_before() -> None:
    """Stand in for a route on bare ASGI, which has answered before FastAPI is reached."""
    raise NotImplementedError


def json_content(model: type[BaseModel]) -> _Json:
    """Content of a JSON body; `complete` adds the model to the document."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def complete(document: _Json, models: Sequence[str]) -> _Json:
    """Complete the document that FastAPI generated.

    Args:
        document: is changed.
        models: names of the models that are served.
    """
    components = document.setdefault("components", {})
    for model in _REQUESTS:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        components["schemas"] |= schema.pop("$defs", {}) | {model.__name__: schema}
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "Needed if the server has API keys"}
    }
    known = {"model": list(models), "version": ["1"]}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # a request that is not valid is answered 400
            operation.pop("description", None)  # FastAPI takes it from docstrings, which are for developers
            for status, response in operation["responses"].items():
                if status != "200":  # errors are JSON, also of routes that return text
                    response["content"] = {"application/json": next(iter(response["content"].values()))}
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in known:
                    parameter["schema"] = {"type": "string", "enum": known[parameter["name"]]}
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    return document


def generate(app: FastAPI, models: Sequence[str]) -> _Json:
    """The OpenAPI document of an app."""
    return complete(FastAPI.openapi(app), models)
