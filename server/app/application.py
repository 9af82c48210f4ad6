"""The gateway: HTTP in front of the dispatchers. It never touches an executor."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache, partial

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from policies.types import SpecError
from server.api.admin import add_admin
from server.api.dashboard.live import Live
from server.api.dashboard.page import PAGE_HEADERS, page_routes, render_page
from server.api.inference import Inference
from server.api.open_inference.routes import Documents, Infer, add_open_inference
from server.api.openapi import PUBLIC, documented, generate
from server.api.predict import Predict, add_predict
from server.api.reference_page import INTERFACE_HEADERS, render_interface
from server.api.schemas import Live as LiveAnswer
from server.api.schemas import Ready
from server.errors import ServerError
from server.transport.asgi import ClientGoneError


def create_app(inference: Inference, version: str) -> ASGIApp:
    """The whole HTTP surface: the two hot routes in front, FastAPI for all others.

    FastAPI's layers cost more than the call itself where it is measured in microseconds.
    """
    infer, predict = Infer(inference), Predict(inference)
    others = create_fastapi(inference, version)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        hot = infer if infer.matches(scope) else predict if predict.matches(scope) else others
        await hot(scope, receive, send)

    return app


def create_fastapi(inference: Inference, version: str) -> FastAPI:
    """Every route, over dispatchers that run as long as the app does."""
    live = Live(inference)
    running = {"dispatchers": inference.fleet.run, "history": live.watch}

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
    app.router.routes[:0] = [*live.routes(), *page_routes()]
    app.openapi = cache(partial(generate, app, [*inference.models]))  # type: ignore[method-assign]
    add_predict(app)
    add_open_inference(app, Documents(inference, version))
    _add_error_handlers(app)
    _add_health(app, inference)
    add_admin(app, inference)
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
    alive = documented("Liveness: 200 while the dispatchers run", LiveAnswer, PUBLIC)
    alive["responses"][503] = {"model": LiveAnswer, "description": "A dispatcher does not run"}
    ready_ = documented("Readiness: 200 while new calls are admitted", Ready, PUBLIC)
    ready_["responses"][503] = {"model": Ready, "description": "No calls are admitted"}

    @app.get("/v2/health/live", **alive)
    async def live() -> Response:
        alive = inference.fleet.alive
        return JSONResponse({"live": alive}, 200 if alive else 503)

    @app.get("/v2/health/ready", **ready_)
    async def ready() -> Response:
        return JSONResponse({"ready": inference.fleet.ready}, 200 if inference.fleet.ready else 503)

    metrics_ = documented("Metrics in the text format of Prometheus", None, PUBLIC)

    @app.get("/metrics", response_class=PlainTextResponse, **metrics_)
    async def metrics() -> Response:
        await inference.metrics.read_meters()
        return Response(inference.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_pages(app: FastAPI, inference: Inference) -> None:
    @app.get("/", response_class=HTMLResponse, **documented("The dashboard", None, PUBLIC))
    async def page(request: Request) -> Response:
        return HTMLResponse(render_page(inference, str(request.base_url)), headers=PAGE_HEADERS)

    @app.get("/docs", response_class=HTMLResponse, **documented("This document as a page", None, PUBLIC))
    async def interface() -> Response:
        return HTMLResponse(render_interface(app.openapi()), headers=INTERFACE_HEADERS)
