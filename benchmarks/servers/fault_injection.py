"""serve-model on an emulated device that fails on command: `python -m benchmarks.servers.fault_injection ARGUMENTS`.

The environment variable DRILL_FILE names a file. Before each batch the device reads the fault in it, if the file has
changed. With several devices the second one reads DRILL_FILE.1, the third DRILL_FILE.2, and so on.

    none       no fault
    error:N    the next N batches raise
    oom:B      batches above B do not fit the memory
    slow:S     the next batch takes S seconds more
    hang       the next batch never ends
    lost       the next batch loses the device

A sample that begins with b"POISON" raises in any batch, one that begins with b"NOTNUM" has outputs that are not finite.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import server.app.backend
from policies.profile import Profile
from server.backends.emulated import EmulatedDevice
from server.backends.executor import Batch
from server.energy.meters import CountingMeter
from server.errors import DeviceLostError, NotFiniteError, OutOfMemoryError
from server.models.model import Codec

_POISON, _NOT_A_NUMBER = b"POISON", b"NOTNUM"


class FaultyDevice:
    """An emulated device with the faults that its file orders."""

    _made = count()

    def __init__(self, profiles: Mapping[str, Profile], meter: CountingMeter, codecs: Mapping[str, Codec]) -> None:
        """As EmulatedDevice."""
        self._device = EmulatedDevice(profiles, meter, codecs)
        index = next(self._made)
        self._file = Path(os.environ["DRILL_FILE"] + (f".{index}" if index else ""))
        self._changed = 0
        self._fault, self._value = "none", 0.0

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Raise the ordered fault or the fault of a sample, else serve."""
        self._read()
        self._inject(len(batch.inputs))
        outputs = self._device.serve(batch)
        begins = [sample.reshape(-1)[: len(_POISON)].tobytes() for sample in batch.inputs]
        if _POISON in begins:
            raise ValueError("a poisoned sample")
        if _NOT_A_NUMBER in begins:
            raise NotFiniteError("the model's output is not finite")
        return outputs

    def _read(self) -> None:
        try:
            changed = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed != self._changed:
            self._changed = changed
            self._fault, _, value = self._file.read_text().strip().partition(":")
            self._value = float(value or 1)

    def _inject(self, size: int) -> None:
        match self._fault:
            case "oom" if size > self._value:
                raise OutOfMemoryError(f"no memory for {size}")
            case "error" if self._value > 0:
                self._value -= 1
                raise RuntimeError("an ordered error")
            case "slow":
                self._fault = "none"
                time.sleep(self._value)
            case "hang":
                threading.Event().wait()
            case "lost":
                raise DeviceLostError("an ordered loss")
            case _:
                pass


def order_fault(file: Path, fault: str) -> None:
    """Write a fault into the device's file, atomically: a device must not read a file that is still empty."""
    new = file.with_suffix(".new")
    new.write_text(fault)
    new.replace(file)


def main() -> None:
    """Serve with FaultyDevice in place of the emulated device."""
    server.app.backend.EmulatedDevice = FaultyDevice  # type: ignore[attr-defined, assignment]
    from server.cli import main as serve_model

    serve_model()


if __name__ == "__main__":
    main()
