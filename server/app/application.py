"""The ASGI application: all routes, their error handlers, and the tasks that run as long as the application."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache, partial

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from policies.types import SpecError
from server.api.admin import add_admin
from server.api.dashboard.live import DashboardData
from server.api.dashboard.page import PAGE_HEADERS, page_routes, render_page
from server.api.inference import Inference
from server.api.open_inference.infer import Infer
from server.api.open_inference.repository import ModelRepository, add_repository
from server.api.open_inference.routes import DescriptionRoutes, add_open_inference
from server.api.openapi import PUBLIC_ERRORS, add_predict, add_texts, documented, generate
from server.api.predict import Predict
from server.api.reference_page import REFERENCE_HEADERS, render_reference
from server.api.schemas import Live, Ready
from server.api.texts import Texts
from server.errors import INTERNAL_ERROR, ServerError, quote
from server.transport.request import ClientDisconnectedError, Handler

Background = Callable[[], Coroutine[None, None, None]]  # runs until it is cancelled, or returns


class Application:
    """The ASGI application: the inference routes by their handlers, all others on FastAPI.

    FastAPI's layers would take longer than the rest of an inference call.
    """

    def __init__(
        self,
        inference: Inference,
        version: str,
        repository: ModelRepository | None = None,
        background: Mapping[str, Background] | None = None,
    ) -> None:
        """Create the routes; `version` is that of the server, `background` runs while it serves."""
        self._infer, self._predict, self._texts = Infer(inference), Predict(inference), Texts(inference)
        self._fastapi = create_fastapi(inference, version, repository, background or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        inference = scope["type"] == "http" and scope["method"] == "POST"
        handler = self.find_inference(scope["path"]) if inference else None
        if handler is None:
            await self._fastapi(scope, receive, send)
        else:
            await handler(scope["state"]["context"])

    def find_inference(self, path: str) -> Handler | None:
        """Return the handler of POST requests with this path if it is that of an inference route."""
        return self._infer.find(path) or self._predict.find(path) or self._texts.find(path)


def create_fastapi(
    inference: Inference, version: str, repository: ModelRepository | None, background: Mapping[str, Background]
) -> FastAPI:
    """Create the FastAPI application, whose lifespan runs the dispatchers, the history, and `background`."""
    dashboard = DashboardData(inference)
    runs = {"dispatchers": inference.fleet.run, "history": dashboard.record_history, **background}
    runs |= {f"predictions, {device}": each.run for device, each in inference.predictors.items()}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(run(), name=name) for name, run in runs.items()]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = FastAPI(title="Batchwright", version=version, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # routing and authorisation have to use the same path
    app.router.routes[:0] = [*dashboard.routes(), *page_routes()]
    app.openapi = cache(partial(generate, app, inference.names))  # type: ignore[method-assign]
    add_predict(app)
    add_texts(app, lambda: [*inference.models])
    add_open_inference(app, DescriptionRoutes(inference, version))
    if repository is not None:
        add_repository(app, repository, inference.budget)
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

    @app.exception_handler(ClientDisconnectedError)
    async def client_disconnected(_: Request, __: ClientDisconnectedError) -> Response:
        return Response(status_code=499)  # not sent; the status in the access log

    @app.exception_handler(SpecError)
    async def spec_error(_: Request, error: SpecError) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]  # request.url fails on malformed addresses
        text = f"{error.detail}: {request.method} {path[:200]!r}; /docs lists the routes"
        return JSONResponse({"error": text}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where, message = ".".join(map(str, first["loc"])), first["msg"].replace("Input", "it", 1)
        return JSONResponse({"error": f"{where} is {quote(first.get('input'))}; {message}"}, 400)

    @app.exception_handler(Exception)
    async def internal_error(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": INTERNAL_ERROR}, 500)


def _add_health(app: FastAPI, inference: Inference) -> None:
    live_route = documented("Liveness: 200 while the dispatchers run", Live, PUBLIC_ERRORS)
    live_route["responses"][503] = {"model": Live, "description": "A dispatcher does not run"}
    ready_route = documented("Readiness: 200 while new calls are admitted", Ready, PUBLIC_ERRORS)
    ready_route["responses"][503] = {"model": Ready, "description": "No calls are admitted"}
    metrics_route = documented("Metrics in the text format of Prometheus", None, PUBLIC_ERRORS)

    @app.get("/v2/health/live", **live_route)
    async def live() -> Response:
        alive = inference.fleet.alive
        return JSONResponse({"live": alive}, 200 if alive else 503)

    @app.get("/v2/health/ready", **ready_route)
    async def ready() -> Response:
        return JSONResponse({"ready": inference.fleet.ready}, 200 if inference.fleet.ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse, **metrics_route)
    async def metrics() -> Response:
        await inference.metrics.read_meters()
        return Response(inference.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_pages(app: FastAPI, inference: Inference) -> None:
    @app.get("/", response_class=HTMLResponse, **documented("The dashboard", None, PUBLIC_ERRORS))
    async def page(request: Request) -> Response:
        return HTMLResponse(render_page(inference, str(request.base_url)), headers=PAGE_HEADERS)

    @app.get("/docs", response_class=HTMLResponse, **documented("The API reference as a page", None, PUBLIC_ERRORS))
    async def reference() -> Response:
        return HTMLResponse(render_reference(app.openapi()), headers=REFERENCE_HEADERS)
