"""Bounded reads and atomic writes of files."""

import errno
import os
import reprlib
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from policies.types import SpecError

MAX_BYTES = 32 * 2**20  # a policy for 49 loads and batches up to 4096 takes 10 MB


def read_text(path: str | Path) -> str:
    """Return the file's text, without a byte order mark. Bytes that are not UTF-8 become replacement characters.

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
    return data.decode("utf-8-sig", errors="replace")


def cache_folder() -> Path:
    """Return the user's cache folder.

    Raises:
        OSError: the user has no home, as one without an entry in /etc/passwd, and no variable names a folder.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")  # the XDG specification says to ignore a relative path
    if root.startswith("/"):
        return Path(root) / "batchwright"
    try:
        return Path.home() / ".cache" / "batchwright"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, "this user has no home folder; set HOME or XDG_CACHE_HOME") from error


def check_writable(path: Path) -> None:
    """Check that `open_atomically` can write to this path; leave nothing behind.

    Raises:
        OSError: it cannot.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if _written_in_place(path) is not None:
            return
    with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
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

    Neither a concurrent reader nor an exception nor a crash leaves a partial file. What cannot be replaced is written
    in place: a device, a pipe, an output of this process, such as /dev/stdout, and a file in a folder without rights.

    Args:
        path: the file; a symbolic link is followed, and the rights of an existing file are kept.
        mode: "w" for UTF-8, "wb" for bytes.

    Raises:
        OSError: it cannot be written.
    """
    encoding = None if "b" in mode else "utf-8"
    if (place := _written_in_place(path)) is not None:
        with open(os.dup(place) if isinstance(place, int) else place, mode, encoding=encoding) as file:
            yield file
        return
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    part = os.path.join(folder, f".{name[:100]}-{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, mode, encoding=encoding) as file:
            with suppress(FileNotFoundError):
                os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))
            yield file
            file.flush()
            os.fsync(descriptor)  # the rename must not become durable before the content
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise
    _sync_folder(Path(folder))


def _written_in_place(path: Path) -> Path | int | None:
    """The path, or the descriptor of this process that is open for it, if it is written in place."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    for descriptor in (1, 2):  # whose offset must advance, lest what is printed later overwrites the file
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    replaceable = stat.S_ISREG(found.st_mode) and os.access(os.path.dirname(os.path.realpath(path)), os.W_OK)
    return None if replaceable else path


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
