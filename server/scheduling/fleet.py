"""The devices of a server: each has a dispatcher, and a call goes to the one that should answer it first.

All samples of a call go to one device. It is answered when its last sample is, it is admitted whole or not at all, and
its samples may share a batch; spread out, it would wait for the slowest of several devices.
"""

import asyncio
import logging
from collections.abc import Sequence
from math import inf
from typing import Any

from policies.queue.routing import least_delay
from server.errors import BadInputError, DrainingError, NotFoundError, ServerError
from server.scheduling.admission import DEFAULT_LIMITS, refuse_if_full
from server.scheduling.calls import Answer, Call, fail_all
from server.scheduling.dispatcher import Dispatcher

_log = logging.getLogger("batchwright.fleet")
_TRIES = 2  # devices that may be lost while they serve a call: it may be what breaks them


class Fleet:
    """One dispatcher, or several.

    A device that is lost leaves its calls to the others. An operator may take one away: it serves what it has accepted,
    at once and without waiting for more, and gets no new calls until it is brought back, by the operator or because it
    is the last one that works.

    Attributes:
        dispatchers: all of them, in the order in which the devices were named.
        leaving: told to stop soon: not ready, though calls are still admitted.
        broken: set when nobody can serve any more.
    """

    leaving = False
    _draining = False

    def __init__(self, dispatchers: Sequence[Dispatcher], capacity: int = DEFAULT_LIMITS.capacity) -> None:
        """At least one, each of another name; `capacity` is how many requests may wait on all of them."""
        self.dispatchers = tuple(dispatchers)
        self.broken = asyncio.Event()
        self._capacity = capacity
        self._serving = self.dispatchers  # those that get new calls; never none
        self._by_device = {dispatcher.device: dispatcher for dispatcher in dispatchers}
        for dispatcher in dispatchers:
            dispatcher.on_broken = self._inherit

    # what the gateway asks

    def submit(
        self, model: str, inputs: Sequence[Any], timeout: float = inf, sizes: Sequence[float] = ()
    ) -> "asyncio.Future[list[Answer]]":
        """As `Dispatcher.submit`, on the device that should answer first."""
        return self._admitting(model, len(inputs)).submit(model, inputs, timeout, sizes)

    def check_room(self, model: str, n: int, timeout: float = inf, coming: int = 0) -> None:
        """As `Dispatcher.check_room`, on the device that should answer first; it has its share of those `coming`."""
        n += coming // len(self._serving)
        self._admitting(model, n).check_room(model, n, timeout)

    def backlog(self) -> float:
        """The least time in which one of the devices serves everybody who is on it, s: nobody new is sooner."""
        return min(dispatcher.backlog() for dispatcher in self._serving)

    @property
    def waiting(self) -> int:
        """The number of waiting requests, of all models on all devices."""
        return sum(dispatcher.waiting for dispatcher in self.dispatchers)

    def queue_length(self, model: str) -> int:
        """How many requests of `model` wait."""
        return sum(dispatcher.queue_length(model) for dispatcher in self.dispatchers)

    def arrival_rate(self, model: str) -> float:
        """Measured arrival rate of `model`, 1/s."""
        return sum(dispatcher.arrival_rate(model) for dispatcher in self.dispatchers)

    def capacity(self, model: str) -> float:
        """Largest service rate of those that serve, by their profiles, 1/s."""
        return sum(dispatcher.chosen[model].profile.capacity for dispatcher in self._serving)

    def on(self, device: str) -> Dispatcher:
        """The dispatcher of a device, by its name."""
        return self._by_device[device]

    @property
    def first(self) -> Dispatcher:
        """The first of those that serve, where one has to stand for all."""
        return self._serving[0]

    @property
    def open_calls(self) -> int:
        """Calls accepted and not answered yet."""
        return sum(dispatcher.open_calls for dispatcher in self.dispatchers)

    @property
    def ready(self) -> bool:
        """Whether new calls should be sent here; one that is `leaving` still admits them until it drains."""
        return not self.leaving and any(dispatcher.ready for dispatcher in self._serving)

    @property
    def alive(self) -> bool:
        """Whether somebody serves, and all loops turn but those whose device is lost."""
        return not self.broken.is_set() and all(d.alive or d.broken.is_set() for d in self.dispatchers)

    # what an operator asks

    def serves(self, dispatcher: Dispatcher) -> bool:
        """Whether this one gets new calls."""
        return dispatcher in self._serving and not dispatcher.broken.is_set()

    def serve(self, index: int, serving: bool) -> None:
        """Take a device away, or bring it back.

        Raises:
            NotFoundError: there is none of this index.
            BadInputError: it is lost, or the last one that serves.
            DrainingError: the server is stopping.
        """
        if not 0 <= index < len(self.dispatchers):
            raise NotFoundError(f"no device {index} here; there are {len(self.dispatchers)}, counted from 0")
        changed = self.dispatchers[index]
        if self.leaving:
            raise DrainingError("the server is stopping; its devices stay as they are", 1)
        if changed.broken.is_set():
            raise BadInputError(f"{changed.device} is lost; restart the server to have it back")
        if serving == self.serves(changed):
            return
        if not serving and len(self._serving) == 1:
            raise BadInputError(f"{changed.device} is the last device that serves; bring another one back first")
        _log.warning("%s is %s", changed.device, "brought back" if serving else "taken away: it gets no new calls")
        self._serving = tuple(d for d in self.dispatchers if (serving if d is changed else d in self._serving))
        if serving:
            changed.resume()
        else:
            changed.retire()

    # from start to end

    async def run(self) -> None:
        """Decide and serve on all devices until cancelled, or until nothing can be served: then `broken` is set."""
        await asyncio.gather(*(dispatcher.run() for dispatcher in self.dispatchers))

    async def drain(self) -> None:
        """Refuse new calls, serve what was accepted without waiting for more, and return when all is answered."""
        self.leaving = self._draining = True
        while True:
            await asyncio.gather(*(dispatcher.drain() for dispatcher in self.dispatchers))
            if not self.open_calls:  # one that was lost meanwhile leaves its calls to others
                return

    def abandon(self) -> None:
        """Refuse new calls, and those accepted as well: whoever stops the server has lost patience."""
        for dispatcher in self.dispatchers:
            dispatcher.abandon()

    def _admitting(self, model: str, n: int) -> Dispatcher:
        """Where `n` more samples go, if there is room.

        Raises:
            QueueFullError: there is no room for them on all devices together.
        """
        if len(self._serving) == 1:  # which checks its own room
            return self._serving[0]
        refuse_if_full(n, self.waiting, self._capacity, self.backlog)
        return self._soonest(model, n)

    def _soonest(self, model: str, n: int) -> Dispatcher:
        """The device that should answer `n` more samples first."""
        return self._serving[least_delay([dispatcher.backlog({model: n}) for dispatcher in self._serving])]

    def _inherit(self, calls: Sequence[Call], error: ServerError) -> None:
        """Give the calls that a broken dispatcher has not answered to the others.

        If no other device is serving, those that an operator has taken away are brought back.
        """
        left = tuple(dispatcher for dispatcher in self._serving if not dispatcher.broken.is_set())
        if not left:
            left = tuple(dispatcher for dispatcher in self.dispatchers if not dispatcher.broken.is_set())
            for dispatcher in left:
                _log.critical("%s is brought back: all devices that served are lost", dispatcher.device)
                if not self._draining:
                    dispatcher.resume()
        if not left:
            _log.critical("no device is left that serves; the server ends, for its supervisor to start it again")
            self.broken.set()
            fail_all(calls, error)
            return
        self._serving = left
        _log.critical("%d calls go to what is left: %s", len(calls), ", ".join(d.device for d in left))
        for call in calls:
            if call.losses < _TRIES:
                self._soonest(call.model, call.missing).take(call)
            else:
                call.fail(error)
