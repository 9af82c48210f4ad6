"""State of a device before a measurement: recorded in the profile's note and warned about, never changed."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from policies.cpus import available_cpus
from profiler.conditions import reasons_of
from profiler.gpu import Gpu, open_gpu
from server.backends.real_device import RealDevice
from server.energy.nvml import NvmlError, is_own

_BUSY, _ONE = 0.25, 1.0  # load averages above which others disturb a measurement: of each core, and at least in all


@dataclass(frozen=True, slots=True)
class Findings:
    """State of a device before a measurement.

    Attributes:
        facts: for the profile's note; they include what is warned about.
        warnings: conditions that may distort the measurement, one line each.
    """

    facts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Clause for the profile's note."""
        return f"before the measurement: {', '.join(self.facts)}"


NOTHING_FOUND = Findings()


class Cpu(Protocol):
    """State of the machine's CPU."""

    def governors(self) -> frozenset[str]:
        """Clock governors of the cores; empty where unknown."""
        ...

    def load_average(self) -> float:
        """Load average of the last minute."""
        ...

    def cores(self) -> int:
        """Number of cores that this process may use."""
        ...


def preflight(device: RealDevice) -> Findings:
    """Inspect a device."""
    if not device.is_cuda:
        return inspect_cpu(SystemCpu())
    try:
        return inspect_gpu(open_gpu(device.uuid))
    except OSError as error:
        return Findings((f"no data from NVML ({error})",))


def inspect_cpu(cpu: Cpu) -> Findings:
    """Inspect clock governor and load average."""
    governors, load, cores = sorted(cpu.governors()), cpu.load_average(), cpu.cores()
    warnings = []
    if set(governors) - {"performance"}:
        warnings.append(f"the clock governor is {' and '.join(governors)}: service times depend on recent load")
    if load > max(_ONE, _BUSY * cores):
        warnings.append(f"a load average of {load:.2f} on {cores} cores: other processes are or were running")
    facts = f"governor {' and '.join(governors) or 'unknown'}", f"load average {load:.2f} on {cores} cores"
    return Findings(facts, tuple(warnings))


def inspect_gpu(gpu: Gpu, own_pid: int | None = None) -> Findings:
    """Inspect driver, temperature, clocks and throttling, power limit, MIG, and other processes on the GPU.

    Args:
        gpu: the GPU to inspect.
        own_pid: id of this process; None reads it from the system.
    """
    parts = (
        _query("driver", lambda: Findings((f"driver {gpu.driver()}",))),
        _query("temperature", lambda: Findings((f"{gpu.temperature()} °C",))),
        _query("clocks", lambda: _clocks(gpu.clocks(), gpu.throttle_reasons())),
        _query("power limit", lambda: _power_limits(*gpu.power_limits())),
        _query("MIG", lambda: _mig(gpu.mig())),
        _query("processes", lambda: _processes(set(gpu.processes()), own_pid or os.getpid())),
    )
    return Findings(
        tuple(fact for part in parts for fact in part.facts),
        tuple(warning for part in parts for warning in part.warnings),
    )


def _query(name: str, inspect: Callable[[], Findings]) -> Findings:
    try:
        return inspect()
    except NvmlError as error:
        return Findings((f"{name} unknown ({error})",))


def _clocks(clocks: tuple[int, int], bits: int) -> Findings:
    fact = f"clocks {clocks[0]} MHz and {clocks[1]} MHz (memory)"
    reasons = reasons_of(bits)
    if not reasons:
        return Findings((fact,))
    return Findings((f"{fact}, throttled by {reasons}",), (f"the GPU's clocks are throttled by {reasons}",))


def _power_limits(limit: int, default: int) -> Findings:
    fact = f"power limit {limit / 1e3:g} W of {default / 1e3:g} W"
    return Findings((fact,), (f"the GPU's {fact}: it is slower than its model usually is",) if limit < default else ())


def _mig(on: bool) -> Findings:
    return Findings(
        ("MIG on" if on else "MIG off",), ("MIG is on: other instances may use the same GPU",) if on else ()
    )


def _processes(found: set[int], own_pid: int) -> Findings:
    """In a container NVML reports a worker of this process by its id on the host, so one unknown id can be that."""
    others = sorted(pid for pid in found if not is_own(pid, own_pid))
    is_known = len(others) < len(found)
    if not others or (not is_known and len(others) == 1):
        return Findings(("no other process on the GPU",))
    suffix = "" if is_known else ", one of which may be this one"
    fact = f"processes {', '.join(map(str, others))} on the GPU{suffix}"
    return Findings((fact,), (f"{fact}: their time and energy are measured too",))


class SystemCpu:
    """A Cpu read from Linux's sysfs; elsewhere the governors are unknown."""

    def __init__(self, root: Path = Path("/sys/devices/system/cpu")) -> None:
        """`root` has a folder for each core."""
        self._root = root

    def governors(self) -> frozenset[str]:
        """Clock governors of all cores."""
        files = self._root.glob("cpu[0-9]*/cpufreq/scaling_governor")
        return frozenset(text for file in files if (text := _text(file)))

    def load_average(self) -> float:
        """Load average of the last minute; 0 where the system has none."""
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0

    def cores(self) -> int:
        """Number of cores that this process may use."""
        return available_cpus()


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
