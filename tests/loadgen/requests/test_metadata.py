"""Tests of finding the model to send requests to."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import ClientSession

from loadgen.client import open_session
from loadgen.requests.metadata import find_model, read_metadata
from policies.types import SpecError
from tests.support.stub_server import METADATA, Stub, serving

READY, LOADING = {"name": "tiny", "state": "READY"}, {"name": "other", "state": "UNAVAILABLE"}


def asked(
    stub: Stub, question: Callable[[ClientSession, str], Coroutine[Any, Any, Any]], key: str | None = None
) -> Any:
    async def main() -> Any:
        async with serving(stub) as url, open_session(key=key) as session:
            return await question(session, url)

    return asyncio.run(main())


def found(stub: Stub, model: str | None = None, key: str | None = None) -> Any:
    return asked(stub, lambda session, url: find_model(session, url, model), key)


def test_the_only_ready_model_is_used() -> None:
    assert found(Stub(models=[LOADING, READY])) == "tiny"


def test_without_a_list_of_models_the_given_one_is_used() -> None:
    assert found(Stub(models=None)) is None
    assert found(Stub(models={"error": "what?"}), "a b/c") == "a b/c"
    assert found(Stub(models=[]), "tiny") == "tiny"


@pytest.mark.parametrize(
    ("stub", "model", "words"),
    [
        (Stub(models=[READY, {"name": "second"}]), None, r"several or no models \(ready: tiny, second\); .*--model"),
        (Stub(models=[LOADING]), None, r"\(ready: none\)"),
        (Stub(), "huge", r"no model 'huge' .*\(ready: tiny\)"),
        (Stub(key="secret"), None, "requires an API key that it knows; give --api-key"),
    ],
)
def test_an_unusable_model_is_an_error(stub: Stub, model: str | None, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        found(stub, model)


def test_the_api_key_is_sent() -> None:
    assert found(Stub(key="secret"), key="secret") == "tiny"


def test_a_server_that_does_not_respond_is_an_error_with_its_url() -> None:
    async def main() -> None:
        async with open_session() as session:
            await find_model(session, "http://127.0.0.1:1", None)

    with pytest.raises(SpecError, match=r"no server responds at http://127.0.0.1:1 .*serve-model"):
        asyncio.run(main())


def test_the_metadata_are_those_of_the_model() -> None:
    metadata = asked(Stub(), lambda session, url: read_metadata(session, url, "tiny"))
    assert (metadata.name, metadata.infer_path) == ("tiny", "/v2/models/tiny/infer")
    assert metadata.inputs[0].sample_shape == (4, 5, 3)
    assert asked(Stub(), lambda session, url: read_metadata(session, url, "other")) is None


@pytest.mark.parametrize("change", [{"inputs": []}, {"outputs": None}])
def test_malformed_metadata_are_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="/v2/models/tiny is no model metadata"):
        asked(Stub(metadata=METADATA | change), lambda session, url: read_metadata(session, url, "tiny"))
