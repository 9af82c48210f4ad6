from collections.abc import Callable
from ctypes import c_uint
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from server.energy.nvml import (
    GPU_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    NvmlError,
    PynvmlBoard,
    find_handle,
    foreign_processes,
    read_driver,
)
from server.energy.nvml_meters import CounterMeter, PowerMeter, nvml_meter, update_period
from tests.support.recorded_board import RecordedBoard, VirtualTime

TICK = 0.1  # s, of the recordings


def metered(name: str) -> tuple[CounterMeter | PowerMeter, VirtualTime]:
    time = VirtualTime()
    followed: list[PowerMeter] = []
    meter = nvml_meter(RecordedBoard(name, time), time, time.sleep, followed.append)
    assert followed == ([meter] if isinstance(meter, PowerMeter) else []), "only power has to be sampled"
    return meter, time


def readings(meter: CounterMeter | PowerMeter, time: VirtualTime, until: float, step: float) -> list[float | None]:
    found = []
    while time.now < until:
        time.sleep(step)
        found.append(meter.read())
    return found


def sampled(name: str) -> tuple[PowerMeter, VirtualTime, Callable[[float], bool]]:
    """A power meter without its thread, and a wait that ends when the recording does, at 3 s."""
    time = VirtualTime()

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return time.now > 3.0

    return PowerMeter(RecordedBoard(name, time), time, "test"), time, wait


def test_the_update_period_of_the_counter_is_measured() -> None:
    time = VirtualTime()
    # polled every ms: the first and the last update are seen up to 1 ms late, with three periods between them
    assert update_period(RecordedBoard("steps", time), time, time.sleep) == pytest.approx(TICK, abs=0.001)


def test_the_counter_is_preferred_and_counts_from_the_creation_of_the_meter() -> None:
    meter, time = metered("steps")
    assert isinstance(meter, CounterMeter)
    assert (meter.source, meter.scope) == ("nvml", "board")
    assert meter.resolution == pytest.approx(TICK, abs=0.001)
    assert meter.read() == 0.0
    start, time.now = time.now, 1.95
    assert meter.read() == pytest.approx(100.0 * (1.9 - start), abs=0.2)
    time.now = 4.0
    assert meter.read() == pytest.approx(100.0 * (2.0 - start) + 400.0 * 2.0, abs=0.2)


def test_a_counter_reset_neither_decreases_the_energy_nor_adds_any() -> None:
    meter, time = metered("reset")
    start = time.now
    found = [joules for joules in readings(meter, time, 4.0, 0.05) if joules is not None]
    assert found == sorted(found)
    consumed = 250.0 * (4.0 - start)
    assert consumed - 3 * 250.0 * TICK < found[-1] <= consumed


def test_a_lost_gpu_reads_none_until_it_is_back_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    meter, time = metered("lost")
    found = readings(meter, time, 3.9, 0.1)
    assert found.count(None) == 10
    assert "off the bus" in caplog.text
    assert len(caplog.records) == 1
    kept = [joules for joules in found if joules is not None]
    assert kept == sorted(kept)
    assert kept[-1] == pytest.approx(200.0 * (3.9 - 0.4), abs=2 * 200.0 * TICK)


def test_without_a_counter_the_power_is_integrated_and_the_meter_has_the_reason() -> None:
    meter, _ = metered("no-counter")
    assert isinstance(meter, PowerMeter)
    assert (meter.source, meter.resolution) == ("nvml", 0.05)
    assert "20 Hz" in meter.about
    assert "does not offer" in meter.about


def test_the_integral_of_a_ramp_is_its_area() -> None:
    meter, time, wait = sampled("no-counter")
    meter.sample_periodically(wait)
    # 100 W + 100 W/s * t over 3 s; a row is valid for 0.1 s, so the power is up to 0.1 s old: 10 W
    assert meter.read() == pytest.approx(100.0 * time.now + 50.0 * time.now**2, abs=10.0 * time.now)


def test_energy_is_left_out_while_the_power_cannot_be_read() -> None:
    meter, time, wait = sampled("power-lost")
    meter.sample_periodically(wait)
    time.now = 3.9
    assert meter.read() == pytest.approx(200.0 * (1.95 + 0.9), abs=200.0 * 0.1)


def test_a_constant_counter_is_not_used() -> None:
    meter, _ = metered("constant-counter")
    assert isinstance(meter, PowerMeter)
    assert "was constant for 2 s" in meter.about


def test_without_permission_there_is_no_meter_and_the_error_has_both_reasons() -> None:
    with pytest.raises(OSError, match=r"counter: no permission.*power: no permission"):
        metered("no-permission")


def test_a_divided_gpu_is_refused() -> None:
    time = VirtualTime()
    with pytest.raises(OSError, match="MIG is on"):
        nvml_meter(RecordedBoard("steps", time, mig=True), time, time.sleep)


def test_foreign_processes_are_all_but_this_one() -> None:
    board = RecordedBoard("steps", VirtualTime(), processes=(7, 4242, 99))
    assert foreign_processes(board, own=4242) == (7, 99)
    assert foreign_processes(RecordedBoard("steps", VirtualTime(), processes=(5,)), own=5) == ()


def test_every_error_code_of_the_library_has_a_message_of_one_line() -> None:
    named = {name: code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert (named["NVML_ERROR_NOT_SUPPORTED"], named["NVML_ERROR_NO_PERMISSION"]) == (NOT_SUPPORTED, NO_PERMISSION)
    assert named["NVML_ERROR_GPU_IS_LOST"] == GPU_LOST
    for code in (*named.values(), 12345):
        assert str(NvmlError(code))
        assert "\n" not in str(NvmlError(code))
    assert "12345" in str(NvmlError(12345))


@dataclass
class Library:
    """A fake of the module pynvml.

    Attributes:
        answers: return value of each function; an int is an error code to raise instead.
        looked_up: the UUIDs that were looked up.
    """

    answers: dict[str, Any]
    looked_up: list[str] = field(default_factory=list)
    NVMLError = pynvml.NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - the library's name
        self.looked_up.append(uuid)
        if uuid not in self.answers["known"]:
            raise pynvml.NVMLError(self.answers["otherwise"])
        return uuid

    def __getattr__(self, function: str) -> Any:
        def call(*_: object) -> Any:
            answer = self.answers[function]
            if isinstance(answer, int):
                raise pynvml.NVMLError(answer)
            return answer

        return call


@pytest.mark.parametrize("given", ["GPU-ab12-cd", "ab12-cd", " gpu-AB12-CD\n", "GPU-GPU-ab12-cd"])
def test_a_gpu_is_found_by_its_uuid_with_or_without_the_prefix(given: str) -> None:
    assert find_handle(Library({"known": {"GPU-ab12-cd"}}), given) == "GPU-ab12-cd"


def test_an_instance_is_found_too_so_that_it_can_be_refused() -> None:
    library = Library({"known": {"MIG-ab12"}, "otherwise": 2})
    assert find_handle(library, "MIG-ab12") == "MIG-ab12"
    assert library.looked_up == ["GPU-ab12", "MIG-ab12"]


@pytest.mark.parametrize(("otherwise", "says"), [(6, "no such GPU"), (9, "driver is not loaded")])
def test_the_error_for_an_unknown_uuid_has_the_reason(otherwise: int, says: str) -> None:
    with pytest.raises(NvmlError, match=says):
        find_handle(Library({"known": (), "otherwise": otherwise}), "ab12")


def power_field(code: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=123_456))]


def test_readings_are_in_the_units_of_the_library() -> None:
    answers = {
        "nvmlDeviceGetTotalEnergyConsumption": "5000",  # an int would be an error
        "nvmlDeviceGetFieldValues": power_field(0),
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7), SimpleNamespace(pid=8)],
    }
    board = PynvmlBoard(Library(answers), "handle")
    assert (board.energy(), board.power(), board.processes()) == (5000, 123_456, [7, 8])


@pytest.mark.parametrize(
    ("instance", "mode", "expected"),
    [
        (c_uint(0), [0, 1], False),  # pending only after a reset
        (c_uint(0), [1, 1], True),
        (c_uint(1), [0, 0], True),
        (c_uint(0), NOT_SUPPORTED, False),
    ],
)
def test_mig_is_the_mode_that_is_on_or_being_an_instance(instance: c_uint, mode: Any, expected: bool) -> None:
    library = Library({"nvmlDeviceIsMigDeviceHandle": instance, "nvmlDeviceGetMigMode": mode})
    assert PynvmlBoard(library, "handle").mig() is expected


def test_errors_of_the_library_and_of_a_field_are_converted() -> None:
    library = Library({"nvmlDeviceGetTotalEnergyConsumption": 4, "nvmlDeviceGetFieldValues": power_field(3)})
    board = PynvmlBoard(library, "handle")
    with pytest.raises(NvmlError, match="permission"):
        board.energy()
    with pytest.raises(NvmlError, match="does not offer"):
        board.power()


def test_the_driver_is_read_with_the_names_of_its_gpus() -> None:
    nvml = SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlInit=lambda: None,
        nvmlSystemGetCudaDriverVersion=lambda: 12040,
        nvmlSystemGetDriverVersion=lambda: "550.54.15",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"gpu {handle}",
    )
    found = read_driver(nvml)
    assert (found.version, found.cuda, found.gpus) == ("550.54.15", "12.4", ("gpu 0", "gpu 1"))


def test_without_a_driver_reading_it_fails_with_nvmls_message() -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    with pytest.raises(NvmlError, match="libnvidia-ml"):
        read_driver(SimpleNamespace(NVMLError=pynvml.NVMLError, nvmlInit=fail))
