"""The OpenAPI document: what routes declare for FastAPI, which generates it, and what is added to its output.

The inference routes have handlers of their own, outside FastAPI, so their bodies are declared here. schemathesis
compares the document with the running server.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from server.api import schemas
from server.api.texts import EmbeddingsCall, RerankCall

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
PUBLIC_ERRORS = (400, 408, 431)  # statuses of routes that need no key
KEYED_ERRORS = (*PUBLIC_ERRORS, 401, 403, 429)
MODEL_ERRORS = (*KEYED_ERRORS, 404)
INFERENCE_ERRORS = (*MODEL_ERRORS, 413, 415, 500, 503, 504)
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
    "description": "Bytes of JSON before the tensors; 0: the whole body is one sample",
}
_SCHEMAS = (  # errors, since a model of each route slows the start, and request bodies, which FastAPI does not parse
    schemas.Error,
    schemas.TextError,
    schemas.TensorCall,
    schemas.InferRequest,
    schemas.IndexRequest,
    schemas.RepositoryRequest,
    schemas.PolicyChange,
    schemas.DeviceChange,
    EmbeddingsCall,
    RerankCall,
)


def documented(
    summary: str,
    response: Any,
    errors: Sequence[int],
    *,
    parameters: Sequence[_Json] = (),
    body: _Json | None = None,
    content: _Json | None = None,
    error: type[BaseModel] = schemas.Error,
) -> _Json:
    """Keyword arguments for a route of FastAPI.

    Args:
        summary: one sentence.
        response: pydantic model of the JSON response; None if the response is not JSON.
        errors: statuses of error responses.
        parameters: OpenAPI objects of parameters that FastAPI does not find.
        body: content of the request by media type.
        content: further content of the response by media type.
        error: body of the errors, one of `_SCHEMAS`.
    """
    responses: dict[int | str, _Json] = {
        code: {"description": _DESCRIPTIONS[code], "content": json_content(error)} for code in errors
    }
    responses[200] = {"description": summary} | ({"content": content} if content else {})
    extra: _Json = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": body}
    if 401 in errors:
        extra["security"] = [{}, {"key": []}]
    return {"summary": summary, "response_model": response, "responses": responses, "openapi_extra": extra}


async def route_outside_fastapi() -> None:
    """Endpoint of a route with a handler of its own: declares it to FastAPI, which never receives its requests."""
    raise NotImplementedError


def json_content(model: type[BaseModel]) -> _Json:
    """Content of a JSON body that is this model, one of `_SCHEMAS`."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def generate(app: FastAPI, models: Sequence[str]) -> _Json:
    """Generate the OpenAPI document of an app that serves these models."""
    document = FastAPI.openapi(app)
    components = document.setdefault("components", {})
    for model in _SCHEMAS:
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
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in known:
                    parameter["schema"] = {"type": "string", "enum": known[parameter["name"]]}
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    return document


def add_texts(app: FastAPI, models: Callable[[], Sequence[str]]) -> None:
    """Add the routes of encoders, and GET /v1/models, which lists `models`."""
    for path, summary, response, body in (
        ("/v1/embeddings", "Embeddings of texts, as OpenAI's", schemas.Embeddings, EmbeddingsCall),
        ("/rerank", "Texts by their relevance to a query", schemas.Ranking | list[schemas.Rank], RerankCall),
    ):
        given: _Json = {"parameters": [TIMEOUT], "body": json_content(body), "error": schemas.TextError}
        app.post(path, **documented(summary, response, INFERENCE_ERRORS, **given))(route_outside_fastapi)

    route = documented("The models, as OpenAI lists them", schemas.ModelList, KEYED_ERRORS, error=schemas.TextError)

    @app.get("/v1/models", **route)
    async def list_models() -> schemas.ModelList:
        return schemas.ModelList(data=[schemas.ListedModel(id=name) for name in models()])


def add_predict(app: FastAPI) -> None:
    """Add the routes to the OpenAPI document, and so that FastAPI answers other methods with 405."""
    form = {"schema": {"type": "object", "required": ["image"], "properties": {"image": BINARY["schema"]}}}
    files = dict.fromkeys(("image/jpeg", "image/png", "application/octet-stream"), BINARY)
    body = {**files, "multipart/form-data": form, **json_content(schemas.TensorCall)}
    for path, parameters in (("/predict", [TIMEOUT]), ("/predict/{model}", [MODEL, TIMEOUT])):
        route = documented(
            "Serve one sample: the response has the most probable classes, the outputs, or what `render` returned",
            schemas.Prediction | schemas.Outputs,
            INFERENCE_ERRORS,
            parameters=parameters,
            body=body,
        )
        app.post(path, **route)(route_outside_fastapi)
