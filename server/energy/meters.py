"""Energy meters: what a device has drawn so far, and how that is known. Never rated power times time."""

import asyncio
import logging
from contextlib import suppress
from math import inf
from threading import Thread
from typing import Protocol

from server.energy.nvml import foreign_processes, open_board
from server.energy.nvml_meters import nvml_meter
from server.energy.rapl import rapl_meter

_log = logging.getLogger("batchwright.energy")
_PATIENCE = 0.5  # s


class EnergyMeter(Protocol):
    """A counter of joules. A sensor's takes up to milliseconds to read: not on the event loop.

    Attributes:
        source: "nvml", "rapl", "emulated" or "none".
        resolution: time between two updates of what is read, s; inf where there is none.
        scope: what the joules are of: "board", "package", "batches" or "nothing".
        about: how they are known, or why they are not: a line for the log and a profile's note.
    """

    source: str
    resolution: float
    scope: str
    about: str

    def read(self) -> float | None:
        """Energy since the meter was made, J, never less than before; None where nothing can be measured."""
        ...


class CountingMeter:
    """The emulated device's meter: counts what the profile charges for each batch."""

    source = "emulated"
    resolution = 0.0
    scope = "batches"
    about = "the profile's energy of each batch"

    def __init__(self) -> None:
        """Starts at 0 J."""
        self._joules = 0.0

    def add(self, joules: float) -> None:
        """Count the energy of one batch, J."""
        self._joules += joules

    def read(self) -> float | None:
        """Energy counted so far, J."""
        return self._joules


class NoMeter:
    """A device without a sensor that can be read."""

    source = "none"
    resolution = inf
    scope = "nothing"

    def __init__(self, about: str = "no sensor was asked for") -> None:
        """`about` says why nothing is measured."""
        self.about = about

    def read(self) -> float | None:
        """Nothing is known."""
        return None


class LastReading:
    """What a meter said last, for an event loop, which must not wait for a sensor: a lost GPU may never answer.

    Each reading has a thread of its own, one at a time; one that hangs, also on somebody else's, holds up nobody, nor
    the end of the process.

    Attributes:
        joules: the last reading, J; None before the first, or where nothing is known.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        """Nothing is read yet."""
        self.joules: float | None = None
        self._meter = meter
        self._read = asyncio.Event()
        self._read.set()

    async def refresh(self, patience: float = _PATIENCE) -> None:
        """Read the meter; after `patience`, s, the last reading stays until that one comes back."""
        if self._read.is_set():
            self._read.clear()
            Thread(target=self._follow, args=(asyncio.get_running_loop(),), name="energy", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._read.wait()

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self.joules = self._meter.read()
        except Exception:  # noqa: BLE001  (a broken sensor must not end the scraping)
            _log.exception("the energy counter cannot be read")
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._read.set)


def meter_for(device: str) -> EnergyMeter:
    """The best meter of a device, "cuda:N" or "cpu"; NoMeter, and a line in the log, where there is none."""
    try:
        meter = _meter(device)
    except OSError as error:
        _log.warning("the energy of %s is not measured: %s", device, error)
        return NoMeter(str(error))
    _log.info(
        "the energy of %s: %s; scope %s, updated every %.3g s", device, meter.about, meter.scope, meter.resolution
    )
    return meter


def _meter(device: str) -> EnergyMeter:
    kind, _, index = device.partition(":")
    match kind:
        case "cpu":
            return rapl_meter()
        case "cuda":
            board = open_board(int(index or 0))
            meter = nvml_meter(board)
            if others := foreign_processes(board):
                _log.warning("%s also runs processes %s: their energy is counted too", device, others)
            return meter
        case _:
            raise OSError(f"no sensor is known for device {device!r}; those of cpu and cuda:N are")
