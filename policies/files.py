"""Bounded reads and atomic writes of files."""

import os
import reprlib
import tempfile
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from policies.types import SpecError

MAX_BYTES = 32 * 2**20  # a policy for 49 loads and batches up to 4096 takes 10 MB


def read_text(path: str | Path) -> str:
    """Return the file's text. Bytes that are not UTF-8 become replacement characters.

    Raises:
        OSError: it cannot be read.
        SpecError: it is larger than `MAX_BYTES`.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)  # bounded here, because the size of a device or a pipe is unknown
    except ValueError as error:  # a NUL or half a surrogate pair in the path
        raise OSError(0, str(error)) from error
    if len(data) > MAX_BYTES:
        raise SpecError(f"{str(path)!r} is larger than {MAX_BYTES >> 20} MiB, the maximum; give another file")
    return data.decode(errors="replace")


def write_atomically(path: Path, text: str) -> None:
    """Write the file atomically: neither a concurrent reader nor a crash leaves a partial file.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}-", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, 0o644)  # mkstemp creates it with mode 600
            os.fsync(descriptor)  # the rename must not become durable before the content
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, on file systems that can sync a folder."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def first_error(error: ValidationError) -> str:
    """The location, reason and value of the first validation error, in one short line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))[:100]
    value = first["input"]
    plain = isinstance(value, str | int | float | None) and first["type"] not in ("json_invalid", "missing")
    text = (f"{where}: " if where else "") + first["msg"][:300] + (f", not {reprlib.repr(value)}" if plain else "")
    return " ".join(text.split())
