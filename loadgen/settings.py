"""How the figures of a run came to be, in words: what its page tells beside them."""

import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("batchwright", "numpy", "aiohttp", "plotly")
_HIDDEN = "***"


def run_settings(command: Sequence[str], told: Mapping[str, str | None]) -> dict[str, str]:
    """The command as it was called, what else is known (None is left out), the time and the versions.

    Keys, and passwords in a URL, are hidden: pages are passed around.
    """
    words = {"command": shlex.join(hide_secrets(command))}
    words |= {word: hide_password(value) for word, value in told.items() if value is not None}
    words["made at"] = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    words["versions"] = ", ".join((f"Python {platform.python_version()}", *filter(None, map(_version, _PACKAGES))))
    return words


def hide_secrets(command: Sequence[str]) -> list[str]:
    """The words of a command, without the key that --api-key gives."""
    hidden: list[str] = []
    for before, word in zip(["", *command], command, strict=False):
        if before == "--api-key":
            hidden.append(_HIDDEN)
        elif word.startswith("--api-key="):
            hidden.append(f"--api-key={_HIDDEN}")
        else:
            hidden.append(hide_password(word))
    return hidden


def hide_password(text: str) -> str:
    """A URL without the name and password that it may hold."""
    return re.sub(r"(?<=://)[^/\s]*@", f"{_HIDDEN}@", text)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""
