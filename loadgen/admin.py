"""The server's policy, restored_policy for a comparison: each run under another one, and at the end the first one again."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson

from loadgen.client import REFUSED, find_model, open_session
from loadgen.report import OK
from policies.types import SpecError

_PATIENCE = 300.0  # s; a policy is solved before the server answers


@dataclass(frozen=True)
class PolicyAdminClient:
    """Where a model's policy is read and swapped.

    Attributes:
        url: of the server.
        path: of the model's policy.
        key: of scope admin; None where the server asks for none.
    """

    url: str
    path: str
    key: str | None

    def read(self) -> dict[str, Any]:
        """The policy that decides; at least its "spec".

        Raises:
            SpecError: the server has no such page, or refuses.
        """
        return self._exchange("GET", None)

    def swap(self, spec: str) -> None:
        """Decide by this policy from now on; returns when it does.

        Raises:
            SpecError: the server refuses it.
        """
        self._exchange("PUT", {"policy": spec})

    def _exchange(self, method: str, body: dict[str, str] | None) -> dict[str, Any]:
        what = "tell its policy" if body is None else f"take the policy {body['policy']!r}"
        try:
            status, answer = asyncio.run(_ask(self, method, body))
        except (aiohttp.ClientError, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise SpecError(f"{self.url} does not {what} ({reason}); look at the server") from None
        document = _read(answer)
        if status in REFUSED:
            raise SpecError(f"{self.url} {REFUSED[status]}; --compare needs one of scope admin: give --api-key KEY")
        if status != OK or (body is None and "spec" not in document):
            raise SpecError(f"{self.url} does not {what}: {document.get('error', f'it answers {status}')}")
        return document


def find_policy_admin(url: str, model: str | None, key: str | None) -> PolicyAdminClient:
    """The place for the model that requests go to.

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
    """Swap policies as often as you like: at the end, whatever happened, the first one decides again.

    Yields:
        What swaps; see PolicyAdminClient.swap.

    Raises:
        SpecError: the policy cannot be read, or the first one cannot be put back.
    """
    first = str(client.read()["spec"])
    try:
        yield client.swap
    finally:
        try:
            client.swap(first)
        except SpecError as error:
            raise SpecError(f"policy {first!r} is not back: {error}; PUT it to {client.path}") from None


def describe_policy(url: str, model: str | None, key: str | None) -> dict[str, str]:
    """Policy and profile by which the server decides, in words; empty where it does not tell."""
    try:
        told = find_policy_admin(url, model, key).read()
    except SpecError:
        return {}
    return {"policy": str(told["spec"]), "profile": str(told.get("profile"))}


async def _ask(client: PolicyAdminClient, method: str, body: dict[str, str] | None) -> tuple[int, bytes]:
    async with (
        open_session(_PATIENCE, client.key) as session,
        session.request(method, client.path, json=body) as response,
    ):
        return response.status, await response.read()


def _read(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
