"""Specs of models of other servers, NAME=oip:http://HOST:PORT/MODEL, parsed without asking these servers."""

from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from policies.types import SpecError

PREFIX = "oip:"
USAGE = "give NAME=oip:http://HOST:PORT/MODEL, several URLs separated by commas"


@dataclass(frozen=True, slots=True)
class Upstream:
    """A model of another server that speaks the Open Inference Protocol.

    Attributes:
        secure: whether the server speaks TLS.
        host: its name or address.
        port: its port.
        model: the name of the model there.
    """

    secure: bool
    host: str
    port: int
    model: str

    @property
    def device(self) -> str:
        """The server as a device of its own, such as oip:localhost:8000."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{PREFIX}{host}:{self.port}"

    @property
    def spec(self) -> str:
        """The spec of this upstream alone."""
        scheme = "https" if self.secure else "http"
        return f"{PREFIX}{scheme}://{self.device.removeprefix(PREFIX)}/{quote(self.model, safe='')}"


def is_upstream(text: str) -> bool:
    """Whether a spec, or the name of a device, is that of another server."""
    return text.startswith(PREFIX)


def upstreams_of(spec: str) -> list[Upstream]:
    """The upstreams of SPEC of NAME=SPEC, in order; none for a model of another source.

    Raises:
        SpecError: a URL is malformed.
    """
    return [_parse(url) for url in spec.removeprefix(PREFIX).split(",")] if is_upstream(spec) else []


def _parse(url: str) -> Upstream:
    try:
        parts = urlsplit(url.strip())
        default = {"http": 80, "https": 443}[parts.scheme]
        port = default if parts.port is None else parts.port
    except (ValueError, KeyError):
        raise SpecError(f"{url!r} is not the URL of a model; {USAGE}") from None
    model = unquote(parts.path.strip("/"))
    if not parts.hostname or not port or not model or "/" in model or parts.username or parts.query or parts.fragment:
        raise SpecError(f"{url!r} is not the URL of a model; {USAGE}")
    return Upstream(parts.scheme == "https", parts.hostname, port, model)
