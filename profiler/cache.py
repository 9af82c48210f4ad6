"""Measured profiles, kept between starts: one file for each model, device, largest batch and environment."""

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from policies.files import read_text, write_atomically
from policies.profile import Profile, parse_profile
from policies.types import SpecError

_log = logging.getLogger(__name__)

_PACKAGES = ("torch", "torchvision", "batchwright")


@dataclass(frozen=True, slots=True)
class Key:
    """What a measured profile depends on.

    Attributes:
        model: its name.
        device: the device's name for people.
        max_batch_size: the largest batch measured.
        settings: what else changes service times: threads, precision.
    """

    model: str
    device: str
    max_batch_size: int
    settings: str = ""

    @property
    def path(self) -> Path:
        """Where the profile of this key and the installed versions is kept, whether or not it is there."""
        rest = json.dumps([self.model, self.device, self.settings, versions()], sort_keys=True)
        digest = hashlib.sha256(rest.encode()).hexdigest()[:12]
        return _folder() / f"{slug(f'{self.model}-{self.device}')}-b{self.max_batch_size}-{digest}.json"


def load(key: Key) -> Profile | None:
    """The profile kept for the key; None where there is none, or it is damaged or another's."""
    try:
        profile = parse_profile(read_text(key.path), str(key.path))
    except OSError:
        return None
    except SpecError as error:
        _log.warning("the cached profile is ignored: %s", error)
        return None
    fits = (profile.model, profile.device, profile.max_batch_size) == (key.model, key.device, key.max_batch_size)
    return profile if fits else None


def store(key: Key, profile: Profile) -> None:
    """Keep the profile, atomically; a cache that cannot be written is only worth a warning."""
    path = key.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, profile.to_json())
    except OSError as error:
        _log.warning("the profile is not kept: %s", error)


@contextmanager
def exclusive(device: str) -> Iterator[None]:
    """Keep other processes of this user from measuring on the device while the `with` block runs; wait for them first.

    Two servers that start at once on one device would otherwise measure each other's load, and keep that as a profile.
    The lock is the kernel's: it ends with the process that holds it.

    Args:
        device: its name.
    """
    path = _folder().with_name("locks") / slug(device)
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
        except OSError as error:
            _log.warning("no lock on %s, so that another process may disturb the measurement: %s", device, error)
        else:
            _lock(file, device)
        yield


def _lock(file: IO[str], device: str) -> None:
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("another process measures on %s; waiting for it to finish", device)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems have no locks
        _log.warning("no lock on %s, so that another process may disturb the measurement: %s", device, error)


def versions() -> dict[str, str]:
    """The installed versions of what a service time depends on."""
    return {name: _version(name) for name in _PACKAGES}


def slug(text: str) -> str:
    """The text as part of a file's name: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")  # the XDG specification: a relative path is as good as none
    return (Path(root) if root.startswith("/") else Path.home() / ".cache") / "batchwright" / "profiles"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
