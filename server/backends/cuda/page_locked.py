"""Shared memory that is page-locked for CUDA, so that the device copies samples from where they were received."""

import logging
import mmap
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_log = logging.getLogger("batchwright.device")
_PORTABLE = 1  # cudaHostRegisterPortable: for all CUDA devices of the process
Lock = Callable[[int, int], None]
Unlock = Callable[[int], None]


def _cuda_lock(address: int, size: int) -> None:
    code = torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)  # type: ignore[no-untyped-call]
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister failed with error {int(code)}")


def _cuda_unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class PageLocked:
    """The memories that are page-locked; `page_locked` is the only instance."""

    def __init__(self, lock: Lock = _cuda_lock, unlock: Unlock = _cuda_unlock) -> None:
        """`lock` gets address and size, bytes, and raises RuntimeError; `unlock` gets the address."""
        self._lock, self._unlock = lock, unlock
        self._memories: tuple[tuple[int, int, Tensor], ...] = ()  # address, its end, and the bytes

    def add(self, memory: mmap.mmap) -> Callable[[], None]:
        """Page-lock a writable mapping, which takes some milliseconds for 100 MB.

        Returns:
            Ends that; to be called when no array of the memory is used any more, and before it is unmapped.
        """
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        address, size = whole.data_ptr(), len(memory)
        try:
            self._lock(address, size)
        except (RuntimeError, AttributeError) as error:
            _log.warning("shared memory is not page-locked, so their samples are copied twice: %s", error)
            return lambda: None
        entry = (address, address + size, whole)
        self._memories += (entry,)

        def remove() -> None:
            self._memories = tuple(each for each in self._memories if each is not entry)
            self._unlock(address)

        return remove

    def find(self, array: NDArray[Any]) -> Tensor | None:
        """The tensor of a C-contiguous uint8 array in one of the memories; None if it is in none."""
        if not self._memories or not array.flags.c_contiguous:
            return None
        address: int = array.__array_interface__["data"][0]
        for start, end, whole in self._memories:
            if start <= address and address + array.nbytes <= end:
                at = address - start
                return whole[at : at + array.nbytes].view(array.shape)
        return None


page_locked = PageLocked()
