"""Energy meters: what a device has drawn so far, and how that is known. Never rated power times time."""

from typing import Protocol


class EnergyMeter(Protocol):
    """A counter of joules.

    Attributes:
        source: "emulated" or "none"; hardware sensors name themselves.
    """

    source: str

    def read(self) -> float | None:
        """Energy since the meter was made, J; None where nothing can be measured."""
        ...


class CountingMeter:
    """The emulated device's meter: counts what the profile charges for each batch."""

    source = "emulated"

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

    def read(self) -> float | None:
        """Nothing is known."""
        return None
