"""The files that the page is made of, as they are held in memory."""

import asyncio
import gzip

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.api.dashboard.page import page_routes


def answered(route: Route, coding: str) -> Response:
    headers = [(b"accept-encoding", coding.encode())]
    scope = {"type": "http", "method": "GET", "path": route.path, "headers": headers}
    response: Response = asyncio.run(route.endpoint(Request(scope)))
    return response


@pytest.mark.parametrize("route", page_routes(), ids=lambda route: route.path)
def test_everybody_gets_one_and_the_same_object_packed_or_not(route: Route) -> None:
    plain, packed = answered(route, "identity").body, answered(route, "gzip").body
    assert gzip.decompress(packed) == plain
    assert answered(route, "identity").body is plain, "who does not read holds no copy"
    assert answered(route, "gzip").body is packed
