"""POST /v1/embeddings as OpenAI's, and POST /rerank as text-embeddings-inference's and Cohere's.

The model is named in the body. Each text is a request of its own.
"""

import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator

from server.api.inference import MAX_BODY_BYTES, Inference
from server.errors import BadInputError, ServerError, TooLargeError, quote
from server.json_body import parse_object
from server.models.model import ServedModel
from server.models.tensors.codec import TensorCodec
from server.transport.request import JSON_CONTENT, Handler, Headers, RequestContext

_MOST = 2048  # inputs of a call, as OpenAI's
_ROUTES = ("/v1/embeddings", "/v1/models", "/rerank")
_MANY_NUMBERS = 20_000  # rendering more takes over a millisecond
_TEXT, _TRUNCATED, _JSON = "text/plain; charset=utf-8", "text/plain; charset=utf-8; truncate", "application/json"
_Text = Annotated[StrictStr, Field(min_length=1)]
_Tokens = Annotated[list[StrictInt], Field(min_length=1)]


class EmbeddingsCall(BaseModel):
    """Body of POST /v1/embeddings."""

    model_config = ConfigDict(extra="forbid")

    input: _Text | _Tokens | Annotated[list[_Text] | list[_Tokens], Field(min_length=1, max_length=_MOST)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    user: str | None = None
    truncate: bool = False

    @property
    def inputs(self) -> list[Any]:
        """The texts, or lists of token ids."""
        one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if one else list(self.input)


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: StrictStr


class RerankCall(BaseModel):
    """Body of POST /rerank: `texts` as text-embeddings-inference's, or `documents` as Cohere's."""

    model_config = ConfigDict(extra="forbid")

    query: _Text
    texts: Annotated[list[StrictStr], Field(min_length=1, max_length=_MOST)] | None = None
    documents: Annotated[list[StrictStr | _Document], Field(min_length=1, max_length=_MOST)] | None = None
    model: str | None = None
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    raw_scores: bool = False
    return_text: bool = False
    return_documents: bool = False
    truncate: bool = False

    @model_validator(mode="after")
    def _check(self) -> "RerankCall":
        if (self.texts is None) == (self.documents is None):
            raise ValueError("give texts, or documents")
        return self

    @property
    def given(self) -> list[str]:
        """The texts."""
        return self.texts or [each if isinstance(each, str) else each.text for each in self.documents or ()]


class Texts:
    """The routes for encoders."""

    def __init__(self, inference: Inference) -> None:
        """`inference` serves the calls."""
        self._inference = inference

    def find(self, path: str) -> Handler | None:
        """Return the handler of POST requests with this path, which answers errors; None for other paths."""
        if path == "/v1/embeddings":
            return partial(self._serve, EmbeddingsCall, "embed", self._embed)
        return partial(self._serve, RerankCall, "rerank", self._rerank) if path == "/rerank" else None

    async def _serve(self, kind: type[Any], task: str, answer: Any, context: RequestContext) -> None:
        call: Any = None

        async def name() -> str:
            nonlocal call
            self._inference.check_queue(1)
            body = bytes(await self._inference.read(None, context))
            parse = partial(_parse, body, kind)
            call = await self._inference.parse(parse, body, context)
            given: str = self._only(task) if call.model is None else call.model
            return given

        async def respond(model: ServedModel, context: RequestContext) -> tuple[bytes, Headers]:
            found: tuple[bytes, Headers] = await answer(call, model, context)
            return found

        await self._inference.serve(name, respond, context, render_openai_error)

    async def _embed(self, call: EmbeddingsCall, model: ServedModel, context: RequestContext) -> tuple[bytes, Headers]:
        codec = _codec(model, "embed")
        size = _size(codec, call.dimensions)
        self._check_count(len(call.inputs))
        answers = await self._inference.infer(model, context, codec.from_bodies(_bodies(call)))
        name = next(iter(codec.model.outputs))
        vectors = _cut(np.array([answer.output[name] for answer in answers], np.float32), size)
        tokens = int(sum(answer.length for answer in answers))
        render = partial(_embeddings, vectors, model.name, call.encoding_format, tokens)
        return await self._rendered(render, vectors.size)

    async def _rerank(self, call: RerankCall, model: ServedModel, context: RequestContext) -> tuple[bytes, Headers]:
        codec = _codec(model, "rerank")
        self._check_count(len(call.given))
        size = len(call.query) * len(call.given)
        if size > MAX_BODY_BYTES:
            raise TooLargeError(
                f"the query and {len(call.given)} texts are pairs of {size} characters, over the maximum "
                f"{MAX_BODY_BYTES}; send a shorter query, or fewer texts"
            )
        answers = await self._inference.infer(model, context, codec.from_bodies(_pairs(call)))
        name = next(iter(codec.model.outputs))
        scores = np.array([answer.output[name].reshape(-1)[0] for answer in answers], np.float64)
        tokens = int(sum(answer.length for answer in answers))
        return await self._rendered(
            partial(_ranking, call, scores, model.name, context.request_id, tokens), len(scores)
        )

    def _check_count(self, count: int) -> None:
        """Check that so many texts can wait.

        Raises:
            BadInputError: they can never.
        """
        if count > self._inference.capacity:
            raise BadInputError(
                f"the call has {count} texts, over the maximum {self._inference.capacity} that may wait; send several "
                "calls, or raise --queue-capacity"
            )

    def _only(self, task: str) -> str:
        """The name of the only model with a task.

        Raises:
            BadInputError: there is none, or several.
        """
        names = [name for name, model in self._inference.models.items() if _task_of(model) == task]
        if len(names) != 1:
            known = f"of {', '.join(names)}" if names else f"; this server has no model whose task is {task}"
            raise BadInputError(f"model is missing; send the name {known}" if names else f"model is missing{known}")
        return names[0]

    async def _rendered(self, render: Any, numbers: int) -> tuple[bytes, Headers]:
        body = await self._inference.run_in_thread(render) if numbers > _MANY_NUMBERS else render()
        return body, [JSON_CONTENT]


def _parse(body: bytes, kind: type[BaseModel]) -> Any:
    """The call of a JSON body.

    Raises:
        BadInputError: it is not valid; the message names the first wrong value.
    """
    document = parse_object(body, "body", f"an object with {', '.join(list(kind.model_fields)[:3])}")
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise BadInputError(f"{first['loc'][0]} is missing; send it") from error
        where = str(first["loc"][0]) if first["loc"] else "the body"
        value = document.get(where) if first["loc"] else document
        raise BadInputError(f"{where} is {quote(value)}; {_expected(where, value, first['msg'])}") from error


def _expected(where: str, value: Any, message: str) -> str:
    if where in ("input", "texts", "documents"):
        if isinstance(value, list) and len(value) > _MOST:
            return f"it has {len(value)} elements, over the maximum {_MOST}; send several calls"
        also = ", token ids, or lists of these" if where == "input" else ", at least one"
        return f"send {'a text, ' if where == 'input' else ''}texts{also}, none of them empty"
    return f"{message[:1].lower()}{message[1:]}"


def _bodies(call: EmbeddingsCall) -> list[tuple[bytes, str]]:
    kind = _TRUNCATED if call.truncate else _TEXT
    return [(each.encode(), kind) if isinstance(each, str) else (orjson.dumps(each), _JSON) for each in call.inputs]


def _pairs(call: RerankCall) -> list[tuple[bytes, str]]:
    kind = f"{_JSON}; truncate" if call.truncate else _JSON
    return [(orjson.dumps({"query": call.query, "text": each}), kind) for each in call.given]


def _task_of(model: ServedModel) -> str:
    return model.codec.model.task if isinstance(model.codec, TensorCodec) else ""


def _codec(model: ServedModel, task: str) -> TensorCodec:
    codec = model.codec
    if not isinstance(codec, TensorCodec) or codec.model.task != task:
        raise BadInputError(f"the task of the model {model.name} is not {task}; name a model whose task is {task}")
    return codec


def _size(codec: TensorCodec, dimensions: int | None) -> int:
    """The size of the embeddings.

    Raises:
        BadInputError: the model does not allow it.
    """
    full = next(iter(codec.model.outputs.values())).shape[0]
    allowed = sorted({*codec.model.dimensions, full})
    if dimensions is not None and dimensions not in allowed:
        raise BadInputError(f"dimensions is {dimensions}; the model allows {', '.join(map(str, allowed))}")
    return dimensions or full


def _cut(vectors: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """The first components of each vector, scaled to a length of 1 if some are left out."""
    if size == vectors.shape[1]:
        return vectors
    cut = vectors[:, :size]
    return np.asarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12), np.float32)


def _embeddings(vectors: NDArray[np.float32], model: str, encoding: str, tokens: int) -> bytes:
    if encoding == "base64":
        values: Sequence[Any] = [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]
    else:
        values = list(vectors)
    data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    document = {"object": "list", "data": data, "model": model, "usage": usage}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _ranking(call: RerankCall, scores: NDArray[np.float64], model: str, request: str, tokens: int) -> bytes:
    order = np.argsort(-scores, kind="stable")[: call.top_n].tolist()
    found = scores if call.raw_scores else 1.0 / (1.0 + np.exp(-scores))
    if call.texts is not None:
        ranks = [{"index": index, "score": float(found[index])} for index in order]
        if call.return_text:
            ranks = [each | {"text": call.texts[each["index"]]} for each in ranks]
        return orjson.dumps(ranks)
    results = [{"index": index, "relevance_score": float(found[index])} for index in order]
    if call.return_documents:
        given = call.given
        results = [each | {"document": {"text": given[each["index"]]}} for each in results]
    return orjson.dumps({"id": request, "model": model, "results": results, "usage": {"total_tokens": tokens}})


def error_renderer(path: str) -> Callable[[ServerError], bytes] | None:
    """Return how the errors of a route are rendered; None: as those of all other routes."""
    return render_openai_error if path in _ROUTES else None


def render_openai_error(error: ServerError) -> bytes:
    """An error in OpenAI's shape."""
    kinds = {400: "invalid_request_error", 404: "invalid_request_error", 413: "invalid_request_error"}
    kinds |= {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    code = "model_not_found" if error.status == 404 else None
    kind = kinds.get(error.status, "server_error")
    return orjson.dumps({"error": {"message": str(error), "type": kind, "param": None, "code": code}})
