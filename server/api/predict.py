"""POST /predict[/{m}]: one sample in, its rendered outputs out. On bare ASGI, for low overhead."""

import re
from functools import partial

import orjson
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from server.api.inference import ANY_BODY, Inference
from server.api.openapi import BINARY, INFERENCE_ERRORS, MODEL, TIMEOUT, bare_asgi_route, documented, json_content
from server.api.schemas import Generation, Outputs, Prediction, TensorCall, TextCall
from server.models.model import Inputs, ServedModel
from server.transport.multipart import field_of
from server.transport.request import BodyLimit, RequestContext, is_form, respond


class Predict:
    """POST /predict[/{m}], whose body is one sample."""

    _PATH = re.compile(r"/predict(?:/([^/]+))?")

    def __init__(self, inference: Inference) -> None:
        """`inference` serves the calls."""
        self._inference = inference

    def matches(self, scope: Scope) -> bool:
        """Whether the request is for this route."""
        return scope["type"] == "http" and scope["method"] == "POST" and bool(self._PATH.fullmatch(scope["path"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call; an error is answered, not raised."""
        path = self._PATH.fullmatch(scope["path"])
        name = path[1] if path else None

        async def answer(context: RequestContext) -> None:
            body = await self._answer(name, context)
            context.memory.resize(len(body))  # the inputs have been dropped
            await respond(send, body, b"application/json")

        await self._inference.serve(name, scope, receive, send, answer)

    async def _answer(self, name: str | None, context: RequestContext) -> bytes:
        model = self._inference.model(name)
        answers = await self._inference.infer(model, context, partial(self._inputs, model, context))
        output = answers[0].output
        render = partial(model.codec.render, output, model.labels)
        if model.codec.renders_by_user_code:
            rendered = await self._inference.run_user_code(model.output_bytes, render)
        elif model.codec.renders_slowly(output):
            rendered = await self._inference.run_in_thread(render)
        else:
            rendered = render()
        document = {"model": model.name, **rendered}
        return orjson.dumps(document | self._inference.describe(model.name, answers))

    async def _inputs(self, model: ServedModel, context: RequestContext) -> Inputs:
        codec = model.codec
        limit = ANY_BODY if codec.max_body is None else BodyLimit(*codec.max_body)
        body = await self._inference.read(model, context, limit)
        content_type = context.headers.get(b"content-type", b"").decode("latin-1")
        if codec.json_body:
            return await self._inference.parse(partial(codec.from_body, body, content_type), body, context)
        if codec.form_field is not None and is_form(content_type):
            body = await self._inference.run_in_thread(field_of, body, content_type, codec.form_field)
        return codec.from_body(body, content_type)


def add_predict(app: FastAPI) -> None:
    """Add the routes to the OpenAPI document, and so that FastAPI answers other methods with 405."""
    form = {"schema": {"type": "object", "required": ["image"], "properties": {"image": BINARY["schema"]}}}
    files = dict.fromkeys(("image/jpeg", "image/png", "application/octet-stream"), BINARY)
    body = {**files, "multipart/form-data": form, **json_content(TextCall, TensorCall)}
    for path, parameters in (("/predict", [TIMEOUT]), ("/predict/{model}", [MODEL, TIMEOUT])):
        summary = "Serve one sample: the response has the most probable classes, the generated text, or the outputs"
        route = documented(
            summary, Prediction | Generation | Outputs, INFERENCE_ERRORS, parameters=parameters, body=body
        )
        app.post(path, **route)(bare_asgi_route)
