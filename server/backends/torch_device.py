"""The torch device: its name, its settings that change service times, and its errors."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

from policies.types import SpecError
from server.backends.real_device import RealDevice, cpu_name
from server.energy.nvml import Driver, NvmlError, read_driver
from server.errors import DeviceLostError, OutOfMemoryError

_log = logging.getLogger("batchwright")


def resolve_device(spec: str) -> RealDevice:
    """The device of a spec; see `find_device`, which asks for it where torch is needed.

    A warning is logged if there is an NVIDIA GPU that torch cannot use.

    Raises:
        SpecError: there is no such CUDA device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec == "cpu" or (spec == "auto" and count == 0):
        if spec == "auto" and (reason := unusable_gpu()):
            _log_once(f"the CPU is used: {reason}")
        return RealDevice("cpu", cpu_name())
    index = int(spec.partition(":")[2] or 0)
    if index >= count:
        raise SpecError(
            f"no CUDA device {index} among the {count} that torch {torch.__version__} finds"
            f"{count == 0 and f' ({reason})' if (reason := unusable_gpu()) else ''}; give cpu or auto"
        )
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return RealDevice(f"cuda:{index}", torch.cuda.get_device_name(index), uuid)


@cache
def _log_once(warning: str) -> None:
    _log.warning("%s", warning)


def unusable_gpu() -> str:
    """Why torch has no CUDA device although NVIDIA's driver has a GPU; empty without a GPU, or if torch can use it."""
    if torch.cuda.is_available():
        return ""
    try:
        driver = read_driver()
    except (ImportError, NvmlError):
        return ""
    return describe_unusable_gpu(driver, torch.__version__, torch.version.cuda) if driver.gpus else ""


def describe_unusable_gpu(driver: Driver, torch_version: str, torch_cuda: str | None) -> str:
    """Explain why torch cannot use the GPUs of a driver.

    Args:
        driver: NVIDIA's driver and its GPUs, at least one.
        torch_version: such as "2.11.0+cu130".
        torch_cuda: the CUDA version that torch was built for, such as "13.0"; None for a build without CUDA.
    """
    found = f"torch {torch_version} cannot use {driver.gpus[0]} (driver {driver.version}, CUDA up to {driver.cuda})"
    if torch_cuda is None:
        return f"{found}, since it is a build without CUDA; install one with CUDA"
    if tuple(map(int, torch_cuda.split("."))) > tuple(map(int, driver.cuda.split("."))):
        return f"{found}, since it was built for CUDA {torch_cuda}; update the driver, or install a torch for its CUDA"
    return f"{found}; check CUDA_VISIBLE_DEVICES, and whether the container has the GPU's devices"


@contextmanager
def translated_errors(device: torch.device) -> Iterator[None]:
    """Translate torch's errors into OutOfMemoryError, which a smaller batch may avoid, and DeviceLostError.

    After an error of the accelerator the device is lost if its context is gone, in which case the next call fails too.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        empty_cache()
        raise OutOfMemoryError(str(error)) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # the CPU's allocator has no exception type for it
            raise OutOfMemoryError(str(error)) from error
        if isinstance(error, torch.AcceleratorError) and not _context_works(device):
            raise DeviceLostError(str(error)) from error
        raise


def empty_cache() -> None:
    """Return memory that torch keeps to the devices; no effect while a graph is captured, or after a failed capture."""
    with suppress(RuntimeError):
        torch.cuda.empty_cache()


def _context_works(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except Exception:  # noqa: BLE001  (any error means that the context is gone)
        return False
    return True
