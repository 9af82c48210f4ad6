"""serve-model below a path prefix, as a proxy or Ray Serve mounts it.

Run as `python -m benchmarks.servers.path_prefix ARGUMENTS`, with the arguments of serve-model. Every request gets the
ASGI `root_path` /svc. A path without the prefix is served as well, as in Starlette.
"""

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from server import cli
from server.app import serving

PREFIX = "/svc"


def mounted(app: ASGIApp) -> ASGIApp:
    """Return the application as it runs when it is mounted at `PREFIX`."""

    async def prefixed(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": PREFIX}, receive, send)

    return prefixed


def main() -> None:
    """Serve below the prefix."""
    serve = serving.serve  # type: ignore[attr-defined]

    def serve_mounted(app: ASGIApp, *arguments: Any, **options: Any) -> Any:
        return serve(mounted(app), *arguments, **options)

    serving.serve = serve_mounted  # type: ignore[attr-defined]
    cli.main()


if __name__ == "__main__":
    main()
