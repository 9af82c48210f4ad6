"""Inference calls of the Open Inference Protocol v2."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from server.api.inference import ANY_BODY, JSON_REMEDY, Inference
from server.api.open_inference.documents import VERSION
from server.api.open_inference.protocol import (
    InferCall,
    InferHeader,
    document_of,
    parse_header,
    parse_header_length,
    parse_infer,
    raw_call,
    read_call,
    render_infer,
)
from server.errors import NotFoundError, TooLargeError
from server.models.model import ServedModel
from server.transport.content_encoding import compress
from server.transport.request import JSON_CONTENT, BodyLimit, Handler, Headers, RequestContext

_BINARY_CONTENT = (b"content-type", b"application/octet-stream")
_MIN_COMPRESSED = 1024  # bytes; compressing less costs more than it saves
_MANY_SAMPLES = 16  # stacking and rendering the outputs of more takes over a millisecond
_KNOWN_DOCUMENTS = 256  # entries in the cache of parsed headers
_SHORT_DOCUMENT = 1024  # bytes of such a document


class Infer:
    """POST /v2/models/{m}[/versions/{v}]/infer, without FastAPI, for low overhead."""

    _PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")

    def __init__(self, inference: Inference) -> None:
        """`inference` serves the calls."""
        self._inference = inference
        self._headers: dict[tuple[str, bytes], InferHeader] = {}  # of documents that clients repeat

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
        context.priority = call.priority
        answers = await self._inference.infer(model, context, model.codec.from_tensors(call.take_tensors()))
        outputs = [answer.output for answer in answers]
        facts = self._inference.describe(answers, context)
        if context.steps:
            facts["steps"] = orjson.dumps(context.steps).decode()  # a parameter is no list
        arguments = call, model, outputs, facts
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
        most = self._inference.max_json_bytes
        if length is not None and length > most:
            raise TooLargeError(f"the JSON has {length} bytes, over {most}; {JSON_REMEDY}")
        limit = BodyLimit(most, JSON_REMEDY) if length is None else ANY_BODY
        body = await self._inference.read(model, context, limit)
        if length == 0:
            return raw_call(body, model.signature)
        document = document_of(body, length)
        if len(document) > _SHORT_DOCUMENT:
            parse = partial(parse_infer, body, length, model.signature, self._inference.capacity)
            return await self._inference.parse(parse, document, context)
        key = (model.id, document)
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
    raise version_error(version)


def version_error(version: str) -> NotFoundError:
    """Return the error of a request for a version that no model has."""
    return NotFoundError(f"no version {version[:20]!r} of the model; there is {VERSION}")
