"""The real devices of this machine, found without torch in this process: a worker imports it where that is needed."""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from policies.cpus import available_cpus
from policies.types import SpecError
from server.energy.meters import EnergyMeter, meter_for
from server.models.model import ServedModel
from server.workers.worker import find_in_worker

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Optimise = Literal["auto", "eager", "none"]
# of NVIDIA's driver, of a GPU in WSL, of AMD's driver, and of NVIDIA's Jetson
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvmap")


@dataclass(frozen=True)
class RealDevice:
    """A device of this machine.

    Attributes:
        place: torch's name of it, "cpu" or "cuda:N".
        name: of the processor or GPU.
        uuid: of the GPU or MIG instance; empty for the CPU.
    """

    place: str
    name: str
    uuid: str = ""

    @property
    def is_cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.place != "cpu"


def find_device(spec: str) -> RealDevice:
    """The device of a spec, "auto", "cpu", "cuda" or "cuda:N"; "auto" is the CPU without a CUDA device.

    Raises:
        SpecError: the spec is invalid, or there is no such CUDA device.
    """
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", spec) is None:
        raise SpecError(f"no device {spec!r}; give auto, cpu, cuda:N or emulated:PROFILE")
    return _find(spec)


@cache
def _find(spec: str) -> RealDevice:
    has_driver = any(map(os.path.exists, _DRIVERS))
    if spec == "cpu" or (spec == "auto" and not has_driver):
        return RealDevice("cpu", cpu_name())
    if not has_driver:
        index = int(spec.partition(":")[2] or 0)
        raise SpecError(f"no CUDA device {index}: this machine has no driver of a GPU; give cpu or auto")
    found: RealDevice = find_in_worker(spec)
    return found


def cpu_name() -> str:
    """The model name in /proc/cpuinfo, or "cpu"."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", info.read_text() if info.exists() else "", re.MULTILINE)
    return found[1] if found else "cpu"


def cpu_threads() -> int:
    """Threads of a model until they are chosen; one processor is left to the event loop and to decoding."""
    return max(1, available_cpus() - 1)


def device_settings(
    device: RealDevice,
    precision: Precision = "auto",
    stages: int | None = None,
    optimise: Optimise = "auto",
    threads: int | None = None,
) -> str:
    """Settings of the device that change service times, for a profile's note and its key in the cache."""
    used = f"{available_cpus()} processors" if threads is None else f"{threads} threads"
    threads_text = "" if device.is_cuda else f", {used}"
    split = "" if stages is None else f", {stages} stages"
    optimised = f", optimise {optimise}" if device.is_cuda else ""
    return f"{resolve_precision(precision, device.is_cuda)}{threads_text}{split}{optimised}"


def resolve_precision(precision: Precision, is_cuda: bool) -> Precision:
    """The precision; for "auto" fp16 on CUDA, which is as fast as bf16 with an eighth of its error, else fp32."""
    if precision != "auto":
        return precision
    return "fp16" if is_cuda else "fp32"


def autotunes(device: RealDevice, model: ServedModel) -> bool:
    """Whether the first batch of each size is slow because cuDNN then searches for the fastest convolutions.

    This requires samples of one shape, with which batches of one size are always the same computation.
    """
    return device.is_cuda and model.signature.has_fixed_shapes


def open_meter(device: str) -> EnergyMeter:
    """The best energy meter of a device as `find_device` takes it, or one of the machine; raises as `find_device`."""
    if not device.startswith(("auto", "cuda")):
        return meter_for(device)
    found = find_device(device)
    return meter_for(found.place, found.uuid)
