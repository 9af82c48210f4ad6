"""The devices of a server. Each has a dispatcher, and a call goes to the one with the least expected response time.

All samples of a call go to one device. The call is answered when its last sample is, so if it were spread out it would
wait for the slowest of several devices, and its samples could not share a batch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf

from policies.queue.routing import least_delay
from server.errors import BadInputError, DrainingError, NotFoundError, ServerError, UnavailableError, UnloadedError
from server.scheduling.admission import DEFAULT_LIMITS, reject_if_full
from server.scheduling.calls import InferenceCall, Sample, fail_all
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.levels import levels_of

_log = logging.getLogger("batchwright.fleet")
_MAX_LOSSES = 2  # devices lost while they served a call; the call then fails, since it may be the cause


class Fleet:
    """One dispatcher or several.

    The calls of a lost device, or of one that is unavailable for now, move to the others. An operator may retire a
    device: it then serves its accepted calls without waiting for more, and gets no new ones until it is resumed, by the
    operator or because no other device works.

    Attributes:
        dispatchers: the dispatchers, in the order in which the devices were named.
        shutting_down: whether the shutdown has begun: the server is not ready, and admits calls only until `drain`.
        broken: set when all devices are lost.
        unloaded: names of the models that are unloaded, so that new calls of them are rejected.
        draining: whether new calls of clients are rejected.
        before_drain: coroutines that drain the pipelines, awaited before the dispatchers are drained.
    """

    shutting_down = False
    draining = False

    def __init__(self, dispatchers: Sequence[Dispatcher], capacity: int = DEFAULT_LIMITS.capacity) -> None:
        """`dispatchers` have different names, at least one; `capacity` is the maximum number of waiting requests."""
        self.dispatchers = tuple(dispatchers)
        self.broken = asyncio.Event()
        self.unloaded: set[str] = set()
        self.before_drain: Sequence[Callable[[], Awaitable[None]]] = ()
        self._capacity = capacity
        self._retired: set[Dispatcher] = set()
        self._update_serving()
        for dispatcher in dispatchers:
            dispatcher.on_broken, dispatcher.on_available = self._reassign, self._update_serving

    def submit(
        self, model: str, samples: Sequence[Sample], timeout: float = inf, id: str = "", level: int = 1
    ) -> "asyncio.Future[list[Sample]]":
        """Call `Dispatcher.submit` for the device with the least expected response time."""
        return self._route(model, len(samples), level).submit(model, samples, timeout, id, level)

    def check_loaded(self, model: str) -> None:
        """Check that a model is not unloaded, before a call of it begins.

        Raises:
            UnloadedError: it is.
        """
        if model in self.unloaded:
            raise UnloadedError(f"{model} is unloaded; load it by POST /v2/repository/models/{model}/load", 1)

    def check_room(self, model: str, n: int, timeout: float = inf, pending: int = 0, level: int = 1) -> None:
        """Call `Dispatcher.check_room` for the device with the least expected response time.

        `pending` is the number of samples that are being decoded; they are counted as spread evenly over the devices.
        """
        if pending:
            n += pending // max(1, len(self._serving_of[model]))
        self._route(model, n, level).check_room(model, n, timeout, level)

    def backlog(self, model: str = "", level: int | None = None) -> float:
        """Return the least time in which one of the devices serves all its requests, s.

        Of a model those of this priority level and the ones before it; None: all.
        """
        if level is None:
            return min((dispatcher.backlog() for dispatcher in self._serving), default=0.0)
        return min((each.backlog({model: 0}, level) for each in self._serving_of[model]), default=0.0)

    @property
    def waiting(self) -> int:
        """The number of waiting requests, of all models on all devices."""
        return sum(dispatcher.queue.waiting for dispatcher in self.dispatchers)

    def queue_length(self, model: str) -> int:
        """Return the number of waiting requests of `model`."""
        return sum(dispatcher.queue.length(model) for dispatcher in self.dispatchers)

    def arrival_rate(self, model: str) -> float:
        """Return the measured arrival rate of `model`, 1/s."""
        return sum(dispatcher.queue.arrival_rate(model) for dispatcher in self.dispatchers)

    def capacity(self, model: str) -> float:
        """Return the largest service rate of the serving devices together, by their profiles, 1/s."""
        return sum(dispatcher.chosen[model].profile.capacity for dispatcher in self._serving_of[model])

    @property
    def models(self) -> Sequence[str]:
        """The models of all devices."""
        return [*self._serving_of]

    def devices_of(self, model: str) -> Sequence[Dispatcher]:
        """Return the devices that have the model, serving or not."""
        return [dispatcher for dispatcher in self.dispatchers if model in dispatcher.chosen]

    def first_of(self, model: str) -> Dispatcher:
        """Return the first device that serves the model, or else has it, for callers that need any one of them."""
        return (self._serving_of[model] or self.devices_of(model))[0]

    def is_ready(self, model: str) -> bool:
        """Whether new calls of the model should be sent to this server."""
        loaded = not self.shutting_down and model not in self.unloaded
        return loaded and any(dispatcher.ready for dispatcher in self._serving_of[model])

    @property
    def open_calls(self) -> int:
        """Number of calls that are accepted and not answered."""
        return sum(dispatcher.open_calls for dispatcher in self.dispatchers)

    @property
    def ready(self) -> bool:
        """Whether new calls should be sent to this server."""
        return not self.shutting_down and any(dispatcher.ready for dispatcher in self._serving)

    @property
    def alive(self) -> bool:
        """Whether a device serves, and all dispatchers of devices that are not lost are alive."""
        return not self.broken.is_set() and all(d.alive or d.broken.is_set() for d in self.dispatchers)

    def serves(self, dispatcher: Dispatcher) -> bool:
        """Whether this device gets new calls, once it is available."""
        return dispatcher not in self._retired and not dispatcher.broken.is_set()

    def set_serving(self, index: int, serving: bool) -> None:
        """Retire a device, or resume it.

        Raises:
            NotFoundError: there is no device of this index.
            BadInputError: it is lost, or it is the last device that serves one of its models.
            DrainingError: the server is stopping.
        """
        if not 0 <= index < len(self.dispatchers):
            raise NotFoundError(f"there is no device {index}; there are {len(self.dispatchers)}, counted from 0")
        changed = self.dispatchers[index]
        if self.shutting_down:
            raise DrainingError("the server is stopping; devices cannot be retired or resumed", 1)
        if changed.broken.is_set():
            raise BadInputError(f"{changed.device} is lost; restart the server to use it again")
        if serving == self.serves(changed):
            return
        others = [dispatcher for dispatcher in self._serving if dispatcher is not changed]
        alone = next((model for model in changed.chosen if not any(model in d.chosen for d in others)), None)
        if not serving and alone is not None:
            raise BadInputError(f"{changed.device} is the last device that serves {alone}; resume another one first")
        _log.warning("%s is %s", changed.device, "resumed" if serving else "retired: it gets no new calls")
        if serving:
            self._retired.remove(changed)
            changed.policies.resume()
        else:
            self._retired.add(changed)
            changed.policies.drain()
        self._update_serving()

    async def run(self) -> None:
        """Serve on all devices until cancelled, or until all are lost; then `broken` is set."""
        await asyncio.gather(*(dispatcher.run() for dispatcher in self.dispatchers))

    async def drain(self) -> None:
        """Reject new calls, serve the accepted ones without waiting for more, and return when all are answered."""
        self.shutting_down = self.draining = True
        for drain in self.before_drain:
            await drain()
        while True:
            await asyncio.gather(*(dispatcher.drain() for dispatcher in self.dispatchers))
            if not self.open_calls:  # the calls of a device that was lost meanwhile have moved to another
                return

    def abandon(self) -> None:
        """Reject new calls, and fail the accepted ones, to stop the server without draining."""
        for dispatcher in self.dispatchers:
            dispatcher.abandon()

    def _route(self, model: str, n: int, level: int) -> Dispatcher:
        """Return the device to which `n` more samples go, if the queues of all devices together have room for them.

        Raises:
            UnavailableError: no device of the model works.
        """
        if len(self.dispatchers) == 1:  # it checks its own capacity
            return self.dispatchers[0]
        if not self._serving_of[model]:
            raise UnavailableError(f"no device of {model} works; send the request again, or to another server", 1)
        places = levels_of(self.dispatchers[0].levels, model).places(self._capacity, level)
        reject_if_full(n, self.waiting, places, partial(self.backlog, model, level))
        return self._least_delay(model, n, level)

    def _least_delay(self, model: str, n: int, level: int | None = None) -> Dispatcher:
        """Return the device with the least expected response time for `n` more samples of a priority level."""
        serving = self._serving_of[model]
        return serving[least_delay([dispatcher.backlog({model: n}, level) for dispatcher in serving])]

    def _update_serving(self) -> None:
        """Find the devices that get new calls: those that work and are not retired."""
        self._serving = tuple(d for d in self.dispatchers if d.up and d not in self._retired)
        models = dict.fromkeys(model for dispatcher in self.dispatchers for model in dispatcher.chosen)
        self._serving_of = {model: [d for d in self._serving if model in d.chosen] for model in models}

    def _reassign(self, calls: Sequence[InferenceCall], error: ServerError) -> None:
        """Move the calls of a device that is lost or unavailable to the other devices of their models.

        Retired devices are resumed if no other device of a model is serving.
        """
        if all(dispatcher.broken.is_set() for dispatcher in self.dispatchers):
            _log.critical("all devices are lost; the server exits, to be restarted by its supervisor")
            self.broken.set()
            fail_all(calls, error)
            return
        self._update_serving()
        for model in [model for model, serving in self._serving_of.items() if not serving]:
            resumed = [d for d in self.dispatchers if d.up and d in self._retired and model in d.chosen]
            for dispatcher in resumed:
                _log.critical("%s is resumed: no other device of %s works", dispatcher.device, model)
                if not self.draining:
                    dispatcher.policies.resume()
            if not resumed:
                _log.critical("no device of %s works; its calls are rejected", model)
            self._retired.difference_update(resumed)
            self._update_serving()
        moving = [call for call in calls if call.losses < _MAX_LOSSES and self._serving_of[call.model]]
        if calls:
            _log.critical("%d of %d calls move to other devices", len(moving), len(calls))
        for call in moving:
            self._least_delay(call.model, call.missing).enqueue(call)
        fail_all(set(calls).difference(moving), error)
