"""NVIDIA's management library (NVML): the few calls about one GPU that metering needs, and what their errors mean.

The rules of metering (server/energy/nvml_meters.py) know `Board` only, so that recorded readings can play its part.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

NOT_SUPPORTED, NO_PERMISSION, GPU_LOST = 3, 4, 15
_INVALID_ARGUMENT, _NOT_FOUND = 2, 6
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; nvmlDeviceGetPowerUsage is a 1 s average on Ampere and newer
_SCOPE_GPU = 0

_MESSAGES: Mapping[int, str] = {
    1: "NVML is not initialised, or the driver was reloaded; restart this process",
    _INVALID_ARGUMENT: "NVML refused the call's arguments",
    NOT_SUPPORTED: "this GPU or its driver does not offer it",
    NO_PERMISSION: "no permission to read it; ask the machine's owner, or run with the rights that it wants",
    _NOT_FOUND: "NVML knows no such GPU; look at nvidia-smi -L and CUDA_VISIBLE_DEVICES",
    9: "the NVIDIA driver is not loaded; load it, or use the CPU",
    10: "the driver did not answer in time",
    12: "no NVML library (libnvidia-ml.so.1); install the driver, or give the container the capability 'utility'",
    13: "the driver is too old for this call; update it",
    GPU_LOST: "the GPU has fallen off the bus; the machine has to be restarted",
    16: "the GPU wants a reset",
    17: "the operating system refused the call",
    18: "driver and NVML library differ in version; restart the machine, or mend the container",
    20: "NVML ran out of memory",
    21: "there is no data yet",
    27: "the GPU is not ready",
    28: "no GPU is there",
    999: "NVML failed without saying why",
}


class NvmlError(OSError):
    """A call failed; the message is one line.

    Attributes:
        code: NVML's own number of the error (nvmlReturn_t).
    """

    def __init__(self, code: int) -> None:
        super().__init__(_MESSAGES.get(code, f"NVML error {code}"))
        self.code = code


class Board(Protocol):
    """One physical GPU with its memory. Every call may raise NvmlError."""

    def energy(self) -> int:
        """Energy since the driver was loaded, mJ: a counter that steps, every 100 ms on most."""
        ...

    def power(self) -> int:
        """The newest sample of the power, mW."""
        ...

    def mig(self) -> bool:
        """Whether it is divided into instances, whose energy nobody meters."""
        ...

    def processes(self) -> list[int]:
        """The ids of the processes that compute on it."""
        ...


def foreign_processes(board: Board, own: int | None = None) -> tuple[int, ...]:
    """Processes other than `own` (this one) on the GPU; none where it does not tell.

    In a container NVML may give this process by its number outside, as a stranger: something to warn about.
    """
    try:
        return tuple(sorted(set(board.processes()) - {own or os.getpid()}))
    except NvmlError:
        return ()


def open_board(index: int) -> Board:
    """The GPU that torch calls cuda:`index`, found by its UUID: CUDA_VISIBLE_DEVICES renumbers, NVML does not.

    Raises:
        NvmlError: there is no driver, or no such GPU.
    """
    import pynvml  # pieces of a driver, which only machines with a GPU have
    import torch

    with _as_our_errors(pynvml):
        pynvml.nvmlInit()
        return PynvmlBoard(pynvml, find_handle(pynvml, str(torch.cuda.get_device_properties(index).uuid)))


def find_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the GPU, or MIG instance, with this UUID, given with or without its prefix.

    Args:
        nvml: the module pynvml, initialised.
        uuid: "GPU-..." as nvidia-smi says, or bare as torch does.

    Raises:
        NvmlError: there is none.
    """
    bare = re.sub(r"^((GPU|MIG)-)+", "", uuid.strip(), flags=re.IGNORECASE).lower()
    for prefix in ("GPU-", "MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(prefix + bare)
        except nvml.NVMLError as error:
            if error.value not in {_INVALID_ARGUMENT, _NOT_FOUND}:
                raise NvmlError(error.value) from error
    raise NvmlError(_NOT_FOUND)


class PynvmlBoard:
    """A Board by nvidia-ml-py."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml` is the module pynvml, initialised; `handle` its name for the GPU."""
        self._nvml = nvml
        self._handle = handle

    def energy(self) -> int:
        """Energy since the driver was loaded, mJ."""
        with _as_our_errors(self._nvml):
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def power(self) -> int:
        """The newest sample of the power, mW."""
        with _as_our_errors(self._nvml):
            (field,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(_POWER_INSTANT, _SCOPE_GPU)])
        if field.nvmlReturn != 0:  # the call succeeds even if its field does not
            raise NvmlError(field.nvmlReturn)
        return int(field.value.uiVal)

    def mig(self) -> bool:
        """Whether it is divided, or is itself an instance."""
        try:
            with _as_our_errors(self._nvml):
                instance = self._nvml.nvmlDeviceIsMigDeviceHandle(self._handle)
                # a c_uint, which is true whatever it holds
                return bool(instance.value) or bool(self._nvml.nvmlDeviceGetMigMode(self._handle)[0])
        except NvmlError as error:
            if error.code == NOT_SUPPORTED:  # a GPU that cannot be divided
                return False
            raise

    def processes(self) -> list[int]:
        """The ids of the processes that compute on it."""
        with _as_our_errors(self._nvml):
            return [process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)]


@contextmanager
def _as_our_errors(nvml: Any) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        raise NvmlError(error.value) from error
