import asyncio
import threading
from math import inf
from typing import get_args

import pytest
import torch

from policies.profile import EnergySource
from server.energy.meters import CountingMeter, EnergyMeter, LastReading, NoMeter, meter_for
from server.energy.nvml_meters import CounterMeter, PowerMeter
from server.energy.rapl import RaplMeter
from tests.support.recorded_board import RecordedBoard, VirtualTime

BOARD = RecordedBoard("steps", VirtualTime())
METERS: list[EnergyMeter] = [
    CountingMeter(),
    NoMeter(),
    CounterMeter(BOARD, 0, 0.1),
    PowerMeter(BOARD, VirtualTime(), "a test"),
    RaplMeter([], []),
]


@pytest.mark.parametrize("meter", METERS, ids=lambda meter: type(meter).__name__)
def test_every_meter_has_a_source_a_resolution_a_scope_and_a_description(meter: EnergyMeter) -> None:
    # a profile measured on an emulated device has modelled energies
    source = "modelled" if meter.source == "emulated" else meter.source
    assert source in get_args(EnergySource)
    assert meter.resolution >= 0.0
    assert meter.scope in {"board", "package", "batches", "nothing"}
    assert meter.about


def test_the_emulated_meter_counts_batches() -> None:
    meter = CountingMeter()
    meter.add(0.5)
    meter.add(0.25)
    assert meter.read() == 0.75


def test_without_a_sensor_the_energy_is_unknown() -> None:
    meter = NoMeter("not tested")
    assert (meter.read(), meter.source, meter.resolution, meter.about) == (None, "none", inf, "not tested")


class HangingMeter(CountingMeter):
    """A sensor whose reading blocks until `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.reads = 0

    def read(self) -> float | None:
        self.reads += 1
        self.answers.wait()
        return super().read()


def test_a_hanging_sensor_does_not_block_the_event_loop_and_keeps_its_last_value() -> None:
    meter = HangingMeter()

    async def scrapes() -> list[float | None]:
        seen, reading = [], LastReading(meter)
        for joules, hangs in ((1.0, False), (1.0, True), (1.0, True), (0.0, False)):
            meter.add(joules)
            (meter.answers.clear if hangs else meter.answers.set)()
            await reading.refresh(0.01 if hangs else 60.0)
            seen.append(reading.joules)
        return seen

    assert asyncio.run(scrapes()) == [1.0, 1.0, 1.0, 3.0]
    assert meter.reads == 2, "one reading at a time"


def test_a_failing_sensor_is_logged_and_a_reading_may_outlive_its_loop(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(CountingMeter):
        def read(self) -> float | None:
            raise RuntimeError("no sensor any more")

    broken, hanging = LastReading(Broken()), LastReading(meter := HangingMeter())
    asyncio.run(broken.refresh())
    before = threading.enumerate()  # the thread of the failed reading, or of another test, may still be ending
    asyncio.run(hanging.refresh(0.0))
    [reading] = (thread for thread in threading.enumerate() if thread.name == "energy" and thread not in before)
    assert reading.daemon, "the process may exit before it completes"
    meter.answers.set()
    reading.join()
    assert (broken.joules, hanging.joules) == (None, 0.0)
    assert "no sensor any more" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_has_no_meter_and_the_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    meter = meter_for("cuda:0")
    assert meter.source == "none"
    assert meter.about in caplog.text
    assert "cuda:0 is not measured" in caplog.text


def test_the_cpu_has_rapl_counters_or_a_reason() -> None:
    meter = meter_for("cpu")
    assert (meter.source, meter.read() is None) in {("rapl", False), ("none", True)}
    assert "RAPL" in meter.about


@pytest.mark.parametrize("device", ["tpu", "", "emulated:googlenet-tesla-p4"])
def test_a_device_without_supported_sensors_has_no_meter(device: str) -> None:
    assert repr(device) in meter_for(device).about
