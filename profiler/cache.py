"""Cache of measured profiles on disk: one file per model, device, largest batch size and environment."""

import fcntl
import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from policies.files import cache_folder, read_text, write_atomically
from policies.profile import Profile, parse_profile
from policies.sample_file import file_of
from policies.types import SpecError

_log = logging.getLogger(__name__)

_PACKAGES = ("torch", "torchvision")
_RESUMABLE = 3600.0  # s; later the clocks or the temperature of the device may be others


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a measured profile depends on.

    Attributes:
        model: model name.
        device: device name for display.
        max_batch_size: the largest batch measured.
        settings: other settings that change service times, such as threads and precision.
        packages: those whose versions change service times, besides this one.
    """

    model: str
    device: str
    max_batch_size: int
    settings: str = ""
    packages: tuple[str, ...] = _PACKAGES

    @property
    def path(self) -> Path:
        """Path of the cache file for this key and the installed package versions; it need not exist.

        Raises:
            OSError: there is no folder for it.
        """
        identity = json.dumps([self.model, self.device, self.settings, package_versions(self.packages)], sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        model = slug(f"{self.model}-{self.device}")
        return cache_folder() / "profiles" / f"{model}-b{self.max_batch_size}-{digest}.json"


def load_cached_profile(key: CacheKey) -> Profile | None:
    """Return the cached profile; None if there is none, or the file is damaged or describes something else."""
    try:
        profile = parse_profile(read_text(key.path), str(key.path))
    except OSError:
        return None
    except SpecError as error:
        _log.warning("the cached profile is ignored: %s", error)
        return None
    matches = (profile.model, profile.device, profile.max_batch_size) == (key.model, key.device, key.max_batch_size)
    return profile if matches else None


def store_profile(key: CacheKey, profile: Profile) -> bool:
    """Write the profile to the cache, atomically; return whether that succeeded. If not, a warning is logged."""
    try:
        path = key.path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, profile.to_json())
    except OSError as error:
        _log.warning("the profile is not cached, the next start measures again: %s", error)
        return False
    return True


def measured_at(key: CacheKey) -> str:
    """The time at which the cached profile was stored, in UTC; empty without one."""
    with suppress(OSError):
        return f"{datetime.fromtimestamp(key.path.stat().st_mtime, UTC):%Y-%m-%d %H:%M} UTC"
    return ""


def sample_settings(sample: Path | None) -> str:
    """The setting of a key that stands for the file of a sample; empty without one."""
    return "" if sample is None else f"sample {hashlib.sha256(file_of(sample).read_bytes()).hexdigest()[:12]}"


def unfinished(key: CacheKey, plan: str) -> CacheKey:
    """Return the key under which an interrupted measurement by this plan keeps its service times."""
    return replace(key, settings=f"{key.settings}; unfinished, {plan}")


def load_unfinished(key: CacheKey) -> Profile | None:
    """Return the service times of a measurement that was interrupted within the last hour; None without one.

    Args:
        key: as `unfinished` returns it.
    """
    with suppress(OSError):
        if time.time() - key.path.stat().st_mtime < _RESUMABLE:
            return load_cached_profile(key)
    return None


def remove(key: CacheKey) -> None:
    """Remove the cached profile, if there is one."""
    with suppress(OSError):
        key.path.unlink()


@contextmanager
def device_lock(device: str) -> Iterator[None]:
    """Hold this user's lock on a device for the `with` block; wait while another process holds it.

    Without it two servers that start at once on one device would each measure the other's load. The lock is the
    kernel's (flock), so it ends with the process.

    Args:
        device: device name.
    """
    with ExitStack() as stack:
        try:
            path = cache_folder() / "locks" / slug(device)
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
        except OSError as error:
            _log.warning("no lock on %s, another process may disturb the measurement: %s", device, error)
        else:
            _lock(file, device)
        yield


def _lock(file: IO[str], device: str) -> None:
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("another process is measuring on %s; waiting for it to finish", device)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems do not support locks
        _log.warning("no lock on %s, another process may disturb the measurement: %s", device, error)


def package_versions(names: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Installed versions of packages, and of this one."""
    return {name: _version(name) for name in (*names, "batchwright")}


def slug(text: str) -> str:
    """Convert text for use in a file name: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
