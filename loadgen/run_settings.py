"""Settings of a run for its report page: command, parameters, time and versions, without secrets."""

import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("batchwright", "numpy", "aiohttp", "plotly")
_HIDDEN = "***"


def run_settings(command: Sequence[str], about: Mapping[str, str | None]) -> dict[str, str]:
    """Collect the command line, further parameters (None is left out), the time and the package versions.

    API keys and passwords in URLs are hidden, since report pages are shared.
    """
    settings = {"command": shlex.join(hide_secrets(command))}
    settings |= {name: hide_password(value) for name, value in about.items() if value is not None}
    settings["made at"] = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    settings["versions"] = ", ".join((f"Python {platform.python_version()}", *filter(None, map(_version, _PACKAGES))))
    return settings


def hide_secrets(command: Sequence[str]) -> list[str]:
    """Replace the value of --api-key, and passwords in URLs, in a command line."""
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
    """Replace user name and password in URLs."""
    return re.sub(r"(?<=://)[^/\s]*@", f"{_HIDDEN}@", text)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""
