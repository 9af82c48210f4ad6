"""The gateway: HTTP in front of the dispatcher. It never touches an executor."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from policies.catalog import Chosen, choose
from policies.types import SpecError
from server.dispatcher import Answer
from server.encoding import decompress
from server.errors import BadInputError, ServerError
from server.http import ClientGoneError, headers_of, milliseconds, read_body
from server.inference import MAX_BODY_BYTES, Inference
from server.models import ServedModel
from server.open_inference import Documents, Infer, open_inference_routes
from server.page import render_page

_NO_ANSWER = Response(status_code=499)  # never sent: the client has gone


class PolicyChange(BaseModel):
    """The body of PUT /admin/models/{m}/policy."""

    model_config = ConfigDict(extra="forbid")

    policy: str


def create_app(inference: Inference, version: str) -> ASGIApp:
    """The whole HTTP surface: the one hot route in front, FastAPI for all others.

    FastAPI's layers cost more than the call itself where it is measured in microseconds.
    """
    infer = Infer(inference)
    others = _create_others(inference, infer, version)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (infer if infer.matches(scope) else others)(scope, receive, send)

    return app


def _create_others(inference: Inference, infer: Infer, version: str) -> FastAPI:
    """Every route, over one dispatcher that runs as long as the app does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.loop = asyncio.create_task(inference.dispatcher.run(), name="dispatcher")
        yield
        app.state.loop.cancel()
        with suppress(asyncio.CancelledError):
            await app.state.loop

    app = FastAPI(title="Batchwright", version=version, lifespan=lifespan, redoc_url=None)
    app.router.routes[:0] = open_inference_routes(infer, Documents(inference, version))
    _add_error_handlers(app)
    _add_prediction(app, inference)
    _add_health(app, inference)
    _add_admin(app, inference)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ServerError)
    async def server_error(_: Request, error: ServerError) -> Response:
        headers = None if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return JSONResponse({"error": str(error)}, error.status, headers)

    @app.exception_handler(SpecError)
    async def spec_error(_: Request, error: SpecError) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = f"{error.detail}: {request.method} {request.url.path}; /docs lists what there is"
        return JSONResponse({"error": text}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return JSONResponse({"error": f"{where}: {first['msg']}"}, 400)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, error: ClientGoneError) -> Response:
        return _NO_ANSWER

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": "internal error; the server's log has the details"}, 500)


def _add_prediction(app: FastAPI, inference: Inference) -> None:
    body = {"requestBody": {"required": True, "content": {"image/*": {}, "multipart/form-data": {}}}}

    @app.post("/predict", openapi_extra=body, summary="Classify a picture with the only model loaded")
    @app.post("/predict/{model}", openapi_extra=body, summary="Classify a picture")
    async def predict(request: Request) -> Response:
        began = monotonic()
        name = request.path_params.get("model")
        try:
            model = inference.model(name)
            timeout = milliseconds(request.headers.get("x-timeout-ms"))
            samples = await inference.decode(model.codec.decode, [await _picture(request, inference)])
        except ServerError as error:
            inference.bad_input(
                name or (next(iter(inference.models)) if len(inference.models) == 1 else None), error, began
            )
            raise
        answers = await inference.ask(model, samples, timeout, request.receive, began)
        document = {"model": model.name, "predictions": _best_five(model, answers[0])}
        return Response(orjson.dumps(document | inference.describe(model.name, answers)), media_type="application/json")


async def _picture(request: Request, inference: Inference) -> bytes:
    body = await read_body(headers_of(request.scope), request.receive, MAX_BODY_BYTES)
    encoding = request.headers.get("content-encoding")
    if encoding is not None:
        body = await inference.off_the_loop(decompress, body, encoding, MAX_BODY_BYTES)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        return body
    field = (await _form(request, body)).get("image")
    if field is None or isinstance(field, str):
        raise BadInputError("the form has no file `image`; send the picture as -F image=@photo.jpg, or as the body")
    return bytes(await field.read())


async def _form(request: Request, body: bytes) -> Any:
    async def replay() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        return await Request(request.scope, replay).form()
    except HTTPException as error:
        raise BadInputError(f"the multipart body cannot be read: {error.detail}") from error


def _best_five(model: ServedModel, answer: Answer) -> list[dict[str, Any]]:
    logits = answer.output.astype(np.float64)
    likely = np.exp(logits - logits.max())
    likely /= likely.sum()
    best = np.argsort(-likely, kind="stable")[:5].tolist()
    return [{"class_index": i, "label": model.labels[i], "probability": float(likely[i])} for i in best]


def _add_health(app: FastAPI, inference: Inference) -> None:
    @app.get("/v2/health/live", summary="200 while the dispatcher's loop runs")
    async def live() -> Response:
        alive = not app.state.loop.done()
        return JSONResponse({"live": alive}, 200 if alive else 503)

    @app.get("/v2/health/ready", summary="200 while new calls are admitted")
    async def ready() -> Response:
        return JSONResponse({"ready": inference.dispatcher.ready}, 200 if inference.dispatcher.ready else 503)

    @app.get("/metrics", summary="For Prometheus")
    async def metrics() -> Response:
        return Response(inference.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return HTMLResponse(render_page(inference, str(request.base_url)))


def _add_admin(app: FastAPI, inference: Inference) -> None:
    dispatcher = inference.dispatcher

    async def swap(model: str, spec: Callable[[Chosen], str]) -> dict[str, Any]:
        name = inference.model(model).name
        now = dispatcher.chosen[name]
        chosen = await inference.off_the_loop(choose, spec(now), now.profile, now.defaults)
        dispatcher.use(name, chosen)
        inference.metrics.policy(name, chosen.name, chosen.spec)
        return describe_policy(chosen, dispatcher.arrival_rate(name))

    @app.get("/admin/models/{model}/policy", summary="What decides now, and what it expects")
    async def read_policy(model: str) -> dict[str, Any]:
        name = inference.model(model).name
        return describe_policy(dispatcher.chosen[name], dispatcher.arrival_rate(name))

    content = {"application/json": {"schema": PolicyChange.model_json_schema()}}
    body = {"requestBody": {"required": True, "content": content}}

    @app.put("/admin/models/{model}/policy", openapi_extra=body, summary="Decide by another policy from now on")
    async def set_policy(model: str, request: Request) -> dict[str, Any]:
        change = _policy_change(await read_body(headers_of(request.scope), request.receive, MAX_BODY_BYTES))
        return await swap(model, lambda _: change.policy)

    @app.post("/admin/models/{model}/solve", summary="Solve again for the profile at hand")
    async def solve(model: str) -> dict[str, Any]:
        return await swap(model, lambda now: now.spec)


def _policy_change(body: bytes) -> PolicyChange:
    try:
        return PolicyChange.model_validate_json(body)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise BadInputError(f'the body is no policy change ({message}); send {{"policy": "SPEC"}}') from error


def describe_policy(chosen: Chosen, arrival_rate: float) -> dict[str, Any]:
    """The policy as the admin pages show it; expectations are those of the row that serves at this rate (1/s)."""
    rows = [] if chosen.table is None else chosen.table.rows
    response, power = _expected(chosen, arrival_rate)
    return {
        "name": chosen.name,
        "spec": chosen.spec,
        "parameters": dict(chosen.parameters),
        "profile": chosen.profile.name,
        "rows": [{"arrival_rate_hz": r.arrival_rate, "load": r.load, "batch_size": list(r.batch_size)} for r in rows],
        "expected_response_time_ms": None if response is None else 1e3 * response,
        "expected_power_w": power,
        "arrival_rate_hz": arrival_rate,
    }


def _expected(chosen: Chosen, arrival_rate: float) -> tuple[float | None, float | None]:
    """Mean response time, s, and mean power, W, of a solved table at this rate; None where nobody has solved."""
    if chosen.table is None:
        return None, None
    rows = chosen.table.rows
    if arrival_rate < rows[0].arrival_rate / 2:  # everybody is launched, nearly always alone
        energy = chosen.profile.energy(1)
        return chosen.profile.service_time(1), None if energy is None else arrival_rate * energy
    row = min(rows, key=lambda row: abs(row.arrival_rate - arrival_rate))
    return row.mean_response_time, row.mean_power
