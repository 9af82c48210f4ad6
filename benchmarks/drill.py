"""serve-model with an emulated device that fails on command, for drills: `python -m benchmarks.drill ARGUMENTS`.

Environment variable DRILL_FILE names a file; before each batch the device reads what stands there if it changed. Of
several devices the second one reads DRILL_FILE.1, the third DRILL_FILE.2, and so on.

    none       as ever
    error:N    the next N batches raise
    oom:B      batches above B do not fit the memory
    slow:S     the next batch takes S seconds more
    hang       the next batch never comes back
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

import server.backends.emulated
from policies.profile import Profile
from server.backends.emulated import EmulatedDevice
from server.backends.executor import Batch
from server.energy.meters import CountingMeter
from server.errors import DeviceLostError, NotFiniteError, OutOfMemoryError

_POISON, _NOT_A_NUMBER = b"POISON", b"NOTNUM"


class FaultyDevice:
    """An emulated device under orders."""

    _made = count()

    def __init__(self, profiles: Mapping[str, Profile], meter: CountingMeter) -> None:
        """As EmulatedDevice."""
        self._device = EmulatedDevice(profiles, meter)
        index = next(self._made)
        self._file = Path(os.environ["DRILL_FILE"] + (f".{index}" if index else ""))
        self._changed = 0
        self._order, self._left = "none", 0.0

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Fail as ordered, or as a sample makes it, else serve."""
        self._read()
        self._obey(len(batch.inputs))
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
            self._order, _, left = self._file.read_text().strip().partition(":")
            self._left = float(left or 1)

    def _obey(self, size: int) -> None:
        match self._order:
            case "oom" if size > self._left:
                raise OutOfMemoryError(f"no memory for {size}")
            case "error" if self._left > 0:
                self._left -= 1
                raise RuntimeError("an ordered error")
            case "slow":
                self._order = "none"
                time.sleep(self._left)
            case "hang":
                threading.Event().wait()
            case "lost":
                raise DeviceLostError("an ordered loss")
            case _:
                pass


def give(order: Path, text: str) -> None:
    """Order something, whole: a device that read between truncating and writing would take nothing for an order."""
    new = order.with_suffix(".new")
    new.write_text(text)
    new.replace(order)


def main() -> None:
    """Serve; the composition root takes its emulated device from where it always does."""
    server.backends.emulated.EmulatedDevice = FaultyDevice  # type: ignore[misc, assignment]
    from server.cli import main as serve_model

    serve_model()


if __name__ == "__main__":
    main()
