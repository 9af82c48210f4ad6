"""A minimal HTTP client for the tests of the real server process."""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def fetch(
    url: str, path: str, body: bytes | None = None, method: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Send one request on a new connection and return the response."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, dict(headers or {}))
        response = connection.getresponse()
        headers_in = {key.lower(): value for key, value in response.getheaders()}
        return Response(response.status, headers_in, response.read())
    finally:
        connection.close()


def photograph() -> bytes:
    """Return a JPEG of a person, which matplotlib ships."""
    return (resources.files("matplotlib") / "mpl-data" / "sample_data" / "grace_hopper.jpg").read_bytes()
