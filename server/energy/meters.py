"""Energy meters: the energy that a device has consumed, from a sensor and never from rated power times time."""

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
_READ_TIMEOUT = 0.5  # s
METERS = r"none|cpu|cuda:\d{1,4}"  # those of this machine that can be read for another server
METER_USAGE = "cpu, cuda:N or none"


class EnergyMeter(Protocol):
    """An energy counter. Reading a sensor takes up to milliseconds, too long for the event loop.

    Attributes:
        source: "nvml", "rapl", "emulated" or "none".
        resolution: time between two updates of the counter, s; inf without a counter.
        scope: what is measured: "board", "package", "batches" or "nothing".
        about: how the energy is measured, or why it is not; a line for the log and the profile's note.
    """

    source: str
    resolution: float
    scope: str
    about: str

    def read(self) -> float | None:
        """Energy since the meter was created, J, non-decreasing; None where nothing can be measured."""
        ...


class CountingMeter:
    """Meter of an emulated device: adds up the profile's energy of each batch."""

    source = "emulated"
    resolution = 0.0
    scope = "batches"
    about = "the profile's energy of each batch"

    def __init__(self) -> None:
        """Start at 0 J."""
        self._joules = 0.0

    def add(self, joules: float) -> None:
        """Count the energy of one batch, J."""
        self._joules += joules

    def read(self) -> float | None:
        """Energy counted so far, J."""
        return self._joules


class NoMeter:
    """Meter of a device without a readable sensor."""

    source = "none"
    resolution = inf
    scope = "nothing"

    def __init__(self, about: str = "no sensor is used") -> None:
        """`about` is the reason why nothing is measured."""
        self.about = about

    def read(self) -> float | None:
        """Return None."""
        return None


class LastReading:
    """The last reading of a meter, for the event loop, which a sensor must not block: reading a lost GPU may hang.

    Each reading runs on a daemon thread of its own, one at a time. A reading that hangs blocks neither other meters nor
    the exit of the process.

    Attributes:
        joules: the last reading, J; None before the first, or where nothing can be measured.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        """Start without a reading."""
        self.joules: float | None = None
        self._meter = meter
        self._complete = asyncio.Event()
        self._complete.set()

    async def refresh(self, timeout: float = _READ_TIMEOUT) -> None:  # noqa: ASYNC109  (a reading continues after it)
        """Read the meter; after `timeout`, s, the last reading stays until the new one is complete."""
        if self._complete.is_set():
            self._complete.clear()
            Thread(target=self._read, args=(asyncio.get_running_loop(),), name="energy", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._complete.wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self.joules = self._meter.read()
        except Exception:  # noqa: BLE001  (a broken sensor must not fail a scrape of the metrics)
            _log.exception("the energy counter cannot be read; its last value stays")
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._complete.set)


def meter_for(device: str, uuid: str = "") -> EnergyMeter:
    """The best meter of a device, "cuda:N" with its UUID or "cpu"; else NoMeter, and the reason is logged.

    That of "none" is NoMeter.
    """
    if device == "none":
        return NoMeter()
    try:
        meter = _meter(device, uuid)
    except OSError as error:
        level = logging.INFO if device == "cpu" else logging.WARNING  # most virtual machines have no counters
        _log.log(level, "the energy of %s is not measured: %s", device, error)
        return NoMeter(str(error))
    _log.info(
        "the energy of %s: %s; scope %s, updated every %.3g s", device, meter.about, meter.scope, meter.resolution
    )
    return meter


def _meter(device: str, uuid: str) -> EnergyMeter:
    match device.partition(":")[0]:
        case "cpu":
            return rapl_meter()
        case "cuda":
            board = open_board(uuid)
            meter = nvml_meter(board)
            if others := foreign_processes(board):
                _log.warning(
                    "%s also runs processes %s, whose energy is counted too; stop them for exact figures",
                    device,
                    others,
                )
            return meter
        case _:
            raise OSError(f"no energy sensor is supported for device {device!r}, only for cpu and cuda:N")
