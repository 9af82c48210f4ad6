"""Requests with the content of files."""

import mimetypes
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from loadgen.client import RequestContent
from policies.types import SpecError


def body_content(path: str, files: Sequence[Path]) -> RequestContent:
    """Send the content of files in turn, all with the content type of the first one's name.

    Args:
        path: appended to the server's URL.
        files: at least one.

    Raises:
        SpecError: a file cannot be read, or has another type.
    """
    types = [mimetypes.guess_type(file)[0] or "application/octet-stream" for file in files]
    for file, kind in zip(files, types, strict=True):
        if kind != types[0]:
            raise SpecError(f"--body {str(file)!r} is {kind}, and the first one {types[0]}; send one type in a run")
    try:
        bodies = [file.read_bytes() for file in files]
    except OSError as error:
        raise SpecError(f"cannot read --body {error.filename!r} ({error.strerror}); give a file") from None
    return RequestContent(path, cycle(bodies), {"Content-Type": types[0]})
