"""Tests of inspecting a device before a measurement; no GPU is needed."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from profiler.gpu import PynvmlGpu
from profiler.preflight import Findings, SystemCpu, inspect_cpu, inspect_gpu, preflight
from server.backends.real_device import find_device
from server.energy.nvml import GPU_LOST, NvmlError

OWN = 4242


@dataclass(frozen=True)
class FakeGpu:
    """An idle H200 on which only this process runs."""

    bits: int = 1  # idle
    limit: int = 700_000
    divided: bool = False
    pids: tuple[int, ...] = (OWN,)
    lost: bool = False

    def driver(self) -> str:
        return "570.1"

    def temperature(self) -> int:
        if self.lost:
            raise NvmlError(GPU_LOST)
        return 31

    def clocks(self) -> tuple[int, int]:
        return 345, 3201

    def throttle_reasons(self) -> int:
        return self.bits

    def power_limits(self) -> tuple[int, int]:
        return self.limit, 700_000

    def mig(self) -> bool:
        return self.divided

    def processes(self) -> list[int]:
        return list(self.pids)


@dataclass(frozen=True)
class FakeCpu:
    governor: frozenset[str] = frozenset({"performance"})
    load: float = 0.1
    count: int = 8

    def governors(self) -> frozenset[str]:
        return self.governor

    def load_average(self) -> float:
        return self.load

    def cores(self) -> int:
        return self.count


def test_an_idle_gpu_gives_no_warning() -> None:
    found = inspect_gpu(FakeGpu(), OWN)
    assert found.warnings == ()
    assert found.note == (
        "before the measurement: driver 570.1, 31 °C, clocks 345 MHz and 3201 MHz (memory), "
        "power limit 700 W of 700 W, MIG off, no other process on the GPU"
    )


@pytest.mark.parametrize(
    ("gpu", "warning"),
    [
        (FakeGpu(bits=0x1 | 0x4 | 0x20), "clocks are throttled by the power cap and heat, by the driver"),
        (FakeGpu(limit=300_000), "power limit 300 W of 700 W"),
        (FakeGpu(divided=True), "MIG is on"),
        (FakeGpu(pids=(OWN, 7, 5)), "processes 5, 7 on the GPU: their"),
        (FakeGpu(pids=(7, 5)), "processes 5, 7 on the GPU, one of which may be this one: their"),
    ],
)
def test_a_condition_that_distorts_the_measurement_is_a_warning_of_one_line(gpu: FakeGpu, warning: str) -> None:
    (line,) = inspect_gpu(gpu, OWN).warnings
    assert warning in line
    assert "\n" not in line


def test_a_single_unknown_process_id_is_this_process_in_a_container() -> None:
    assert inspect_gpu(FakeGpu(pids=(7,)), OWN).warnings == ()


def test_a_value_that_nvml_cannot_read_is_recorded_as_unknown() -> None:
    found = inspect_gpu(FakeGpu(lost=True), OWN)
    assert "temperature unknown (the GPU has fallen off the bus" in found.facts[1]
    assert found.facts[0] == "driver 570.1"
    assert found.facts[-1] == "no other process on the GPU"


def test_an_idle_cpu_gives_no_warning() -> None:
    facts = "governor performance", "load average 0.10 on 8 cores"
    assert inspect_cpu(FakeCpu()) == Findings(facts)
    assert inspect_cpu(FakeCpu(frozenset())) == Findings(("governor unknown", facts[1]))


@pytest.mark.parametrize(
    ("cpu", "warning"),
    [
        (FakeCpu(frozenset({"schedutil", "powersave"})), "governor is powersave and schedutil"),
        (FakeCpu(load=2.5), "load average of 2.50 on 8 cores"),
    ],
)
def test_a_variable_clock_or_a_high_load_average_is_a_warning(cpu: FakeCpu, warning: str) -> None:
    (line,) = inspect_cpu(cpu).warnings
    assert warning in line


@pytest.mark.parametrize(
    ("load", "cores", "warned"), [(0.6, 2, False), (1.1, 2, True), (3.0, 16, False), (4.1, 16, True)]
)
def test_less_than_one_busy_process_is_no_high_load(load: float, cores: int, warned: bool) -> None:
    assert bool(inspect_cpu(FakeCpu(load=load, count=cores)).warnings) == warned


def test_the_governors_are_read_from_sysfs(tmp_path: Path) -> None:
    for core, governor in enumerate(("performance\n", "powersave\n", "")):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(governor)
    (tmp_path / "cpu3" / "cpufreq" / "scaling_governor").mkdir(parents=True)  # cannot be read
    cpu = SystemCpu(tmp_path)
    assert cpu.governors() == {"performance", "powersave"}
    assert cpu.cores() >= 1
    assert cpu.load_average() >= 0.0
    assert SystemCpu(tmp_path / "nothing").governors() == frozenset()


def test_this_machine_can_be_inspected() -> None:
    assert any("load average" in fact for fact in preflight(find_device("cpu")).facts)


def failing(*arguments: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_nvml_functions_are_called_by_name_and_their_errors_are_converted() -> None:
    clocks = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}
    calls = {
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetTemperature": lambda handle, sensor: {pynvml.NVML_TEMPERATURE_GPU: 40}[sensor],
        "nvmlDeviceGetClockInfo": lambda handle, kind: clocks[kind],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 4,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 600_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": failing,
        "nvmlDeviceIsMigDeviceHandle": failing,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=OWN)],
    }
    assert all(hasattr(pynvml, name) for name in calls), "the fake has only names that NVML has"
    constants = {name: getattr(pynvml, name) for name in ("NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM", "NVML_CLOCK_MEM")}
    found = inspect_gpu(PynvmlGpu(SimpleNamespace(NVMLError=pynvml.NVMLError, **constants, **calls), "handle"), OWN)
    assert found.facts[:3] == (
        "driver 570.1",
        "40 °C",
        "clocks 1980 MHz and 3201 MHz (memory), throttled by the power cap",
    )
    assert found.facts[3].startswith("power limit unknown (this GPU or its driver does not offer it")
    assert found.facts[4:] == ("MIG off", "no other process on the GPU")
