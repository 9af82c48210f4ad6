"""The gateway: HTTP in front of the dispatcher. It never touches an executor."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from policies.catalog import Chosen, choose, names_file
from policies.types import SpecError
from server.api_document import api_document
from server.errors import BadInputError, ServerError
from server.http import ClientGoneError, headers_of, read_body
from server.inference import Inference
from server.interface import INTERFACE_HEADERS, render_interface
from server.live import Live
from server.open_inference import Documents, Infer, open_inference_routes
from server.page import PAGE_HEADERS, page_routes, render_page
from server.predict import Predict, predict_routes
from server.swapping import swap

_MAX_CHANGE = 2**16  # bytes of a policy change


class PolicyChange(BaseModel):
    """The body of PUT /admin/models/{m}/policy."""

    model_config = ConfigDict(extra="forbid")

    policy: str = Field(max_length=1000)


def create_app(inference: Inference, version: str) -> ASGIApp:
    """The whole HTTP surface: the two hot routes in front, FastAPI for all others.

    FastAPI's layers cost more than the call itself where it is measured in microseconds.
    """
    infer, predict = Infer(inference), Predict(inference)
    others = _create_others(inference, infer, version)
    others.router.routes[:0] = predict_routes(predict)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        hot = infer if infer.matches(scope) else predict if predict.matches(scope) else others
        await hot(scope, receive, send)

    return app


def _create_others(inference: Inference, infer: Infer, version: str) -> FastAPI:
    """Every route, over one dispatcher that runs as long as the app does."""
    live = Live(inference)
    running = {"dispatcher": inference.dispatcher.run, "history": live.watch}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(run(), name=name) for name, run in running.items()]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = FastAPI(title="Batchwright", version=version, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # a path is one thing, for the routes as for the keys
    document = api_document([*inference.models], version)
    app.openapi = lambda: document  # type: ignore[method-assign]  # as FastAPI wants it replaced
    app.router.routes[:0] = open_inference_routes(infer, Documents(inference, version))
    app.router.routes[:0] = [*live.routes(), *page_routes()]
    _add_error_handlers(app)
    _add_health(app, inference)
    _add_admin(app, inference)
    _add_pages(app, inference)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ServerError)
    async def server_error(_: Request, error: ServerError) -> Response:
        headers = None if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return JSONResponse({"error": str(error)}, error.status, headers)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody hears it, but the log says what happened

    @app.exception_handler(SpecError)
    async def spec_error(_: Request, error: SpecError) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]  # request.url would try to understand what a client made up
        text = f"{error.detail}: {request.method} {path[:200]!r}; /docs lists what there is"
        return JSONResponse({"error": text}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return JSONResponse({"error": f"{where}: {first['msg']}"}, 400)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": "internal error; the server's log has the details"}, 500)


def _add_health(app: FastAPI, inference: Inference) -> None:
    @app.get("/v2/health/live")
    async def live() -> Response:
        alive = inference.dispatcher.alive
        return JSONResponse({"live": alive}, 200 if alive else 503)

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        return JSONResponse({"ready": inference.dispatcher.ready}, 200 if inference.dispatcher.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        await inference.metrics.read_meters()
        return Response(inference.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_pages(app: FastAPI, inference: Inference) -> None:
    @app.get("/")
    async def page(request: Request) -> Response:
        return HTMLResponse(render_page(inference, str(request.base_url)), headers=PAGE_HEADERS)

    @app.get("/docs")
    async def interface() -> Response:
        return HTMLResponse(render_interface(app.openapi()), headers=INTERFACE_HEADERS)


def _add_admin(app: FastAPI, inference: Inference) -> None:
    dispatcher = inference.dispatcher

    swapping = asyncio.Lock()  # in the order in which they came

    async def set_to(model: str, spec: Callable[[Chosen], str]) -> dict[str, Any]:
        name = inference.model(model).name
        async with swapping:
            swapped = await swap(
                dispatcher, inference.metrics, {name: lambda now: choose(spec(now), now.profile, now.defaults)}
            )
        return describe_policy(swapped[name], dispatcher.arrival_rate(name))

    @app.get("/admin/models/{model}/policy")
    async def read_policy(model: str) -> dict[str, Any]:
        name = inference.model(model).name
        return describe_policy(dispatcher.chosen[name], dispatcher.arrival_rate(name))

    @app.put("/admin/models/{model}/policy")
    async def set_policy(model: str, request: Request) -> dict[str, Any]:
        change = _policy_change(await read_body(headers_of(request.scope), request.receive, _MAX_CHANGE))
        return await set_to(model, lambda _: change.policy)

    @app.post("/admin/models/{model}/solve")
    async def solve(model: str) -> dict[str, Any]:
        return await set_to(model, lambda now: now.spec)


def _policy_change(body: bytes) -> PolicyChange:
    try:
        change = PolicyChange.model_validate_json(body)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise BadInputError(f'the body is no policy change ({message}); send {{"policy": "SPEC"}}') from error
    if names_file(change.policy):
        raise BadInputError("a request cannot name a file of the server; start the server with it, or name a policy")
    return change


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
