"""Models loaded again on several emulated devices: what is undone if a step fails, and what the devices are told."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.catalog import choose
from policies.types import SpecError
from profiler.first_profile import FirstProfiles
from server.api.inference import Inference
from server.app import assembly, repository
from server.app.backend import Backend, LoadedModel, load_again
from server.app.repository import Repository
from server.app.start_checks import make_plan
from server.config import read_settings
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.memory_budget import MemoryBudget

MODEL = """
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {"x": Tensor("FP32", [SIZE])}
    outputs = {"y": Tensor("FP32", [SIZE])}
    def run(self, x):
        return {"y": x}
"""


class Assembled:
    """A repository of the model m on two devices, and what it consists of."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "mine.py"
        self.write(1)
        flags = {"models": [f"m={self.file}:Mine"], "port": 0, "device": ",".join(["emulated:googlenet-tesla-p4"] * 2)}
        plan = make_plan(read_settings(flags, None), lambda *_: None)
        plan.bound.close()
        self.metrics = Metrics()
        self.backends = assembly._backends(plan, FirstProfiles())
        self.dispatchers = [assembly._dispatcher(backend, self.metrics, None) for backend in self.backends]
        served = {"m": self.backends[0].loaded["m"].served}
        fleet = Fleet(self.dispatchers)
        self.inference = Inference(
            served, fleet, self.metrics, ThreadPoolExecutor(1), 8, MemoryBudget(2**20, lambda: 1)
        )
        by_dispatcher = dict(zip(self.dispatchers, self.backends, strict=True))
        self.repository = Repository(self.inference, by_dispatcher, FirstProfiles())

    def write(self, size: int) -> None:
        self.file.write_text(MODEL.replace("SIZE", str(size)))

    @property
    def loaded(self) -> list[int]:
        """Number of loaded models on each device."""
        return [len(backend.devices.all()) for backend in self.backends]


@pytest.fixture
def assembled(tmp_path: Path) -> Assembled:
    return Assembled(tmp_path)


async def fails(loading: Coroutine[Any, Any, None], error: str) -> None:
    with pytest.raises(SpecError, match=error):
        await loading


def test_devices_are_shared_while_a_model_is_loaded(assembled: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def watched(backend: Backend, *arguments: Any) -> LoadedModel:
        seen.extend(dispatcher.accounting.shared for dispatcher in assembled.dispatchers)
        return load_again(backend, *arguments)

    monkeypatch.setattr(repository, "load_again", watched)
    asyncio.run(assembled.repository.load("m"))
    assert seen == [True] * 4
    assert not any(dispatcher.accounting.shared for dispatcher in assembled.dispatchers)
    assert assembled.inference.models["m"].id == "m#2"


def test_a_policy_that_was_swapped_on_one_device_only_meanwhile_is_followed_there(
    assembled: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = assembled.dispatchers[0]

    def swapping(*arguments: Any) -> LoadedModel:
        loaded = load_again(*arguments)
        changed.chosen["m"] = choose("static:3", changed.chosen["m"].profile)
        return loaded

    monkeypatch.setattr(repository, "load_again", swapping)
    asyncio.run(assembled.repository.load("m"))
    assert [dispatcher.chosen["m"].spec for dispatcher in assembled.dispatchers] == ["static:3", "auto"]


def test_a_model_whose_policy_cannot_be_chosen_is_removed(
    assembled: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapping(*arguments: Any) -> LoadedModel:
        loaded = load_again(*arguments)
        for dispatcher in assembled.dispatchers:
            dispatcher.chosen["m"] = replace(dispatcher.chosen["m"], spec="static:99999")
        return loaded

    monkeypatch.setattr(repository, "load_again", swapping)
    asyncio.run(fails(assembled.repository.load("m"), "m is not loaded: .*99999.*; the model in service stays"))
    assert assembled.loaded == [1, 1]
    assert assembled.inference.models["m"].id == "m"


def test_without_a_device_that_works_nothing_is_loaded(assembled: Assembled) -> None:
    for dispatcher in assembled.dispatchers:
        dispatcher.broken.set()
    asyncio.run(fails(assembled.repository.load("m"), "no device of m works; restart the server"))


@pytest.mark.slow
def test_unloading_and_loading_leaves_no_model_behind(assembled: Assembled) -> None:
    async def scenario() -> None:
        for size in (2, 3):
            await assembled.repository.unload("m")
            assembled.write(size)
            await assembled.repository.load("m")
        await assembled.repository.load("m")
        await asyncio.gather(*assembled.repository._background)

    asyncio.run(scenario())
    assert assembled.loaded == [1, 1]
    assert assembled.inference.models["m"].signature.inputs[0].sample_shape == (3,)
    assert not any(dispatcher.policies.retiring for dispatcher in assembled.dispatchers), (
        "the policies decide alone again"
    )
