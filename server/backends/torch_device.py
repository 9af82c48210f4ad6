"""The torch device: its name, its settings that change service times, and its errors."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from policies.cpus import available_cpus
from policies.types import SpecError
from server.energy.nvml import Driver, NvmlError, read_driver
from server.errors import DeviceLostError, OutOfMemoryError
from server.models.model import ServedModel

_log = logging.getLogger("batchwright")

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Optimise = Literal["auto", "eager", "none"]


def resolve_device(spec: str) -> tuple[torch.device, str]:
    """The device of a spec, "auto", "cpu", "cuda" or "cuda:N", and its display name.

    "auto" is the CPU without a CUDA device; a warning is logged if there is an NVIDIA GPU that torch cannot use.

    Raises:
        SpecError: the spec is invalid, or there is no such CUDA device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec == "cpu" or (spec == "auto" and count == 0):
        if spec == "auto" and (reason := unusable_gpu()):
            _log_once(f"the CPU is used: {reason}")
        return torch.device("cpu"), _cpu_name()
    cuda = re.fullmatch(r"auto|cuda(?::(\d{1,4}))?", spec)
    if cuda is None:
        raise SpecError(f"no device {spec!r}; give auto, cpu, cuda:N or emulated:PROFILE")
    index = int(cuda[1] or 0)
    if index >= count:
        raise SpecError(
            f"no CUDA device {index} among the {count} that torch {torch.__version__} finds"
            f"{count == 0 and f' ({reason})' if (reason := unusable_gpu()) else ''}; give cpu or auto"
        )
    return torch.device("cuda", index), torch.cuda.get_device_name(index)


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


def _cpu_name() -> str:
    """The model name in /proc/cpuinfo, or "cpu"."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", info.read_text() if info.exists() else "", re.MULTILINE)
    return found[1] if found else "cpu"


def cpu_threads() -> int:
    """The number of threads for the network; one processor is left to the event loop and to decoding."""
    return max(1, available_cpus() - 1)


def device_settings(
    device: torch.device, precision: Precision = "auto", stages: int | None = None, optimise: Optimise = "auto"
) -> str:
    """Settings of the device that change service times, for a profile's note and its key in the cache."""
    threads = f", {cpu_threads()} threads" if device.type == "cpu" else ""
    split = "" if stages is None else f", {stages} stages"
    optimised = f", optimise {optimise}" if device.type == "cuda" else ""
    return f"{resolve_precision(precision, device)}{threads}{split}{optimised}"


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """The precision; for "auto" fp16 on CUDA, which is as fast as bf16 with an eighth of its error, else fp32."""
    if precision != "auto":
        return precision
    return "fp16" if device.type == "cuda" else "fp32"


def allow_tf32(device: torch.device) -> None:
    """Let float32 matrix products on CUDA use tensor cores (TF32, 10 bits of mantissa); the CPU is unaffected."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


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


def autotunes(device: torch.device, model: ServedModel) -> bool:
    """Whether the first batch of each size is slow because cuDNN then searches for the fastest convolutions.

    This requires samples of one shape, with which batches of one size are always the same computation.
    """
    return device.type == "cuda" and model.signature.has_fixed_shapes
