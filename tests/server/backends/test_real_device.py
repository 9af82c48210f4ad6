"""Devices that torch finds, in a worker."""

from collections.abc import Iterator

import psutil
import pytest

from policies.types import SpecError
from server.backends import real_device
from server.backends.real_device import find_device
from server.backends.worker_device import WorkerDevice
from server.models.sources import source_of
from server.workers import worker


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver of a GPU, so that torch is asked."""
    monkeypatch.setattr(real_device, "_DRIVERS", ("/",))
    real_device._find.cache_clear()
    yield
    real_device._find.cache_clear()
    worker.end_idle()


@pytest.mark.slow
@pytest.mark.usefixtures("driver")
def test_with_a_driver_the_worker_that_has_asked_torch_serves_the_next_model_of_torch() -> None:
    with pytest.raises(SpecError, match=r"no CUDA device 4096 among the .* that torch .* finds.*; give cpu or auto"):
        find_device("cuda:4096")
    found = find_device("auto")
    assert found.name
    (idle,) = worker._idle
    served, made = source_of("squeezenet1_1").load("m", "random", 1, 1)
    device = WorkerDevice("m", made, "cpu")
    assert (device.facts()["pid"], served.name, worker._idle) == (idle.pid, "m", [])
    device.end()


@pytest.mark.slow
@pytest.mark.usefixtures("driver")
def test_a_worker_that_no_model_needs_is_ended() -> None:
    find_device("auto")
    (idle,) = worker._idle
    process = psutil.Process(idle.pid)  # before another thread has waited for its end
    worker.end_idle()
    process.wait(10)
    assert not process.is_running()
