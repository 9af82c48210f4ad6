"""API keys: the key file, the scope of each key, and rate limits. Only SHA-256 hashes of keys are stored."""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from policies.types import SpecError
from server.errors import ForbiddenError, TooManyError, UnauthorizedError

Scope = Literal["predict", "admin"]
_MAX_KEY = 512  # bytes; a longer key is rejected before it is hashed
_FORMAT = "a line is: name scope sha256-of-key [calls-per-second] [max_level=N]"
_EXPECTED = {  # by field; messages do not quote the rejected value, which may be a key in plain text
    "name": "up to 64 letters, digits or any of _ . @ -",
    "scope": "predict or admin",
    "sha256": "64 hexadecimal digits; make them by: printf %s KEY | sha256sum",
    "calls_per_second": "a number above 0",
    "max_level": "a whole number from 1 to 8",
}


class Key(BaseModel):
    """One entry of the key file.

    Attributes:
        name: name of the client, for the log.
        scope: routes that the key is valid for; a key for both scopes has two entries.
        sha256: SHA-256 of the key, lower-case hexadecimal digits.
        calls_per_second: rate limit, whatever the number of samples in a call; None: unlimited.
        max_level: the first priority level that its calls may have.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")]
    scope: Scope
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9A-Fa-f]{64}$", to_lower=True)]
    calls_per_second: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_level: int = Field(1, ge=1, le=8)


class _TokenBucket:
    """Token bucket that is refilled at a rate, 1/s, up to one second's tokens and at least one."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._capacity = self._tokens = max(1.0, rate)
        self._updated = 0.0

    def take(self, now: float) -> float:
        """Take a token at `now`, s, and return 0; if there is none, return the time until the next one, s."""
        self._tokens = min(self._capacity, self._tokens + self._rate * max(0.0, now - self._updated))
        self._updated = now
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / self._rate
        self._tokens -= 1.0
        return 0.0


class Keys:
    """The API keys of a server, with their rate limits."""

    def __init__(self, keys: Sequence[Key], origin: Path | None = None) -> None:
        """Keys of the file `origin`, which `reload` reads; without it they do not change."""
        self._origin = origin
        self._buckets = {key: _bucket(key) for key in keys}

    def reload(self) -> None:
        """Read the file again. Removed keys are revoked; an unchanged entry keeps its token bucket.

        Raises:
            SpecError: the file cannot be read or has errors; the keys stay as they are.
        """
        if self._origin is not None:
            loaded = load_keys(self._origin)._buckets
            self._buckets = {key: self._buckets[key] if key in self._buckets else _bucket(key) for key in loaded}

    def admit(self, authorization: bytes | None, scope: Scope, now: float) -> Key:
        """Authenticate a call at `now`, s, and count it against the rate limit of its key.

        The key is compared with all keys, in constant time, so that response times reveal none.

        Args:
            authorization: the Authorization header.
            scope: scope that the route needs.
            now: time of the call, s.

        Returns:
            The key.

        Raises:
            UnauthorizedError: there is no key, or it is unknown.
            ForbiddenError: the key has the other scope.
            TooManyError: the rate limit of the key is exceeded.
        """
        digest = hashlib.sha256(_bearer_key(authorization)).hexdigest()
        known = [key for key in self._buckets if hmac.compare_digest(key.sha256, digest)]
        if not known:
            raise UnauthorizedError("the key is unknown; check it, or have the server's operator add it")
        key = next((key for key in known if key.scope == scope), None)
        if key is None:
            raise ForbiddenError(
                f"key {known[0].name} has the scope {known[0].scope}, the route needs {scope}; use another key"
            )
        bucket = self._buckets[key]
        wait = 0.0 if bucket is None else bucket.take(now)
        if wait > 0.0:
            rate, seconds = key.calls_per_second, ceil(wait)
            raise TooManyError(f"key {key.name} is limited to {rate:g} calls/s; retry in {seconds} s", seconds)
        return key


def _bucket(key: Key) -> _TokenBucket | None:
    return None if key.calls_per_second is None else _TokenBucket(key.calls_per_second)


def _bearer_key(authorization: bytes | None) -> bytes:
    if authorization is None:
        raise UnauthorizedError("the route needs an API key; send it as Authorization: Bearer KEY")
    kind, _, key = authorization.strip().partition(b" ")
    key = key.strip()
    if kind.lower() != b"bearer" or not key or len(key) > _MAX_KEY:
        raise UnauthorizedError("the key cannot be read; send it as Authorization: Bearer KEY")
    return key


def load_keys(path: Path) -> Keys:
    """Read a key file.

    Raises:
        SpecError: it cannot be read, or has errors; all of them in one line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SpecError(f"the key file {str(path)!r} cannot be read: {reason}; give a text file: {_FORMAT}") from error
    return Keys(parse_keys(text, str(path)), path)


def parse_keys(text: str, origin: str) -> list[Key]:
    """Parse the content of the key file `origin`: a YAML list of keys, or one line of words per key.

    Raises:
        SpecError: there are errors; all of them in one line, each with its place in the file.
    """
    keys: dict[tuple[str, Scope], Key] = {}
    errors = []
    try:
        for place, fields in _entries(text):
            try:
                key = Key.model_validate(fields)
            except ValidationError as error:
                errors.append(f"{place}: {_message(error.errors()[0])}")
                continue
            if (key.sha256, key.scope) in keys:
                errors.append(f"{place}: the key is listed a second time for {key.scope}; remove one of them")
            keys[key.sha256, key.scope] = key
    except ValueError as error:
        errors.append(str(error))
    if not keys and not errors:
        errors.append(f"no key, so that every call would be rejected; {_FORMAT}")
    if errors:
        raise SpecError(f"key file {origin!r}: {'; '.join(errors)}")
    return [*keys.values()]


def _entries(text: str) -> Iterator[tuple[str, object]]:
    """The place and the fields of each key.

    Raises:
        ValueError: the text has a colon, which only the YAML format has, and is not a YAML list.
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    if not any(":" in line for line in lines):
        numbered = ((number, line.split()) for number, line in enumerate(lines, 1))
        yield from ((f"line {number}", _fields(words)) for number, words in numbered if words)
        return
    try:
        entries = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  (builds only strings, lists and mappings)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" at line {error.problem_mark.line + 1}"
        raise ValueError(f"not valid YAML{line}; {_FORMAT}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML; {_FORMAT}") from error
    if not isinstance(entries, list):
        raise ValueError(f"not a YAML list of keys with {', '.join(Key.model_fields)}; {_FORMAT}")
    yield from ((f"key {number}", fields) for number, fields in enumerate(entries, 1))


def _fields(words: list[str]) -> dict[str, str]:
    """The fields of a line; one word too many becomes an unknown field, which `Key` rejects."""
    names = ("name", "scope", "sha256", "calls_per_second", "unknown")
    named = [word.removeprefix("max_level=") for word in words if word.startswith("max_level=")]
    fields = dict(zip(names, (word for word in words if not word.startswith("max_level=")), strict=False))
    return fields | ({"max_level": named[0]} if named else {}) | ({"unknown": named[1]} if len(named) > 1 else {})


def _message(error: ErrorDetails) -> str:
    field = str(error["loc"][0]) if error["loc"] else ""
    if field not in _EXPECTED:
        return f"there are fields other than {', '.join(_EXPECTED)}; {_FORMAT}"
    if error["type"] == "missing":
        return f"the {field} is missing; {_FORMAT}"
    return f"the {field} is not {_EXPECTED[field]}"
