"""POST /predict[/{m}]: samples in, usually one, their rendered outputs out. Without FastAPI, for low overhead."""

import re
from functools import partial
from typing import Any

import orjson

from server.api.inference import Inference
from server.models.model import Inputs, ServedModel
from server.transport.multipart import field_of
from server.transport.request import JSON_CONTENT, Handler, Headers, RequestContext, is_form

_MANY = 8  # outputs, from which on rendering takes a thread


class Predict:
    """POST /predict[/{m}], whose body is one sample, or a list of samples."""

    _PATH = re.compile(r"/predict(?:/([^/]+))?")

    def __init__(self, inference: Inference) -> None:
        """`inference` serves the calls."""
        self._inference = inference

    def find(self, path: str) -> Handler | None:
        """Return the handler of POST requests with this path, which answers errors; None for other paths."""
        match = self._PATH.fullmatch(path)
        return None if match is None else partial(self._inference.serve, match[1], self._answer)

    async def _answer(self, model: ServedModel, context: RequestContext) -> tuple[bytes, Headers]:
        inputs = [await self._inputs(model, context)]
        decoded = inputs[0].decoded
        answers = await self._inference.infer(model, context, inputs.pop())
        if decoded.answer is not None:
            rendered = {"outputs": decoded.answer.outputs}
        else:
            each = await self._render(model, [answer.output for answer in answers], decoded.kept)
            rendered = {"outputs": [one["outputs"] for one in each]} if decoded.several else each[0]
        document = {"model": model.name, **rendered}
        return orjson.dumps(document | self._inference.describe(answers, context)), [JSON_CONTENT]

    async def _render(self, model: ServedModel, outputs: list[Any], kept: bytes | None) -> list[dict[str, Any]]:
        def render() -> list[dict[str, Any]]:
            return [model.codec.render(output, model.labels, kept) for output in outputs]

        if model.codec.renders_by_user_code:
            return await self._inference.run_user_code(len(outputs) * model.output_bytes, render)
        if len(outputs) > _MANY or any(map(model.codec.renders_slowly, outputs)):
            rendered: list[dict[str, Any]] = await self._inference.run_in_thread(render)
            return rendered
        return render()

    async def _inputs(self, model: ServedModel, context: RequestContext) -> Inputs:
        codec = model.codec
        body = bytes(await self._inference.read(model, context))
        content_type = context.headers.get(b"content-type", b"").decode("latin-1")
        if codec.json_body:
            return await self._inference.parse(partial(codec.from_body, body, content_type), body, context)
        if codec.form_field is not None and is_form(content_type):
            body = await self._inference.run_in_thread(field_of, body, content_type, codec.form_field)
        return codec.from_body(body, content_type)
