"""Requests with the content of files: to /predict, or to the path of the URL of any HTTP server."""

import mimetypes
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from urllib.parse import quote, urlsplit

from loadgen.client import RequestContent
from policies.types import SpecError


def has_path(url: str) -> bool:
    """Whether a URL names a path of its server."""
    return urlsplit(url).path.strip("/") != ""


def body_content(url: str, model: str | None, files: Sequence[Path]) -> RequestContent:
    """Send the content of files in turn, all with the content type of the first one's name.

    Args:
        url: of the server; a path in it is posted to, else /predict.
        model: model name; None for a server with one model.
        files: at least one.

    Raises:
        SpecError: a file cannot be read, or has another type.
    """
    types = [mimetypes.guess_type(path)[0] or "application/octet-stream" for path in files]
    for path, kind in zip(files, types, strict=True):
        if kind != types[0]:
            raise SpecError(f"--body {str(path)!r} is {kind}, and the first one {types[0]}; send one type in a run")
    try:
        bodies = [path.read_bytes() for path in files]
    except OSError as error:
        raise SpecError(f"cannot read --body {error.filename!r} ({error.strerror}); give a file") from None
    target = "/predict" if model is None else f"/predict/{quote(model, safe='')}"
    return RequestContent("" if has_path(url) else target, cycle(bodies), {"Content-Type": types[0]})
