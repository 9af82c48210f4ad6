"""Clocks of a GPU and the reasons that lower them, read in every window of a measurement."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from profiler.gpu import Gpu, open_gpu
from server.backends.real_device import RealDevice
from server.energy.nvml import NvmlError

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h), without the one of an idle GPU.
THROTTLE_REASONS: Mapping[int, str] = {
    0x2: "application clocks",
    0x4: "the power cap",
    0x8: "a hardware slowdown",
    0x10: "sync boost",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power brake",
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """State of a GPU at one instant.

    Attributes:
        clock: of the multiprocessors, MHz.
        memory_clock: MHz.
        temperature: °C.
        throttle: NVML's bits of the reasons that lower the clocks.
    """

    clock: int
    memory_clock: int
    temperature: int
    throttle: int


def unknown_conditions() -> Conditions | None:
    """Conditions of a device that has none to read: None."""
    return None


def reasons_of(bits: int) -> str:
    """The reasons that lower the clocks, in words; empty without any."""
    return " and ".join(reason for bit, reason in THROTTLE_REASONS.items() if bits & bit)


def conditions_of(device: RealDevice) -> Callable[[], Conditions | None]:
    """The reader of a device's conditions."""
    if not device.is_cuda:
        return unknown_conditions
    try:
        gpu: Gpu = open_gpu(device.uuid)
    except (ImportError, OSError):
        return unknown_conditions

    def read() -> Conditions | None:
        try:
            return Conditions(*gpu.clocks(), gpu.temperature(), gpu.throttle_reasons())
        except NvmlError:
            return None

    return read


def summarise(seen: Sequence[Conditions]) -> str:
    """Clocks, temperature and throttling over the edges of all windows of a load, for a profile's note."""
    clocks = [each.clock for each in seen]
    temperatures = [each.temperature for each in seen]
    text = f"under load {_span(clocks)} MHz, {_span(temperatures)} °C"
    throttled = [each for each in seen if reasons_of(each.throttle)]
    if not throttled:
        return f"{text}, not throttled"
    bits = 0
    for each in throttled:
        bits |= each.throttle
    return f"{text}, throttled by {reasons_of(bits)} at {len(throttled)} of {len(seen)} readings"


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"
