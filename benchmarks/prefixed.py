"""serve-model below a path prefix, as a proxy or Ray Serve mounts it: `python -m benchmarks.prefixed ARGUMENTS`.

Every request gets the ASGI `root_path` /svc. A path without the prefix is served as well, as Starlette does.
"""

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from server import cli

PREFIX = "/svc"


def below_prefix(app: ASGIApp) -> ASGIApp:
    """Return the app as it runs when it is mounted at `PREFIX`."""

    async def prefixed(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": PREFIX}, receive, send)

    return prefixed


def main() -> None:
    """Serve below the prefix."""
    serve = cli.serve  # type: ignore[attr-defined]

    def serve_prefixed(app: ASGIApp, *arguments: Any) -> Any:
        return serve(below_prefix(app), *arguments)

    cli.serve = serve_prefixed  # type: ignore[attr-defined, assignment]
    cli.main()


if __name__ == "__main__":
    main()
