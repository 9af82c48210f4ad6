"""Client of the server's policy endpoint, which a comparison uses to swap policies and restores at the end."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

from loadgen.client import open_session, read_object
from loadgen.report import OK
from loadgen.requests.metadata import KEY_ERRORS, find_model
from policies.types import SpecError

_TIMEOUT = 300.0  # s; the server solves a policy before it responds


@dataclass(frozen=True)
class PolicyAdminClient:
    """Reads and swaps the policy of one model.

    Attributes:
        url: URL of the server.
        path: URL of the model's policy.
        key: API key of scope admin; None for a server without keys.
    """

    url: str
    path: str
    key: str | None

    def read(self) -> dict[str, Any]:
        """Return the current policy's document, which has at least "spec".

        Raises:
            SpecError: the server does not respond, or responds with an error.
        """
        return self._request("GET", None)

    def swap(self, spec: str) -> None:
        """Set the policy; return once it decides.

        Raises:
            SpecError: the server does not respond, or rejects the policy.
        """
        self._request("PUT", {"policy": spec})

    def _request(self, method: str, body: dict[str, str] | None) -> dict[str, Any]:
        action = "read the policy" if body is None else f"set the policy {body['policy']!r}"
        try:
            status, content = asyncio.run(self._send(method, body))
        except (aiohttp.ClientError, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise SpecError(f"cannot {action} at {self.url} ({reason}); check the server") from None
        document = read_object(content)
        if status in KEY_ERRORS:
            raise SpecError(f"{self.url} {KEY_ERRORS[status]}; --compare needs one of scope admin: give --api-key KEY")
        if status != OK or (body is None and "spec" not in document):
            raise SpecError(f"cannot {action} at {self.url}: {document.get('error', f'the server responds {status}')}")
        return document

    async def _send(self, method: str, body: dict[str, str] | None) -> tuple[int, bytes]:
        async with (
            open_session(_TIMEOUT, self.key) as session,
            session.request(method, self.path, json=body) as response,
        ):
            return response.status, await response.read()


def find_policy_admin(url: str, model: str | None, key: str | None) -> PolicyAdminClient:
    """Make the client for the model that the requests go to.

    Raises:
        SpecError: no server, no such model, or several to choose from.
    """

    async def find() -> str | None:
        async with open_session(key=key) as session:
            return await find_model(session, url, model)

    name = asyncio.run(find())
    if name is None:
        raise SpecError(f"{url} does not list its models; name one with --model")
    return PolicyAdminClient(url, f"{url}/admin/models/{quote(name, safe='')}/policy", key)


@contextmanager
def restored_policy(client: PolicyAdminClient) -> Iterator[Callable[[str], None]]:
    """Restore the current policy at the end of the context, also after an exception.

    Yields:
        The function that swaps the policy; see PolicyAdminClient.swap.

    Raises:
        SpecError: the policy cannot be read, or cannot be restored.
    """
    original = str(client.read()["spec"])
    try:
        yield client.swap
    finally:
        try:
            client.swap(original)
        except SpecError as error:
            raise SpecError(f"the policy {original!r} is not restored: {error}; PUT it to {client.path}") from None


def read_policy_info(url: str, model: str | None, key: str | None) -> dict[str, str]:
    """Return the server's policy and profile for the report; empty if they cannot be read."""
    try:
        document = find_policy_admin(url, model, key).read()
    except SpecError:
        return {}
    return {"policy": str(document["spec"]), "profile": str(document.get("profile"))}
