"""The state of a device before it is measured: recorded in the profile's note, warned about, never changed."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from policies.cpus import available_cpus
from server.energy.nvml import NvmlError, PynvmlBoard, find_handle, open_board

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that mean more than a GPU at rest.
_HELD_DOWN: Mapping[int, str] = {
    0x2: "application clocks",
    0x4: "the power cap",
    0x8: "a hardware slowdown",
    0x10: "sync boost",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power brake",
}
_BUSY = 0.25  # of the cores: a load average above it before anything runs is somebody else's


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found.

    Attributes:
        facts: for the profile's note, those that are warned about too.
        warnings: what may spoil the numbers; a line each.
    """

    facts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """One clause of the note."""
        return f"found before: {', '.join(self.facts)}"


class Gpu(Protocol):
    """One GPU's state. Every call may raise NvmlError."""

    def driver(self) -> str:
        """Its version."""
        ...

    def temperature(self) -> int:
        """Degrees Celsius."""
        ...

    def clocks(self) -> tuple[int, int]:
        """Of the multiprocessors and of the memory, MHz."""
        ...

    def held_down(self) -> int:
        """What keeps the clocks down just now: NVML's bits."""
        ...

    def power_limits(self) -> tuple[int, int]:
        """In force and by default, mW."""
        ...

    def mig(self) -> bool:
        """Whether it is divided into instances."""
        ...

    def processes(self) -> list[int]:
        """The ids of the processes that compute on it."""
        ...


class Cpu(Protocol):
    """The machine's state."""

    def governors(self) -> frozenset[str]:
        """What chooses the cores' clocks; empty where the system does not tell."""
        ...

    def load_average(self) -> float:
        """Threads that ran or wanted to, mean of the last minute."""
        ...

    def cores(self) -> int:
        """That this process may use."""
        ...


def preflight(device: str) -> Findings:
    """The state of a device, "cpu" or "cuda:N", now."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return inspect_cpu(SystemCpu())
    try:
        return inspect_gpu(open_gpu(int(index or 0)))
    except OSError as error:
        return Findings((f"nothing by NVML ({error})",))


def inspect_cpu(cpu: Cpu) -> Findings:
    """Clock governor and load."""
    governors, load, cores = sorted(cpu.governors()), cpu.load_average(), cpu.cores()
    warnings = []
    if set(governors) - {"performance"}:
        warnings.append(f"the clock governor is {' and '.join(governors)}: service times depend on what ran before")
    if load > _BUSY * cores:
        warnings.append(f"a load average of {load:.2f} on {cores} cores: something else is running")
    facts = f"governor {' and '.join(governors) or 'unknown'}", f"load average {load:.2f} on {cores} cores"
    return Findings(facts, tuple(warnings))


def inspect_gpu(gpu: Gpu, own: int | None = None) -> Findings:
    """Driver, temperature, clocks, what holds them down, power limit, division, and who else computes on it.

    Args:
        gpu: what is asked.
        own: this process's id.
    """
    asked = (
        _ask("driver", lambda: Findings((f"driver {gpu.driver()}",))),
        _ask("temperature", lambda: Findings((f"{gpu.temperature()} °C",))),
        _ask("clocks", lambda: _clocks(gpu.clocks(), gpu.held_down())),
        _ask("power limit", lambda: _power_limits(*gpu.power_limits())),
        _ask("MIG", lambda: _mig(gpu.mig())),
        _ask("processes", lambda: _processes(set(gpu.processes()), own or os.getpid())),
    )
    return Findings(
        tuple(fact for found in asked for fact in found.facts),
        tuple(warning for found in asked for warning in found.warnings),
    )


def _ask(what: str, question: Callable[[], Findings]) -> Findings:
    try:
        return question()
    except NvmlError as error:
        return Findings((f"{what} unknown ({error})",))


def _clocks(clocks: tuple[int, int], bits: int) -> Findings:
    fact = f"clocks {clocks[0]} MHz and {clocks[1]} MHz (memory)"
    reasons = " and ".join(reason for bit, reason in _HELD_DOWN.items() if bits & bit)
    if not reasons:
        return Findings((fact,))
    return Findings((f"{fact}, held down by {reasons}",), (f"the GPU's clocks are held down by {reasons}",))


def _power_limits(limit: int, default: int) -> Findings:
    fact = f"power limit {limit / 1e3:g} W of {default / 1e3:g} W"
    return Findings((fact,), (f"the GPU's {fact}: it is slower than others of its kind",) if limit < default else ())


def _mig(on: bool) -> Findings:
    return Findings(("MIG on" if on else "MIG off",), ("MIG is on: others may use the same GPU",) if on else ())


def _processes(found: set[int], own: int) -> Findings:
    """In a container NVML gives this process by its number outside, so that one stranger is no stranger."""
    others = sorted(found - {own})
    if not others or (own not in found and len(others) == 1):
        return Findings(("nobody else on the GPU",))
    but_one = "" if own in found else ", one of which may be this one"
    fact = f"processes {', '.join(map(str, others))} on the GPU{but_one}"
    return Findings((fact,), (f"{fact}: their time and energy are measured too",))


class SystemCpu:
    """A Cpu as Linux shows it; elsewhere little is known."""

    def __init__(self, root: Path = Path("/sys/devices/system/cpu")) -> None:
        """`root` holds a folder for each core."""
        self._root = root

    def governors(self) -> frozenset[str]:
        """Those of all cores."""
        files = self._root.glob("cpu[0-9]*/cpufreq/scaling_governor")
        return frozenset(text for file in files if (text := _text(file)))

    def load_average(self) -> float:
        """Mean of the last minute; 0 where there is none."""
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0

    def cores(self) -> int:
        """Return how many this process may use."""
        return available_cpus()


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def open_gpu(index: int) -> Gpu:
    """The GPU that torch calls cuda:`index`.

    Raises:
        NvmlError: there is no driver, or no such GPU.
    """
    import pynvml  # pieces of a driver, which only machines with a GPU have
    import torch

    open_board(index)  # starts NVML, and says what is wrong
    return PynvmlGpu(pynvml, find_handle(pynvml, str(torch.cuda.get_device_properties(index).uuid)))


class PynvmlGpu:
    """A Gpu by nvidia-ml-py."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml` is the module pynvml, initialised; `handle` its name for the GPU."""
        self._nvml = nvml
        self._handle = handle
        self._board = PynvmlBoard(nvml, handle)

    def driver(self) -> str:
        """Its version."""
        return str(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def temperature(self) -> int:
        """Degrees Celsius."""
        return int(self._ask(self._nvml.nvmlDeviceGetTemperature, self._handle, self._nvml.NVML_TEMPERATURE_GPU))

    def clocks(self) -> tuple[int, int]:
        """Of the multiprocessors and of the memory, MHz."""
        kinds = self._nvml.NVML_CLOCK_SM, self._nvml.NVML_CLOCK_MEM
        sm, memory = (int(self._ask(self._nvml.nvmlDeviceGetClockInfo, self._handle, kind)) for kind in kinds)
        return sm, memory

    def held_down(self) -> int:
        """What keeps the clocks down just now: NVML's bits."""
        return int(self._ask(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, self._handle))

    def power_limits(self) -> tuple[int, int]:
        """In force and by default, mW."""
        names = "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit"
        limit, default = (int(self._ask(getattr(self._nvml, name), self._handle)) for name in names)
        return limit, default

    def mig(self) -> bool:
        """Whether it is divided into instances."""
        return self._board.mig()

    def processes(self) -> list[int]:
        """The ids of the processes that compute on it."""
        return self._board.processes()

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            raise NvmlError(error.value) from error
