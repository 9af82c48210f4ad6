"""The HTTP request that serves a gRPC call."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from server.api.open_inference.documents import VERSION
from server.errors import NotFoundError, ServerError, quote

_NAME = re.compile(r"[\w.-]+", re.ASCII)  # names of models; others could lead to other routes


class HttpRequest(NamedTuple):
    """An HTTP request.

    Attributes:
        method: the method.
        path: the path, without characters that have to be escaped.
        headers: headers by lower-case name.
        body: the body; an error is raised when the body is read, so that it is counted for the model.
    """

    method: str
    path: str
    headers: Mapping[bytes, bytes] = {}
    body: bytes | ServerError = b""


def model_path(model: str, version: str) -> str:
    """The path of a model; an empty version is the only one.

    Raises:
        NotFoundError: the name or the version can be none.
    """
    version = version or VERSION
    if not _NAME.fullmatch(model) or not _NAME.fullmatch(version):
        raise NotFoundError(f"no model {quote(model)} with version {quote(version)}; RepositoryIndex lists the models")
    return f"/v2/models/{model}/versions/{version}"
