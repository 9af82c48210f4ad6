"""Requests that a gateway passes on to the serving process, over HTTP on a socket of the file system."""

import asyncio
from pathlib import Path

import aiohttp
from starlette.types import Scope
from yarl import URL

from server.errors import UnavailableError
from server.transport.memory_budget import MemoryBudget
from server.transport.request import AsgiContext, BodyLimit, Headers

_MAX_BODY = BodyLimit(64 * 2**20, "send less at once")
_NOT_PASSED = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"upgrade", b"expect"))


class Proxy:
    """Passes requests on, and their responses back, each as a whole."""

    def __init__(self, path: Path, budget: MemoryBudget) -> None:
        """`path` is that of the socket; `budget` has room for the bodies."""
        self._path = str(path)
        self._budget = budget
        self._session: aiohttp.ClientSession | None = None

    async def serve(self, context: AsgiContext, scope: Scope) -> None:
        """Serve one request by the serving process.

        Raises:
            UnavailableError: there is no serving process.
            TooLargeError: the body is over 64 MiB.
            ClientDisconnectedError: the client closed the connection.
        """
        with self._budget.reservation() as memory:
            body = await context.read_body(_MAX_BODY, memory.grow_to)
            status, answer, headers = await context.wait_for(asyncio.ensure_future(self._fetch(scope, body)))
            memory.resize(len(answer))
            await context.respond(status, answer, headers)

    async def _fetch(self, scope: Scope, body: bytes) -> tuple[int, bytes, Headers]:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._path, limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        url = URL(f"http://serving{scope['raw_path'].decode('latin-1')}{query}", encoded=True)
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        passed = [(name, value) for name, value in sent if name.encode() not in _NOT_PASSED]
        skipped = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # added where the client sent none
        try:
            async with self._session.request(
                scope["method"],
                url,
                data=body or None,
                headers=[*passed, ("x-forwarded-proto", scope["scheme"])],
                skip_auto_headers=skipped,
                allow_redirects=False,
            ) as response:
                answer = await response.read()
                headers = [(n.lower(), v) for n, v in response.raw_headers if n.lower() not in _NOT_PASSED]
                return response.status, answer, headers
        except aiohttp.ClientError as error:
            raise UnavailableError("the serving process does not answer for now; send the request again", 1) from error

    async def close(self) -> None:
        """Close the connections to the serving process."""
        if self._session is not None:
            await self._session.close()
