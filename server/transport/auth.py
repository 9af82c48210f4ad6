"""API keys: who may call what, and how often. Only hashes of keys are kept, in the file and here."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path
from typing import Literal, get_args

from policies.types import SpecError
from server.errors import ForbiddenError, TooManyError, UnauthorizedError

Scope = Literal["predict", "admin"]
_LINE = "a line is: name scope sha256-of-key [calls-per-second]"
_MAX_KEY = 512  # bytes of a presented key that are worth hashing


class _Bucket:
    """Token bucket: tokens come at a rate, 1/s, up to one second's worth and at least one; a call takes one."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._most = self._left = max(1.0, rate)
        self._at = 0.0

    def wait(self, now: float) -> float:
        """Take a token; or else the time until there is one, s."""
        self._left = min(self._most, self._left + self._rate * max(0.0, now - self._at))
        self._at = now
        if self._left < 1.0:
            return (1.0 - self._left) / self._rate
        self._left -= 1.0
        return 0.0


@dataclass(frozen=True)
class Key:
    """One line of the file.

    Attributes:
        name: whose it is, for the log.
        scope: what it is good for; a key for both stands on two lines.
        digest: SHA-256 of the key.
        rate: calls allowed, 1/s, whatever the number of their samples; None: any number.
    """

    name: str
    scope: Scope
    digest: bytes
    rate: float | None = None
    _bucket: _Bucket | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bucket", None if self.rate is None else _Bucket(self.rate))

    def wait(self, now: float) -> float:
        """Count a call at `now`, s; the time until it may come again, s, where it is one too many, else 0."""
        return 0.0 if self._bucket is None else self._bucket.wait(now)


class Keys:
    """All keys of a server."""

    def __init__(self, keys: Sequence[Key], origin: Path | None = None) -> None:
        """`keys` are those of the file `origin`."""
        self._keys = tuple(keys)
        self._origin = origin

    def reload(self) -> None:
        """Read the file again: keys that are gone are revoked. A key whose line is the same keeps its rate limit.

        Raises:
            SpecError: the file cannot be used; the keys stay as they are.
        """
        if self._origin is None:
            return
        before = {key: key for key in self._keys}
        self._keys = tuple(before.get(key, key) for key in load_keys(self._origin)._keys)

    def admit(self, authorization: bytes | None, scope: Scope, now: float) -> str:
        """The name of the key in an Authorization header, which must be good for `scope`.

        Every key is compared in full, so that the time taken tells nothing of any of them.

        Raises:
            UnauthorizedError: there is none, or nobody knows it.
            ForbiddenError: it is good for something else.
            TooManyError: its rate is used up.
        """
        digest = hashlib.sha256(_presented(authorization)).digest()
        known = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        if not known:
            raise UnauthorizedError("the key is unknown; ask whoever runs this server")
        fitting = [key for key in known if key.scope == scope]
        if not fitting:
            raise ForbiddenError(f"key {known[0].name} is for {known[0].scope}, this needs {scope}; use another key")
        wait = fitting[0].wait(now)
        if wait > 0.0:
            message = f"key {fitting[0].name} is allowed {fitting[0].rate:g} calls/s; come again later"
            raise TooManyError(message, ceil(wait))
        return fitting[0].name


def _presented(authorization: bytes | None) -> bytes:
    if authorization is None:
        raise UnauthorizedError("this needs a key; send it as Authorization: Bearer KEY")
    kind, _, key = authorization.strip().partition(b" ")
    key = key.strip()
    if kind.lower() != b"bearer" or not key or len(key) > _MAX_KEY:
        raise UnauthorizedError("the key cannot be read; send it as Authorization: Bearer KEY")
    return key


def load_keys(path: Path) -> Keys:
    """The keys of a file.

    Raises:
        SpecError: it cannot be read, or has mistakes; all of them in one line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SpecError(f"the key file {str(path)!r} cannot be read: {reason}") from error
    return Keys(parse_keys(text, str(path))._keys, path)


def parse_keys(text: str, origin: str) -> Keys:
    """The keys in the text of a file; `#` begins a comment.

    Raises:
        SpecError: there are mistakes; all of them in one line, each with the number of its line in `origin`.
    """
    keys: dict[tuple[bytes, Scope], Key] = {}
    mistakes = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            key = _key(words)
            if (key.digest, key.scope) in keys:
                raise ValueError(f"the key stands here a second time for {key.scope}")
            keys[key.digest, key.scope] = key
        except ValueError as error:
            mistakes.append(f"line {number}: {error}")
    if not keys and not mistakes:
        mistakes.append(f"no key, so that nobody could call; {_LINE}")
    if mistakes:
        raise SpecError(f"key file {origin!r}: {'; '.join(mistakes)}")
    return Keys(list(keys.values()))


def _key(words: list[str]) -> Key:
    """A line's words as a key; what is wrong is said without showing the line, which may hold a plain key."""
    if len(words) not in (3, 4):
        raise ValueError(f"{len(words)} words; {_LINE}")
    name, scope, digest = words[:3]
    if not re.fullmatch(r"[\w.@-]{1,64}", name, re.ASCII):
        raise ValueError("the name is not up to 64 letters, digits or any of _ . @ -")
    if scope not in get_args(Scope):
        raise ValueError(f"the scope is not {' or '.join(get_args(Scope))}")
    if not re.fullmatch(r"[\da-fA-F]{64}", digest, re.ASCII):
        raise ValueError("the third word is no SHA-256 of 64 hexadecimal digits; make it by: printf %s KEY | sha256sum")
    return Key(name, "admin" if scope == "admin" else "predict", bytes.fromhex(digest), _rate(words[3:]))


def _rate(words: list[str]) -> float | None:
    if not words:
        return None
    try:
        rate = float(words[0])
    except ValueError:
        rate = 0.0
    if not (isfinite(rate) and rate > 0.0):
        raise ValueError("the rate is not a number of calls per second above 0")
    return rate
