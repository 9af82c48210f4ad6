"""The cache of the dashboard's static files."""

import asyncio
import gzip

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.api.dashboard.page import page_routes


def fetch(route: Route, coding: str) -> Response:
    headers = [(b"accept-encoding", coding.encode())]
    scope = {"type": "http", "method": "GET", "path": route.path, "headers": headers}
    response: Response = asyncio.run(route.endpoint(Request(scope)))
    return response


@pytest.mark.parametrize("route", page_routes(), ids=lambda route: route.path)
def test_all_clients_share_one_object_compressed_or_not(route: Route) -> None:
    plain, compressed = fetch(route, "identity").body, fetch(route, "gzip").body
    assert gzip.decompress(compressed) == plain
    assert fetch(route, "identity").body is plain, "a client that does not read costs no copy"
    assert fetch(route, "gzip").body is compressed
