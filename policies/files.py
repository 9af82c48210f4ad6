"""Bounded reads and atomic writes of files."""

import errno
import os
import reprlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

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


def check_writable(path: Path) -> None:
    """Check that `open_atomically` can write to this path; leave nothing behind.

    Raises:
        OSError: it cannot.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if _is_special(path):
        return
    if path.exists():
        path.open("ab").close()
    with tempfile.TemporaryFile(dir=path.resolve().parent):
        pass


def write_atomically(path: Path, text: str) -> None:
    """Write the file atomically, as `open_atomically` does.

    Raises:
        OSError: it cannot be written.
    """
    with open_atomically(path) as file:
        file.write(text)


@contextmanager
def open_atomically(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that appears under its name, complete, at the end of the block.

    Neither a concurrent reader nor an exception nor a crash leaves a partial file. A device or a pipe, such as
    /dev/stdout, is written to directly.

    Args:
        path: the file; a symbolic link is followed.
        mode: "w" for UTF-8, "wb" for bytes.

    Raises:
        OSError: it cannot be written.
    """
    encoding = None if "b" in mode else "utf-8"
    if _is_special(path):
        with path.open(mode, encoding=encoding) as file:
            yield file
        return
    path = path.resolve()
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}-", suffix=".part")
    try:
        with os.fdopen(descriptor, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fchmod(descriptor, 0o644)  # mkstemp creates it with mode 600
            os.fsync(descriptor)  # the rename must not become durable before the content
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    _sync_folder(path.parent)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


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
