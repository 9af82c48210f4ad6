"""The fleet as a gateway sees it: calls are sent to the serving process, and rejected early by the state it publishes.

An array that lies in a slot that the gateway holds, where the HTTP layer received it, stays there. Any other is copied
into a free slot. Arrays of few bytes, arrays larger than a slot, and all other values are part of the message. So are
arrays for which no slot is free, since bodies that arrive slowly may hold all slots.
"""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from socket import socket
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from server.errors import QueueFullError, ServerError, TooLargeError, UnavailableError
from server.gateways.channel import ANSWER, CANCEL, CONTROL, FAIL, SUBMIT, Channel, handle_control
from server.gateways.error_fields import make_error
from server.gateways.packed_samples import PackedSamples, Place, inline, pack, unpack
from server.gateways.slots import Slot, Slots
from server.gateways.state_page import FleetState, ModelState, StatePage
from server.scheduling.admission import Admission, reject_if_full

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

MAX_INLINE = 4 * 2**20  # bytes of a call that are not in slots
_SMALL = 2048  # bytes; copying a smaller array into the message takes less time than a slot
_ALIGNMENT = 64  # bytes, of arrays that are copied into one slot
_MAX_AGE = 5.0  # s of a published state, from which on the serving process is considered hung
_MAX_BACKLOG = 8 * MAX_INLINE  # bytes not yet read by the serving process, from which on calls are rejected


class Answer(NamedTuple):
    """The result of one sample; see `server.scheduling.interface.Result`."""

    output: Any
    batch_size: int
    waiting: float
    service: float
    energy: float | None
    energy_source: str
    device: str


class _Call(NamedTuple):
    future: "asyncio.Future[list[Answer]]"
    slots: Sequence[Slot]
    span: Any  # of its request; None where it is not traced


class FleetClient:
    """The calls of a gateway, and what it knows of the fleet.

    It has the methods of `server.scheduling.interface.FleetInterface`.

    Attributes:
        on_control: called with each control message of the serving process.
        on_lost: called when the serving process is gone, after its calls have failed.
        tracing: links the spans of calls with those of their batches; None: nothing is traced.
    """

    on_control: Callable[[Any], None] = staticmethod(lambda _: None)
    on_lost: Callable[[], None] = staticmethod(lambda: None)
    tracing: "Tracing | None" = None

    def __init__(self, state: StatePage, clock: Callable[[], float] = monotonic) -> None:
        """`state` is the page of the serving process, and `clock` the same clock as there, s."""
        self._page = state
        self._clock = clock
        self._admission = Admission()
        self._channel: Channel | None = None
        self._slots: Slots | None = None
        self._calls: dict[int, _Call] = {}  # those whose slots may be read
        self._last_id = 0

    async def connect(self, sock: socket, slots: Slots, state: StatePage | None = None) -> None:
        """Connect to a serving process, which has the other end of the socket and maps the memory of the slots.

        After the loss of a serving process this connects to the next one; `state` is its page if it is another one.
        """
        self._page = state or self._page
        channel = Channel(self._on_message, self._on_lost)
        await channel.open(sock)
        if channel.is_open:
            self._channel, self._slots = channel, slots

    @property
    def connected(self) -> bool:
        """Whether the serving process is there."""
        return self._channel is not None

    async def close(self) -> None:
        """Send what is left, and end the connection; open calls fail."""
        if self._channel is not None:
            await self._channel.close()

    def take_slot(self) -> Slot | None:
        """Take a slot to receive a body in; None if all are in use, or there is no serving process."""
        return None if self._channel is None or self._slots is None else self._slots.take()

    @property
    def free_slots(self) -> int:
        """The number of free slots; 0 without a serving process."""
        return 0 if self._slots is None else self._slots.free

    def send_control(self, message: object) -> None:
        """Send a small object to the serving process."""
        if self._channel is not None:
            self._channel.send(CONTROL, 0, pickle.dumps(message, 5))

    @property
    def state(self) -> FleetState:
        """The latest state of the fleet.

        Raises:
            UnavailableError: there is no serving process, or it has published no state for some seconds.
        """
        state = self._latest()
        if state is None:
            raise _unavailable()
        return state

    def _latest(self) -> FleetState | None:
        state = None if self._channel is None else self._page.read()
        return None if state is None or self._clock() - state.published > _MAX_AGE else state

    @property
    def shutting_down(self) -> bool:
        """Whether the shutdown has begun."""
        state = self._latest()
        return state is not None and state.shutting_down

    @property
    def ready(self) -> bool:
        """Whether new calls should be sent to this server."""
        state = self._latest()
        return state is not None and state.ready

    @property
    def alive(self) -> bool:
        """Whether the devices serve, as far as the serving process can tell."""
        state = self._latest()
        return state is not None and state.alive

    def is_ready(self, model: str) -> bool:
        """Whether new calls of the model should be sent to this server."""
        state = self._latest()
        return state is not None and model in state.models and state.models[model].ready

    def is_replaced(self, model: str, revision: int) -> bool:
        """Whether new calls of the model are served by another revision than this one, or not any more."""
        state = self._latest()
        return state is not None and (model not in state.models or state.models[model].revision != revision)

    @property
    def waiting(self) -> int:
        """The number of waiting requests.

        Raises:
            UnavailableError: there is no serving process.
        """
        return self.state.waiting

    def backlog(self) -> float:
        """The least time in which a device serves all its requests, s.

        Raises:
            UnavailableError: there is no serving process.
        """
        return self.state.backlog

    def check_loaded(self, model: str) -> None:
        """Check that a model is not unloaded.

        Raises:
            UnloadedError: it is.
            UnavailableError: there is no serving process, or it has no such model.
        """
        if (error := _state_of(self.state, model).unloaded) is not None:
            raise make_error(error)

    def check_room(self, model: str, n: int, timeout: float = inf, pending: int = 0) -> None:
        """Check that `n` more samples would be admitted by the published state.

        The time of other samples that are pending, and the learned margin of response times, are left out; the serving
        process checks again when the call is submitted.

        Raises:
            RejectedError: they would not be admitted.
            UnavailableError: there is no serving process, or it has no such model, or no device of the model works.
        """
        state = self.state
        of_model = _state_of(state, model)
        if of_model.rejected is not None:
            raise make_error(of_model.rejected)
        reject_if_full(n, state.waiting, state.capacity, self.backlog)
        if timeout < inf:
            self._admission.reject_if_late(of_model.least_response, timeout, None)

    def submit(
        self,
        model: str,
        inputs: Sequence[Any],
        timeout: float = inf,
        sizes: Sequence[float] = (),
        shapes: Sequence[str] = (),
        revision: int = 0,
    ) -> "asyncio.Future[list[Answer]]":
        """Send a call to the serving process; the arguments are those of `Dispatcher.submit`.

        Returns:
            The future of an answer for each sample, or of the error of the serving process. Cancelling it cancels the
            call.

        Raises:
            UnavailableError: there is no serving process, or it does not read its messages.
            QueueFullError: no slots are free for inputs that do not fit into a message.
            TooLargeError: the inputs fit neither into slots nor into a message.
        """
        channel = self._channel
        if channel is None or self._slots is None or channel.backlog > _MAX_BACKLOG:
            raise _unavailable()
        span = None if self.tracing is None else self.tracing.current()
        fields = None if span is None or self.tracing is None else self.tracing.fields_of(span)
        placed = _PlacedArrays(self._slots)
        try:
            packed = pack(inputs, placed.add)
            call = (model, revision, self._clock() + timeout, sizes, shapes, tuple(packed), fields)
            content = pickle.dumps(call, 5)
            if len(content) > MAX_INLINE:
                raise placed.error(len(content))
        except BaseException:
            placed.free()
            raise
        self._last_id = call_id = self._last_id + 1
        channel.send(SUBMIT, call_id, content)
        future: asyncio.Future[list[Answer]] = channel.loop.create_future()
        self._calls[call_id] = _Call(future, placed.slots, span)
        future.add_done_callback(partial(self._on_done, call_id))
        return future

    def _on_done(self, call_id: int, future: "asyncio.Future[list[Answer]]") -> None:
        if future.cancelled() and self._channel is not None:
            self._channel.send(CANCEL, call_id)

    def _on_message(self, kind: int, call_id: int, content: memoryview) -> None:
        if kind == CONTROL:
            handle_control(self.on_control, content)
            return
        call = self._calls.get(call_id) if kind == FAIL else self._calls.pop(call_id, None)
        if call is None:
            return
        if kind != FAIL:
            for slot in call.slots:
                slot.end_reading()
        if call.future.done():
            return
        if kind == ANSWER:
            packed, facts, links = pickle.loads(content)  # noqa: S301  (of our own process)
            if links and self.tracing is not None:
                self.tracing.add_links(call.span, links)
            outputs, _ = unpack(PackedSamples(*packed))
            call.future.set_result([Answer(output, *each) for output, each in zip(outputs, facts, strict=True)])
        else:
            call.future.set_exception(make_error(pickle.loads(content)))  # noqa: S301  (of our own process)

    def _on_lost(self) -> None:
        self._channel = self._slots = None
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(_unavailable())
        self.on_lost()


class _PlacedArrays:
    """The arrays of a call's inputs.

    Attributes:
        slots: the slots that the call uses.
    """

    __slots__ = ("_full", "_inlined", "_last", "_left", "_memory", "_start", "slots")

    def __init__(self, memory: Slots) -> None:
        self.slots: list[Slot] = []
        self._memory = memory
        self._full = False  # whether an array is in the message since calls use all slots
        self._inlined = 0  # bytes of arrays in the message
        self._last: Slot | None = None  # into which an array was copied
        self._start = self._left = 0  # the rest of it, bytes

    def add(self, array: NDArray[Any]) -> Place:
        """Place a C-contiguous array.

        Raises:
            QueueFullError: it does not fit into a message, and no slot is free.
            TooLargeError: it fits neither into a slot nor into a message.
        """
        memory, size = self._memory, array.nbytes
        if size <= _SMALL or size > memory.slot_size:
            return self._inline(array)
        found = memory.find(array.__array_interface__["data"][0], size)
        if found is not None and self._uses(found[0]):
            return found[1]
        return self._copy(array)

    def free(self) -> None:
        """End the use of the slots, since the call is not sent."""
        for slot in self.slots:
            slot.end_reading()

    def error(self, size: int) -> ServerError:
        """The error of a call with so many bytes outside of slots."""
        count = self._memory.count
        if self._full and len(self.slots) < count:
            return QueueFullError(f"calls use all {count} slots of this gateway; retry in 1 s", 1)
        return TooLargeError(
            f"the inputs take {size} bytes outside of slots of {self._memory.slot_size} bytes, over the maximum of "
            f"{MAX_INLINE}; send fewer samples per call"
        )

    def _inline(self, array: NDArray[Any]) -> Place:
        self._inlined += array.nbytes
        if self._inlined > MAX_INLINE:
            raise self.error(self._inlined)
        return inline(array)

    def _uses(self, slot: Slot) -> bool:
        """Whether the call can use a slot; false if the slot is free, or another call uses it."""
        if slot.held:
            slot.lend()
            self.slots.append(slot)
            return True
        return slot in self.slots

    def _copy(self, array: NDArray[Any]) -> Place:
        """Copy into the last slot, or else a free one, or else into the message."""
        slot, size = self._last, array.nbytes
        if slot is None or self._left < size:
            slot = self._take()
            if slot is None:
                self._full = True
                return self._inline(array)
            self._last, self._start, self._left = slot, 0, self._memory.slot_size
        start, used = self._start, -(-size // _ALIGNMENT) * _ALIGNMENT
        slot.view[start : start + size] = array.data.cast("B")
        self._start, self._left = start + used, self._left - used
        return self._memory.offset_of(slot) + start

    def _take(self) -> Slot | None:
        slot = self._memory.take()
        if slot is not None:
            slot.lend()
            slot.release()
            self.slots.append(slot)
        return slot


def _state_of(state: FleetState, model: str) -> ModelState:
    """The state of a model; one that the gateway knows is missing if another serving process has begun without it."""
    if model not in state.models:
        raise _unavailable()
    return state.models[model]


def _unavailable() -> ServerError:
    return UnavailableError("the serving process does not answer for now; send the request again", 1)
