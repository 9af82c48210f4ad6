"""State of one GPU, read by NVML."""

from collections.abc import Callable
from typing import Any, Protocol

from server.energy.nvml import NvmlError, PynvmlBoard, find_handle, open_board


class Gpu(Protocol):
    """State of one GPU. Every call may raise NvmlError."""

    def driver(self) -> str:
        """Driver version."""
        ...

    def temperature(self) -> int:
        """Temperature, °C."""
        ...

    def clocks(self) -> tuple[int, int]:
        """Current clocks of the multiprocessors and of the memory, MHz."""
        ...

    def throttle_reasons(self) -> int:
        """NVML's bits of the reasons that lower the clocks now."""
        ...

    def power_limits(self) -> tuple[int, int]:
        """Enforced and default power limit, mW."""
        ...

    def mig(self) -> bool:
        """Whether MIG (division into instances) is on."""
        ...

    def processes(self) -> list[int]:
        """Ids of the processes that compute on it."""
        ...


def open_gpu(uuid: str) -> Gpu:
    """Open the GPU with this UUID.

    Raises:
        NvmlError: there is no driver, or no such GPU.
    """
    import pynvml  # needs NVIDIA's driver

    open_board(uuid)  # initialises NVML and reports errors
    return PynvmlGpu(pynvml, find_handle(pynvml, uuid))


class PynvmlGpu:
    """A Gpu read with nvidia-ml-py."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml` is the initialised module pynvml; `handle` is its handle of the GPU."""
        self._nvml = nvml
        self._handle = handle
        self._board = PynvmlBoard(nvml, handle)

    def driver(self) -> str:
        """Driver version."""
        return str(self._call(self._nvml.nvmlSystemGetDriverVersion))

    def temperature(self) -> int:
        """Temperature, °C."""
        return int(self._call(self._nvml.nvmlDeviceGetTemperature, self._handle, self._nvml.NVML_TEMPERATURE_GPU))

    def clocks(self) -> tuple[int, int]:
        """Current clocks of the multiprocessors and of the memory, MHz."""
        kinds = self._nvml.NVML_CLOCK_SM, self._nvml.NVML_CLOCK_MEM
        sm, memory = (int(self._call(self._nvml.nvmlDeviceGetClockInfo, self._handle, kind)) for kind in kinds)
        return sm, memory

    def throttle_reasons(self) -> int:
        """NVML's bits of the reasons that lower the clocks now."""
        return int(self._call(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, self._handle))

    def power_limits(self) -> tuple[int, int]:
        """Enforced and default power limit, mW."""
        names = "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit"
        limit, default = (int(self._call(getattr(self._nvml, name), self._handle)) for name in names)
        return limit, default

    def mig(self) -> bool:
        """Whether MIG (division into instances) is on."""
        return self._board.mig()

    def processes(self) -> list[int]:
        """Ids of the processes that compute on it."""
        return self._board.processes()

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            raise NvmlError(error.value) from error
