"""The profile a server starts with: measured once, kept, found again."""

import asyncio
from pathlib import Path

import pytest

from profiler.cache import Key
from profiler.first import first_profile
from server.energy import NoMeter
from server.executor import Batch, Completion
from server.models import emulated_model

KEY = Key("net", "Some CPU", 4, "fp32")


class KnownExecutor:
    """Completes every batch at once and says that it took a second for each input."""

    name = "known"

    def __init__(self) -> None:
        self.batches = 0

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        self.batches += 1
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        done.set_result(Completion(batch.inputs, 0.0, float(len(batch.inputs))))
        return done


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_profile_is_measured_once_and_kept() -> None:
    executor, model = KnownExecutor(), emulated_model("net", 4)
    first = first_profile(executor, model, NoMeter(), KEY, tunes_by_size=False)
    ran = executor.batches
    assert ran > 0
    assert first.service_times == (1.0, 2.0, 3.0, 4.0)
    assert (first.model, first.device, first.energy_source) == ("net", "Some CPU", "none")
    assert "; fp32, torch " in first.note
    assert first_profile(executor, model, NoMeter(), KEY, tunes_by_size=False) == first
    assert executor.batches == ran
