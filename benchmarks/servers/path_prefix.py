"""serve-model below a path prefix, as a proxy or Ray Serve mounts it.

Run as `python -m benchmarks.servers.path_prefix ARGUMENTS`, with the arguments of serve-model. Every request gets the
ASGI `root_path` /svc. A path without the prefix is served as well, as in Starlette.
"""

from typing import Any

from starlette.types import ASGIApp

from server import cli
from server.app import serving
from server.transport.http_call import HttpCall
from server.transport.middleware import RequestMiddleware
from server.transport.request import Headers, RequestContext

PREFIX = "/svc"


class Mounted:
    """The application as it runs when it is mounted at `PREFIX` of another ASGI application."""

    def __init__(self, app: RequestMiddleware) -> None:
        """Mount `app`."""
        self.app: ASGIApp = app

    async def handle(self, call: HttpCall) -> None:
        """Serve one request."""
        await self.app({**call.scope(), "root_path": PREFIX}, call.receive, call.send)

    def response_headers(self, context: RequestContext) -> Headers:
        """The headers that every response has, but for those of the application."""
        return []


def main() -> None:
    """Serve below the prefix."""
    serve = serving.serve  # type: ignore[attr-defined]

    def serve_mounted(app: RequestMiddleware, *arguments: Any, **options: Any) -> Any:
        return serve(Mounted(app), *arguments, **options)

    serving.serve = serve_mounted  # type: ignore[attr-defined, assignment]
    cli.main()


if __name__ == "__main__":
    main()
