"""The dispatcher: a Batcher on the event loop's clock, in front of one executor.

The loop is the system: decide; launch, and answer the batch before while the device works; or wait for an arrival or
an instant; decide again. It is the only writer of the queue, and everything here runs on the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, inf
from typing import Any

from policies.catalog import Chosen, combine
from policies.queue.batcher import Batcher
from policies.types import Action, Kind, Launch, Request, Wait
from server.errors import DrainingError, ExecutionError, ExpiredError, QueueFullError, ServerError
from server.executor import Batch, Completion, Executor
from server.metrics import Metrics

_log = logging.getLogger("batchwright.dispatcher")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request.

    Attributes:
        output: float32 [classes].
        batch_size: size of the batch it was served in.
        waiting: arrival to launch, s.
        service: time of its batch on the device, s.
        energy: its share of the batch's energy by the profile, J; None where unknown.
    """

    output: Any
    batch_size: int
    waiting: float
    service: float
    energy: float | None


class _Call:
    """The samples of one HTTP call: separate requests, answered together."""

    __slots__ = ("answers", "future", "missing", "requests")

    def __init__(self, future: "asyncio.Future[list[Answer]]") -> None:
        self.future = future
        self.requests: list[Request] = []
        self.answers: list[Any] = []
        self.missing = 0

    def answer(self, index: int, answer: Answer) -> None:
        self.answers[index] = answer
        self.missing -= 1
        if self.missing == 0 and not self.future.done():
            self.future.set_result(self.answers)

    def fail(self, error: ServerError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Sample:
    """What `Request.payload` holds here."""

    input: Any
    call: _Call
    index: int


@dataclass(frozen=True, slots=True)
class _Done:
    """A finished batch whose answers are still to be given."""

    policy: str
    launch: Launch
    finished: Sequence[Request]
    completion: Completion


class Dispatcher:
    """Queues requests for one device and launches batches as the policy decides.

    Attributes:
        chosen: by model, the policy that decides now, its profile, and where they came from.
        on_served: told of each batch that is answered: model, size, service time and response times, s.
    """

    on_served: Callable[[str, int, float, Sequence[float]], None] | None = None

    def __init__(
        self,
        executor: Executor,
        chosen: Mapping[str, Chosen],
        metrics: Metrics,
        clock: Callable[[], float],
        capacity: int = 1024,
    ) -> None:
        """`clock` is the executor's own, time.monotonic, s; `capacity` counts waiting requests."""
        self.chosen = dict(chosen)
        self._executor = executor
        self._metrics = metrics
        self._clock = clock
        self._capacity = capacity
        policy, monitor = combine(self.chosen)
        largest = {model: choice.profile.max_batch_size for model, choice in chosen.items()}
        self._batcher = Batcher(policy, largest, monitor)
        self._ids = count()
        self._wake = asyncio.Event()
        self._all_answered = asyncio.Event()
        self._calls: set[_Call] = set()
        self._draining = False
        self._broken = False
        self._undelivered: _Done | None = None
        self._last_finish: float | None = None  # of the batch before, while nobody has waited since
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._expiry_at = inf

    # what the gateway asks

    def submit(self, model: str, inputs: Sequence[Any], timeout: float = inf) -> "asyncio.Future[list[Answer]]":
        """Queue one call's samples, all or none; cancelling the future takes them out again.

        Args:
            model: one of `chosen`.
            inputs: decoded samples, uint8 [H, W, 3] each; at least one.
            timeout: time after which the client no longer wants the answer, s.

        Raises:
            QueueFullError: there is no room for all of them.
            DrainingError: the server is stopping.
        """
        self._admit(model, len(inputs))
        now = self._clock()
        call = _Call(asyncio.get_running_loop().create_future())
        slo = self.chosen[model].slo
        for index, sample in enumerate(inputs):
            request = Request(
                next(self._ids), now, Kind(model), now + slo, now + timeout, payload=_Sample(sample, call, index)
            )
            call.requests.append(request)
            self._batcher.arrive(request)
        call.missing = len(inputs)
        call.answers = [None] * len(inputs)
        call.future.add_done_callback(lambda _: self._leave(call))
        self._calls.add(call)
        self._wake.set()
        self._arm_expiry()
        return call.future

    def use(self, model: str, chosen: Chosen) -> Chosen:
        """From the next decision on, decide for `model` by this policy. Nobody who waits is lost, nor is the rate.

        The monitor stays if the policy wants one of its kind, with the time constant that it has.

        Returns:
            What decides from now on: the policy, with the monitor that knows the rate.
        """
        monitor = self.chosen[model].monitor
        same = type(monitor) is type(chosen.monitor)
        self.chosen[model] = replace(chosen, monitor=monitor) if same else chosen
        if not self._draining:
            self._batcher.policy, self._batcher.monitor = combine(self.chosen)
        self._wake.set()
        return self.chosen[model]

    def now(self) -> float:
        """The instant on the clock that all of this goes by, s."""
        return self._clock()

    def queue_length(self, model: str) -> int:
        """How many requests of `model` wait."""
        return self._batcher.waiting_of(model)

    def arrival_rate(self, model: str) -> float:
        """Measured arrival rate of `model`, 1/s."""
        rates = self._batcher.monitor.rates(self._clock())
        return sum(rate for kind, rate in rates.items() if kind.model == model)

    @property
    def open_calls(self) -> int:
        """Calls accepted and not answered yet."""
        return len(self._calls)

    @property
    def ready(self) -> bool:
        """Whether new calls are admitted."""
        return not (self._draining or self._broken)

    async def drain(self) -> None:
        """Refuse new calls, serve what was accepted without waiting for more, and return when all is answered."""
        self._draining = True
        self._batcher.drain()
        self._wake.set()
        while self._calls:
            self._all_answered.clear()
            await self._all_answered.wait()

    # the loop

    async def run(self) -> None:
        """Decide and serve until cancelled.

        Should this loop itself break, everybody gets an error, nobody new is admitted, and it ends with the exception.
        """
        try:
            while True:
                await self._turn()
        except Exception as error:
            self._broken = True
            _log.exception("the dispatcher broke; the server has to be restarted")
            for call in list(self._calls):
                call.fail(ExecutionError(f"the dispatcher broke: {type(error).__name__}"))
            raise

    async def _turn(self) -> None:
        self._wake.clear()
        match self._decide():
            case Launch() as launch:
                running = self._executor.run(_batch(launch))
                self._deliver()  # the batch before, while the device works on this one
                await self._serve(launch, running)
            case Wait(until):
                self._last_finish = None
                self._deliver()
                await self._sleep(until)

    def _decide(self) -> Action:
        now = self._clock()
        self._expire(now)
        try:
            return self._batcher.decide(now)
        except Exception:  # noqa: BLE001  (a broken policy must not take the requests down with it)
            _log.exception("the policy failed; serving greedily until another one is set")
            self._batcher.drain()
            return self._batcher.decide(now)

    async def _serve(self, launch: Launch, running: "asyncio.Future[Completion]") -> None:
        policy = self.chosen[launch.requests[0].kind.model].name  # another one may be set during the service
        try:
            completion = await running
            if len(completion.outputs) != len(launch.requests):
                raise ExecutionError(f"{len(completion.outputs)} outputs for {len(launch.requests)} inputs")
        except Exception as error:  # noqa: BLE001  (whatever the device raised fails this batch, not the loop)
            self._fail(launch, error)
            return
        if self._last_finish is not None:
            self._metrics.idle_gap(self._executor.name, completion.started - self._last_finish)
        self._undelivered = _Done(policy, launch, self._batcher.complete(launch), completion)
        self._last_finish = completion.finished if len(self._batcher) else None

    def _fail(self, launch: Launch, error: Exception) -> None:
        _log.error("a batch of %d failed", len(launch.requests), exc_info=error)
        self._last_finish = None
        for request in self._batcher.fail(launch):
            call = request.payload.call
            call.fail(ExecutionError(f"the device failed: {type(error).__name__}"))
            for other in call.requests:  # nobody waits for them any more
                self._batcher.cancel(other)

    async def _sleep(self, until: float) -> None:
        if until == inf:
            await self._wake.wait()
            return
        timer = asyncio.get_running_loop().call_later(max(0.0, until - self._clock()), self._wake.set)
        await self._wake.wait()  # a timer may fire early: the next decision then waits again
        timer.cancel()

    # the ways out of the house

    def _deliver(self) -> None:
        done, self._undelivered = self._undelivered, None
        if done is None:
            return
        batch, completion = done.launch.requests, done.completion
        model, size = batch[0].kind.model, len(batch)
        service = completion.finished - completion.started
        energy = self.chosen[model].profile.energy(size)
        self._metrics.batch(self._executor.name, done.policy, done.launch, service, energy)
        now = self._clock()
        self._metrics.answered(self._executor.name, done.finished, now)
        share = None if energy is None else energy / size
        outputs = dict(zip((r.id for r in batch), completion.outputs, strict=True))
        for request in done.finished:
            answer = Answer(outputs[request.id], size, request.started - request.arrival, service, share)
            request.payload.call.answer(request.payload.index, answer)
        if self.on_served is not None:
            self._tell(model, size, service, [now - request.arrival for request in done.finished])

    def _tell(self, model: str, batch_size: int, service: float, responses: Sequence[float]) -> None:
        assert self.on_served is not None
        try:
            self.on_served(model, batch_size, service, responses)
        except Exception:  # noqa: BLE001  (who watches must not take down what it watches)
            _log.exception("watching the batches failed; the policy stays as it is from now on")
            self.on_served = None

    def _leave(self, call: _Call) -> None:
        """The call is answered, failed or cancelled: whoever of it is still here goes."""
        if call.missing:
            for request in call.requests:
                self._batcher.cancel(request)
        call.requests.clear()
        self._calls.discard(call)
        if not self._calls:
            self._all_answered.set()

    def _admit(self, model: str, n: int) -> None:
        if not self.ready:
            self._metrics.rejected(model, "draining" if self._draining else "broken", n)
            raise DrainingError("the server is stopping; send the request to another one", 1)
        waiting = self._batcher.queue_length
        if waiting + n > self._capacity:
            self._metrics.rejected(model, "queue_full", n)
            seconds = max(1, ceil(waiting / self.chosen[model].profile.capacity))
            raise QueueFullError(
                f"no room for {n} more: {waiting} of {self._capacity} places in the queue are taken; "
                f"come again in {seconds} s",
                seconds,
            )

    # time-outs of clients

    def _expire(self, now: float) -> None:
        for request in self._batcher.expire(now):
            waited = 1e3 * (now - request.arrival)
            request.payload.call.fail(ExpiredError(f"the time-out passed after {waited:.0f} ms, before an answer"))

    def _arm_expiry(self) -> None:
        """One timer, for the earliest expiry: a busy device does not delay it."""
        at = self._batcher.next_expiry()
        if at >= self._expiry_at:
            return
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        self._expiry_at = at
        delay = max(0.0, at - self._clock())
        self._expiry_timer = asyncio.get_running_loop().call_later(delay, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry_at = inf
        self._expire(self._clock())
        self._wake.set()
        self._arm_expiry()


def _batch(launch: Launch) -> Batch:
    first = launch.requests[0]
    return Batch(first.kind.model, [r.payload.input for r in launch.requests], first.stage, launch.stages)
