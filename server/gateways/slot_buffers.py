"""Buffers for bodies in the slots of a gateway, so that the serving process reads samples where they were received."""

from server.gateways.fleet_client import FleetClient
from server.gateways.slots import Slot
from server.transport.body_buffers import BodyBuffer, BodyBuffers

_LEAST = 2**12  # bytes; a smaller body is copied sooner than a slot is handed over


class SlotBuffers(BodyBuffers):
    """Slots for bodies that fit into one, and buffers of this process for others."""

    def __init__(self, fleet: FleetClient) -> None:
        """Take the slots of the connection to the serving process."""
        super().__init__()
        self._fleet = fleet

    def take(self, size: int) -> BodyBuffer:
        """Return a buffer of `size` bytes, with any content."""
        slot = self._fleet.take_slot() if size >= _LEAST else None
        if slot is not None and size <= len(slot.view):
            return _SlotBuffer(slot, size)
        if slot is not None:
            slot.release()
        return super().take(size)


class _SlotBuffer:
    __slots__ = ("_slot", "view")

    def __init__(self, slot: Slot, size: int) -> None:
        self._slot = slot
        self.view = slot.view[:size]

    def release(self) -> None:
        self._slot.release()
