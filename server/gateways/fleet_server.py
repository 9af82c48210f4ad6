"""The serving process's side of the gateways: it submits their calls to the fleet, and publishes the fleet's state."""

import asyncio
import logging
import mmap
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from math import inf
from socket import socket
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from server.errors import INTERNAL_ERROR, ServerError
from server.gateways.channel import ANSWER, CANCEL, CONTROL, FAIL, SUBMIT, UNREAD, Channel, handle_control
from server.gateways.error_fields import ErrorFields, error_fields
from server.gateways.packed_samples import PackedSamples, inline, pack, unpack
from server.gateways.state_page import FleetState, ModelState, StatePage
from server.scheduling.calls import Sample
from server.scheduling.fleet import Fleet

if TYPE_CHECKING:
    from server.telemetry.tracing import LinkFields, RemoteSpan, Tracing

_log = logging.getLogger("batchwright.gateways")
_MAX_BACKLOG = 64 * 2**20  # bytes of answers that a gateway does not read, from which on it is disconnected
_PUBLISH_AFTER = 0.005  # s from an arrival or an answer to the publication of the state
_PUBLISH_EVERY = 0.25  # s, between publications when there are none

_Array = NDArray[Any]


class _Call(NamedTuple):
    future: "asyncio.Future[list[Sample]]"
    stored: Sequence[_Array]  # in slots
    span: "RemoteSpan | None"


class FleetServer:
    """The gateways of a fleet.

    Attributes:
        gateways: those that are connected.
        on_control: called with a gateway and each of its control messages.
        on_publish: called before each publication of the state.
        submit: submits a call, as `Fleet.submit` does.
        on_lost: called with a gateway that was disconnected, since it died or does not read its answers.
        tracing: links the spans of calls and batches; None: nothing is traced.
        page_lock: page-locks a mapping of slots for the device, and returns what ends that; None: nothing needs it.
    """

    page_lock: Callable[[mmap.mmap], Callable[[], None]] | None = None
    on_control: Callable[["Gateway", Any], None] = staticmethod(lambda _gateway, _message: None)
    on_lost: Callable[["Gateway"], None] = staticmethod(lambda _: None)
    on_publish: Callable[[], None] = staticmethod(lambda: None)
    tracing: "Tracing | None" = None

    def __init__(
        self,
        fleet: Fleet,
        page: StatePage,
        capacity: int,
        revision_of: Callable[[str], int] = lambda _: 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Serve calls by `fleet`.

        Args:
            fleet: the devices.
            page: where the state is published.
            capacity: maximum number of waiting requests.
            revision_of: returns the revision of a model for new calls.
            clock: the gateways' clock, s.
        """
        self.fleet = fleet
        self.submit: Callable[..., asyncio.Future[list[Sample]]] = fleet.submit
        self.clock = clock
        self.gateways: set[Gateway] = set()
        self._page = page
        self._capacity = capacity
        self._revision_of = revision_of
        self._timer: asyncio.TimerHandle | None = None
        self._publish_at = -inf
        self._published = True  # the last time

    async def connect(self, sock: socket, memory: int, name: str) -> "Gateway":
        """Connect a gateway.

        Args:
            sock: the other end of the gateway's socket.
            memory: file descriptor of the memory with the gateway's slots; it may be closed afterwards.
            name: its name in the log.
        """
        lock = self.page_lock
        mapped = mmap.mmap(memory, 0) if lock else mmap.mmap(memory, 0, prot=mmap.PROT_READ)
        gateway = Gateway(self, mapped, name)
        if lock is not None:  # on a thread, since it takes tens of milliseconds
            gateway.on_unmap(mapped, await asyncio.to_thread(lock, mapped))
        self.gateways.add(gateway)
        await gateway.open(sock)
        return gateway

    async def close(self) -> None:
        """Send all answers, disconnect the gateways, and publish nothing more."""
        await asyncio.gather(*(gateway.close() for gateway in [*self.gateways]))
        if self._timer is not None:
            self._timer.cancel()
        self._publish_at = -inf

    def publish(self) -> None:
        """Publish the state now and then regularly, and soon after each change of the queue, until `close`."""
        try:
            self.on_publish()
            self._page.write(self._state())
            self._published = True
        except Exception:  # noqa: BLE001  (the gateways go on with the state before)
            if self._published:
                _log.exception("the state for the gateways cannot be published; this is logged once")
            self._published = False
        self._publish_after(_PUBLISH_EVERY)

    def changed(self) -> None:
        """Publish the state soon, since the queue has changed."""
        if self._publish_at > self.clock() + _PUBLISH_AFTER:
            self._publish_after(_PUBLISH_AFTER)

    def _publish_after(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._publish_at = self.clock() + delay
        self._timer = asyncio.get_running_loop().call_later(delay, self.publish)

    def _state(self) -> FleetState:
        fleet = self.fleet
        return FleetState(
            published=self.clock(),
            shutting_down=fleet.shutting_down,
            ready=fleet.ready,
            alive=fleet.alive,
            waiting=fleet.waiting,
            capacity=self._capacity,
            backlog=fleet.backlog(),
            models={model: self._model_state(model) for model in fleet.models},
        )

    def _model_state(self, model: str) -> ModelState:
        fleet = self.fleet
        responses = [device.backlog({model: 1}) for device in fleet.devices_of(model) if device.ready]
        return ModelState(
            revision=self._revision_of(model),
            unloaded=_error_of(fleet.check_loaded, model),
            rejected=_error_of(fleet.check_room, model, 1),
            ready=fleet.is_ready(model),
            least_response=min(responses, default=0.0),
        )


class Gateway:
    """A gateway, and its open calls."""

    def __init__(self, server: FleetServer, memory: mmap.mmap, name: str) -> None:
        """Read inputs from the memory; `name` is for the log."""
        self.name = name
        self._server = server
        self._memory = np.frombuffer(memory, np.uint8)  # the base of all arrays of inputs
        self._memory.flags.writeable = False
        self._channel = Channel(self._on_message, self._on_lost)
        self._calls: dict[int, _Call] = {}
        self._read: Counter[int] = Counter()  # arrays of a failed or cancelled call that are still read

    def on_unmap(self, memory: mmap.mmap, function: Callable[[], None]) -> None:
        """Call a function when nothing refers to an input any more, before the memory is unmapped."""

        def call(_: mmap.mmap) -> None:
            function()

        weakref.finalize(self._memory, call, memory).atexit = False

    async def open(self, sock: socket) -> None:
        """Open the channel."""
        await self._channel.open(sock)

    async def close(self) -> None:
        """Send all answers, and disconnect."""
        await self._channel.close()

    def send_control(self, message: object) -> None:
        """Send a small object to the gateway."""
        self._channel.send(CONTROL, 0, pickle.dumps(message, 5))

    def _on_message(self, kind: int, call_id: int, content: memoryview) -> None:
        if kind == SUBMIT:
            self._submit(call_id, content)
        elif kind == CANCEL:
            if call_id in self._calls:
                self._calls[call_id].future.cancel()
        else:
            handle_control(partial(self._server.on_control, self), content)

    def _submit(self, call_id: int, content: memoryview) -> None:
        server = self._server
        stored: list[_Array] = []
        try:
            call = pickle.loads(content)  # noqa: S301  (of our own process)
            model, revision, expires, sizes, shapes, packed, fields = call
            inputs, stored = unpack(PackedSamples(*packed), self._memory)
            tracing = server.tracing
            with nullcontext() if tracing is None or fields is None else tracing.remote(fields) as span:
                future = server.submit(model, inputs, expires - server.clock(), sizes, shapes, revision)
        except ServerError as error:
            self._fail(call_id, error, stored)
        except Exception:  # noqa: BLE001  (a bug costs one call, and not all calls of the gateway)
            _log.exception("a call of %s failed", self.name)
            self._fail(call_id, ServerError(INTERNAL_ERROR), stored)
        else:
            self._calls[call_id] = _Call(future, stored, span)
            future.add_done_callback(partial(self._on_done, call_id))
            server.changed()

    def _on_done(self, call_id: int, future: "asyncio.Future[list[Sample]]") -> None:
        _, stored, span = self._calls.pop(call_id)
        self._server.changed()
        if future.cancelled():
            self._end_when_unread(call_id, stored)
        elif (error := future.exception()) is not None:
            self._fail(call_id, error if isinstance(error, ServerError) else ServerError(INTERNAL_ERROR), stored)
        elif self._channel.backlog > _MAX_BACKLOG:
            _log.error("%s does not read its answers; it is disconnected", self.name)
            self._channel.abort()
        else:
            try:
                content = _pack_answer(future.result(), () if span is None else span.links)
            except Exception:  # noqa: BLE001  (of an output that cannot be pickled)
                _log.exception("an answer for %s cannot be sent", self.name)
                self._fail(call_id, ServerError(INTERNAL_ERROR), stored)
            else:
                self._channel.send(ANSWER, call_id, content)

    def _fail(self, call_id: int, error: ServerError, stored: Sequence[_Array]) -> None:
        self._channel.send(FAIL, call_id, pickle.dumps(error_fields(error), 5))
        self._end_when_unread(call_id, stored)

    def _end_when_unread(self, call_id: int, stored: Sequence[_Array]) -> None:
        """Tell the gateway when nothing refers to these arrays any more, such as a batch in service.

        Arrays that are made of one of them refer to it, so that it lives as long as they do.
        """
        self._read[call_id] = len(stored)
        for array in stored:
            weakref.finalize(array, self._on_end_of_array, call_id).atexit = False
        if not stored:
            self._end_reading(call_id)

    def _on_end_of_array(self, call_id: int) -> None:  # in any thread
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._channel.loop.call_soon_threadsafe(self._end_reading, call_id)

    def _end_reading(self, call_id: int) -> None:
        self._read[call_id] -= 1
        if self._read[call_id] <= 0:
            del self._read[call_id]
            self._channel.send(UNREAD, call_id)

    def _on_lost(self) -> None:
        """Cancel all calls; the memory is unmapped when nothing refers to it any more."""
        calls = [*self._calls.values()]
        if calls:
            _log.warning("%s is gone; its %d open calls are cancelled", self.name, len(calls))
        for call in calls:
            call.future.cancel()
        self._server.gateways.discard(self)
        self._server.on_lost(self)


def _pack_answer(samples: Sequence[Sample], links: "Sequence[LinkFields]") -> bytes:
    packed = pack([each.output for each in samples], inline)
    facts = [
        (each.batch_size, each.waiting, each.service, each.energy, each.energy_source, each.device) for each in samples
    ]
    return pickle.dumps((tuple(packed), facts, links), 5)


def _error_of(check: Callable[..., object], *arguments: Any) -> ErrorFields | None:
    """The error that a check raises, if it does."""
    try:
        check(*arguments)
    except ServerError as error:
        return error_fields(error)
    return None
