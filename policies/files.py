"""Files that people hand over and files that the system keeps: read within a bound, written whole or not at all."""

import os
import reprlib
import tempfile
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from policies.types import SpecError

MAX_BYTES = 32 * 2**20  # a policy for 49 loads and batches up to 4096 takes 10 MB


def read_text(path: str | Path) -> str:
    """The file's text; bytes that are none become replacement characters, which no JSON reader accepts as syntax.

    Raises:
        OSError: it cannot be read.
        SpecError: it is larger than any file of ours.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)  # and no more: the size of a device or a pipe is not known before
    except ValueError as error:  # a NUL or half a surrogate pair in the path
        raise OSError(0, str(error)) from error
    if len(data) > MAX_BYTES:
        raise SpecError(f"{str(path)!r} is larger than {MAX_BYTES >> 20} MiB, the bound; give another file")
    return data.decode(errors="replace")


def write_atomically(path: Path, text: str) -> None:
    """Write the whole file or nothing: a reader, or whoever comes after a power cut, never sees half of it.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}-", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, 0o644)  # mkstemp's file is its owner's alone
            os.fsync(descriptor)  # or the name could outlive the content
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the new name last too; some file systems cannot, and then it is no worse than without."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def first_mistake(error: ValidationError) -> str:
    """Where a file is wrong, why, and the value that is, in one short line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))[:100] or "file"
    value = first["input"]
    plain = isinstance(value, str | int | float | None) and first["type"] not in ("json_invalid", "missing")
    text = f"{where}: {first['msg'][:300]}" + (f", not {reprlib.repr(value)}" if plain else "")
    return " ".join(text.split())
