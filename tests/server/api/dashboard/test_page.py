"""The files of the page, which are kept in memory."""

import asyncio
import gzip

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.api.dashboard.page import page_routes


def respond(route: Route, coding: str) -> Response:
    headers = [(b"accept-encoding", coding.encode())]
    scope = {"type": "http", "method": "GET", "path": route.path, "headers": headers}
    response: Response = asyncio.run(route.endpoint(Request(scope)))
    return response


@pytest.mark.parametrize("route", page_routes(), ids=lambda route: route.path)
def test_all_clients_share_one_object_for_each_content_encoding(route: Route) -> None:
    plain, packed = respond(route, "identity").body, respond(route, "gzip").body
    assert gzip.decompress(packed) == plain
    assert respond(route, "identity").body is plain, "a client that does not read takes no copy"
    assert respond(route, "gzip").body is packed
