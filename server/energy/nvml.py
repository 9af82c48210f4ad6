"""NVIDIA's management library (NVML): the calls that energy metering needs, and messages for its errors.

The meters in server/energy/nvml_meters.py use only the protocol `Board`, which tests implement with recorded readings.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NOT_SUPPORTED, NO_PERMISSION, GPU_LOST = 3, 4, 15
_INVALID_ARGUMENT, _NOT_FOUND = 2, 6
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; nvmlDeviceGetPowerUsage is a 1 s average on Ampere and newer
_SCOPE_GPU = 0

_MESSAGES: Mapping[int, str] = {
    1: "NVML is not initialised, or the driver was reloaded; restart this process",
    _INVALID_ARGUMENT: "NVML refused the call's arguments",
    NOT_SUPPORTED: "this GPU or its driver does not offer it",
    NO_PERMISSION: "no permission to read it; run as a user that may, or have the administrator allow it",
    _NOT_FOUND: "no such GPU; see nvidia-smi -L and CUDA_VISIBLE_DEVICES",
    9: "the NVIDIA driver is not loaded; load it, or use the CPU",
    10: "the driver did not answer in time",
    12: "no NVML library (libnvidia-ml.so.1); install the driver, or give the container the capability 'utility'",
    13: "the driver is too old for this call; update it",
    GPU_LOST: "the GPU has fallen off the bus; restart the machine",
    16: "the GPU needs a reset; restart the machine",
    17: "the operating system refused the call",
    18: "the driver and the NVML library differ in version; restart the machine, or rebuild the container",
    20: "NVML ran out of memory",
    21: "there is no data yet",
    27: "the GPU is not ready",
    28: "there is no GPU",
    999: "NVML failed for an unknown reason",
}


class NvmlError(OSError):
    """An NVML call failed; the message is one line.

    Attributes:
        code: NVML's error code (nvmlReturn_t).
    """

    def __init__(self, code: int) -> None:
        super().__init__(_MESSAGES.get(code, f"NVML error {code}"))
        self.code = code


class Board(Protocol):
    """One physical GPU. Every call may raise NvmlError."""

    def energy(self) -> int:
        """Energy since the driver was loaded, mJ; most GPUs update this counter every 100 ms."""
        ...

    def power(self) -> int:
        """The latest power sample, mW."""
        ...

    def mig(self) -> bool:
        """Whether the GPU is divided into MIG instances, for which NVML has no energy."""
        ...

    def processes(self) -> list[int]:
        """The ids of the compute processes on it."""
        ...


def foreign_processes(board: Board, own: int | None = None) -> tuple[int, ...]:
    """Compute processes on the GPU other than `own` (default: this one) and its workers; none if NVML lists none.

    In a container NVML may list this process by its id on the host, which then counts as another process.
    """
    try:
        return tuple(sorted(pid for pid in set(board.processes()) if not is_own(pid, own or os.getpid())))
    except NvmlError:
        return ()


def is_own(pid: int, own: int) -> bool:
    """Whether a process is `own`, or was started by it."""
    if pid == own:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[1]) == own


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver.

    Attributes:
        version: such as "580.65.06".
        cuda: the newest CUDA version that it supports, such as "13.0".
        gpus: the names of its GPUs.
    """

    version: str
    cuda: str
    gpus: tuple[str, ...]


def read_driver(nvml: Any = None) -> Driver:
    """NVIDIA's driver on this machine, whatever torch can use of it; `nvml` is the module pynvml if not given.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        NvmlError: there is no driver.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    with _converted_errors(nvml):
        nvml.nvmlInit()
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
        handles = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount()))
        gpus = tuple(str(nvml.nvmlDeviceGetName(handle)) for handle in handles)
        return Driver(str(nvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}", gpus)


def open_board(uuid: str) -> Board:
    """The GPU with this UUID: NVML's numbers are others than those of torch, since it ignores CUDA_VISIBLE_DEVICES.

    Raises:
        NvmlError: there is no driver, or no such GPU.
    """
    import pynvml

    with _converted_errors(pynvml):
        pynvml.nvmlInit()
        return PynvmlBoard(pynvml, find_handle(pynvml, uuid))


def find_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the GPU or MIG instance with this UUID.

    Args:
        nvml: the module pynvml, initialised.
        uuid: "GPU-..." as in nvidia-smi, or without the prefix as in torch.

    Raises:
        NvmlError: no GPU or instance has this UUID.
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
    """A Board read by nvidia-ml-py."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml` is the module pynvml, initialised; `handle` its handle of the GPU."""
        self._nvml = nvml
        self._handle = handle

    def energy(self) -> int:
        """Energy since the driver was loaded, mJ."""
        with _converted_errors(self._nvml):
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def power(self) -> int:
        """The latest power sample, mW."""
        with _converted_errors(self._nvml):
            (field,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(_POWER_INSTANT, _SCOPE_GPU)])
        if field.nvmlReturn != 0:  # the call succeeds even if its field does not
            raise NvmlError(field.nvmlReturn)
        return int(field.value.uiVal)

    def mig(self) -> bool:
        """Whether the GPU is divided into MIG instances, or is one."""
        try:
            with _converted_errors(self._nvml):
                instance = self._nvml.nvmlDeviceIsMigDeviceHandle(self._handle)
                # a c_uint object is always true
                return bool(instance.value) or bool(self._nvml.nvmlDeviceGetMigMode(self._handle)[0])
        except NvmlError as error:
            if error.code == NOT_SUPPORTED:  # no MIG on this GPU
                return False
            raise

    def processes(self) -> list[int]:
        """The ids of the compute processes on it."""
        with _converted_errors(self._nvml):
            return [process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)]


@contextmanager
def _converted_errors(nvml: Any) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        raise NvmlError(error.value) from error
