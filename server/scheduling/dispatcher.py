"""The dispatcher: a Batcher on the event loop's clock, in front of one executor.

The loop is the system: decide; launch, and answer the batch before while the device works; or wait for an arrival or
an instant; decide again. It is the only writer of the queue, and everything here runs on the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

from policies.catalog import Chosen, choose, combine
from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.queue.monitor import successor
from policies.types import Action, Launch, Request, Wait
from server.backends.executor import Batch, Completion, Executor
from server.errors import DeviceLostError, DrainingError, ExecutionError, ServerError, UnavailableError
from server.models.text import count_tokens, generated_lengths
from server.scheduling.admission import DEFAULT_LIMITS, Admission, Limits
from server.scheduling.calls import Answer, BatchRun, Call, batch_of, end_early, fail_all
from server.scheduling.delivery import Delivery
from server.scheduling.expiry import Expiry
from server.scheduling.forecast import Forecast
from server.scheduling.lookahead import Ahead
from server.scheduling.recovery import Part, complete, rescue, watched
from server.scheduling.timer import Alarm
from server.telemetry.batch_record import BatchRecord
from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright.dispatcher")
_HUNG_AFTER = 20.0  # times the most that it should take, a batch is held for hung
_GRACE = 5.0  # s that the loop may be late before it counts as stuck


class Dispatcher:
    """Queues requests for one device and launches batches as the policy decides.

    Attributes:
        chosen: by model, the policy that decides now, its profile, and where they came from.
        delivery: gives the answers out.
        on_shrunk: told of a model whose batches have to be smaller from now on, and what decided before.
        on_broken: given the calls without an answer when nothing can be served any more, and the error they get if
            nobody else takes them.
        broken: set when nothing can be served any more: the device is lost, or the loop itself broke.
    """

    on_shrunk: Callable[[str, Chosen], None] | None = None
    on_broken: Callable[[Sequence[Call], ServerError], None] = staticmethod(fail_all)

    def __init__(
        self,
        executor: Executor,
        chosen: Mapping[str, Chosen],
        metrics: Metrics,
        clock: Callable[[], float],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """`clock` is the executor's own, time.monotonic, s."""
        self.chosen = dict(chosen)
        self.broken = asyncio.Event()
        self._executor = executor
        self._metrics = metrics
        self._clock = clock
        self._admission = Admission(limits)
        self.delivery = Delivery(metrics)
        policy, monitor = combine(self.chosen)
        largest = {model: choice.profile.max_batch_size for model, choice in chosen.items()}
        iterating = [model for model, choice in chosen.items() if choice.profile.lengths is not None]
        self._batcher = Batcher(policy, largest, monitor, iterating)
        self._forecast = Forecast(self.chosen, self._batcher, clock)
        self._turns_by = inf  # when the loop should have come round again
        self._ids = count()
        self._wake = asyncio.Event()
        self._all_answered = asyncio.Event()
        self._calls: dict[Call, None] = {}  # in the order in which they came
        self._draining = False
        self._ahead = Ahead(self._batcher, self._forecast, clock)
        self._undelivered: BatchRecord | None = None
        self._last_finish: float | None = None  # of the batch before, while nobody has waited since
        self._expiry = Expiry(self._batcher, self._forecast, self._admission)
        self._alarm = Alarm(clock, self._on_expiry)  # a busy device does not delay it

    # what the gateway asks

    def submit(
        self, model: str, inputs: Sequence[Any], timeout: float = inf, sizes: Sequence[float] = ()
    ) -> "asyncio.Future[list[Answer]]":
        """Queue one call's samples, all or none; cancelling the future takes them out again.

        Args:
            model: one of `chosen`.
            inputs: decoded samples, uint8 [H, W, 3] or `TextSample` each; at least one.
            timeout: time after which the client no longer wants the answer, s.
            sizes: predicted service time of each when served alone, s, where requests differ.

        Raises:
            QueueFullError: there is no room for all of them, or no time.
            DrainingError: the server is stopping.
        """
        earliest, now = self.check_room(model, len(inputs), timeout), self._clock()
        future: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        call = Call(
            future,
            model,
            inputs,
            sizes,
            arrival=now,
            expires=now + timeout,
            earliest=earliest,
            span=self.delivery.current_span(),
        )
        self._metrics.history.arrived(model, len(inputs))
        self.take(call)
        return call.future

    def take(self, call: Call) -> None:
        """Queue the samples of a call that have no answer: all, or what another device has left. Nobody is refused."""
        now = self._clock()
        for request in call.make_requests(self.chosen[call.model], self._ids):
            self._batcher.arrive(request, now)
        call.future.add_done_callback(lambda _: self._leave(call))
        self._calls[call] = None
        if not self._batcher.busy:
            self._turns_by = now
        self._changed()
        self._alarm.set(self._batcher.next_expiry())

    def check_room(self, model: str, n: int, timeout: float = inf) -> float:
        """Whether `n` more samples of `model` would be admitted now; a gateway may ask before it reads the body.

        Returns:
            The least instant at which they could be answered, s; 0 without a time-out, or where so little is here that
            a policy may wait for more: what is late then is not late for want of time.

        Raises:
            QueueFullError: there is no room for them, or their answers would come after `timeout`, s.
            DrainingError: the server is stopping.
        """
        if self._draining or self.broken.is_set():
            raise DrainingError("the server is stopping; send the request to another one", 1)
        self._admission.refuse_if_full(n, self._batcher.queue_length, self.backlog)
        if timeout == inf:
            return 0.0
        now, needed = self._clock(), self._forecast.to_serve({model: n})
        backlogged = self._forecast.backlogged(model, n, needed)
        self._admission.refuse_if_late(needed, timeout, now if backlogged else None)
        return now + needed if backlogged else 0.0

    def backlog(self, more: Mapping[str, int] | None = None) -> float:
        """The least time in which the device serves everybody who is here, and `more` by model, s."""
        return self._forecast.to_serve(more or {})

    def use(self, model: str, chosen: Chosen) -> Chosen:
        """From the next decision on, decide for `model` by this policy, with batches of up to its profile's largest.

        Queued requests and the rate estimate survive the swap.

        Returns:
            What decides from now on: the policy, with a monitor that counts as it wants and knows the rate.
        """
        self.chosen[model] = replace(chosen, monitor=successor(self.chosen[model].monitor, chosen.monitor))
        self._batcher.limit(model, chosen.profile.max_batch_size)
        self._decide_by_chosen()
        return self.chosen[model]

    def _decide_by_chosen(self) -> None:
        if not self._draining:
            self._batcher.policy, self._batcher.monitor = combine(self.chosen)
            self._batcher.rekind(lambda request: self.chosen[request.kind.model].kind(request.kind.model, request.size))
        self._changed()

    @property
    def device(self) -> str:
        """The device's name, for metrics."""
        return self._executor.name

    def now(self) -> float:
        """The instant on the clock that all of this goes by, s."""
        return self._clock()

    @property
    def waiting(self) -> int:
        """The number of waiting requests, of all models."""
        return self._batcher.queue_length

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
        """Whether it admits calls."""
        return not (self._draining or self.broken.is_set())

    @property
    def alive(self) -> bool:
        """Whether the loop turns: it is not broken, and not overdue."""
        return not self.broken.is_set() and self._clock() <= self._turns_by + _GRACE

    def retire(self) -> None:
        """Refuse new calls, and serve what was accepted without waiting for more."""
        self._draining = True
        self._batcher.drain()
        self._changed()

    def resume(self) -> None:
        """Admit calls again, and decide by the policy."""
        self._draining = False
        self._decide_by_chosen()

    async def drain(self) -> None:
        """Retire, and return when all is answered."""
        self.retire()
        while self._calls:
            self._all_answered.clear()
            await self._all_answered.wait()

    def abandon(self) -> None:
        """Refuse new calls, and those accepted as well: whoever stops the server has lost patience."""
        self._draining = True
        error = DrainingError("the server stopped before the answer; send the request to another one", 1)
        fail_all(self._calls, error)

    # the loop

    async def run(self) -> None:
        """Decide and serve until cancelled, or until nothing can be served any more: then `broken` is set.

        Everybody gets an error then, or goes to whom `on_broken` gives them, and nobody new is admitted.
        """
        try:
            while True:
                await self._turn()
        except DeviceLostError as error:
            _log.critical("%s is lost (%s); the server has to be restarted to have it back", self.device, error)
            self._end(UnavailableError("the device is lost; send the request to another server", 1))
        except Exception as error:  # noqa: BLE001  (a bug here must not leave anybody without an answer)
            _log.exception("the dispatcher of %s broke; the server has to be restarted to have it back", self.device)
            self._end(ExecutionError(f"the dispatcher broke: {type(error).__name__}"))

    def _end(self, error: ServerError) -> None:
        self.broken.set()
        calls = [call for call in self._calls if not call.future.done()]
        for call in calls:
            call.lose()
            self._leave(call)
        self.on_broken(calls, error)

    async def _turn(self) -> None:
        self._wake.clear()
        match self._decide():
            case Launch() as launch:
                batch = batch_of(launch)
                now = BatchRun(self.chosen[batch.model].name, launch, batch, self._run(batch))
                self._deliver()  # the batch before, while the device works on this one
                await self._serve(now)
            case Wait(until):
                self._last_finish = None
                self._turns_by = until
                self._deliver()
                await self._sleep(until)

    def _run(self, batch: Batch) -> "asyncio.Future[Completion]":
        within = max(self._admission.limits.patience, _HUNG_AFTER * self._forecast.most(batch))
        now = self._clock()
        self._forecast.free_at, self._turns_by = now + self._forecast.least(batch), now + within
        return watched(self._executor, batch, within)

    def _decide(self) -> Action:
        now = self._clock()
        self._expiry.leave(now)
        try:
            self._expiry.drop_doomed(now)
            return self._batcher.decide(now)
        except Exception:  # noqa: BLE001  (a broken policy must not take the requests down with it)
            _log.exception("the policy failed; serving greedily until another one is set")
            for model in self.chosen:
                self._serve_greedily(model, self.chosen[model].profile)
            self._batcher.drain()
            return self._batcher.decide(now)

    async def _serve(self, now: BatchRun) -> None:
        """Wait for the device; and for what it goes on with unasked."""
        ahead = self._ahead.look(now.launch, now.batch, now.policy)
        for index, following in enumerate([*ahead, None]):
            try:
                completion = complete(now.batch, await now.running)
            except Exception as error:  # noqa: BLE001  (whatever the device raised, as few as possible fail for it)
                self._last_finish = None
                await self._rescue(now, error)
                return
            if self._last_finish is not None:
                self._metrics.idle_gap(self._executor.name, completion.started - self._last_finish)
            onward = now.batch.onward
            if following is None or onward is None or onward.taken <= index:
                end_early(now.launch, now.launch.requests, completion)
                self._undelivered = self._completed(now, completion, self._batcher.complete(now.launch))
                self._last_finish = completion.finished if len(self._batcher) else None
                return
            self._batcher.go_on(now.launch)
            self._undelivered = self._completed(now, completion, ())
            self._last_finish = completion.finished
            self._deliver()
            now = replace(following, batch=replace(following.batch, inputs=completion.outputs))

    def _changed(self) -> None:
        """Something has happened: whatever was decided ahead of it is decided anew."""
        self._ahead.withdraw()
        self._wake.set()

    async def _rescue(self, now: BatchRun, error: Exception) -> None:
        launch, batch = now.launch, replace(now.batch, onward=None)
        _log.error("a batch of %d failed", len(launch.requests), exc_info=error)
        self._metrics.device_fault(batch.model, type(error).__name__)
        rescued = await rescue(self._run, batch, error)
        for part in rescued.parts:
            if isinstance(part.result, Completion):
                end_early(launch, part.of(launch.requests), part.result)
        finished = self._batcher.complete(launch)
        for part in rescued.parts:
            mine = replace(launch, requests=part.of(launch.requests))
            if isinstance(part.result, Completion):
                tried, here = replace(batch, inputs=part.of(batch.inputs)), [r for r in mine.requests if r in finished]
                self._answer(self._completed(replace(now, launch=mine, batch=tried), part.result, here))
            else:
                self._fail_alone(mine.requests, part)
        self.delivery.report_disturbance(batch.model)  # the attempts that failed took energy, too
        if rescued.largest is not None:
            self._shrink(batch.model, rescued.largest)

    def _fail_alone(self, requests: Sequence[Request], part: Part) -> None:
        for request in requests:
            call = request.payload.call
            _log.error("the device failed on request %d alone: %s", request.id, part.error)
            call.fail(ExecutionError(f"the device failed on this input alone, with {type(part.result).__name__}"))
            for other in call.requests:  # nobody waits for them any more
                self._batcher.cancel(other)

    def _shrink(self, model: str, largest: int) -> None:
        """Greedy service within what the memory takes, until somebody solves for it."""
        before = self.chosen[model]
        if largest >= before.profile.max_batch_size:
            return
        _log.error("%s: out of memory; batches are of at most %d from now on", model, largest)
        self._serve_greedily(model, before.profile.truncated(largest))
        if self.on_shrunk is not None:
            try:
                self.on_shrunk(model, before)
            except Exception:  # noqa: BLE001  (who watches must not take down what it watches)
                _log.exception("nobody solves for the smaller batches; they are served greedily")

    def _serve_greedily(self, model: str, profile: Profile) -> None:
        self.use(model, choose("greedy", profile, self.chosen[model].defaults))
        self._metrics.policy(model, self.device, "greedy", "greedy")

    async def _sleep(self, until: float) -> None:
        if until == inf:
            await self._wake.wait()
            return
        timer = asyncio.get_running_loop().call_later(max(0.0, until - self._clock()), self._wake.set)
        await self._wake.wait()  # a timer may fire early: the next decision then waits again
        timer.cancel()

    # the ways out of the house

    def _completed(self, run: BatchRun, completion: Completion, finished: Sequence[Request]) -> BatchRecord:
        energy = self._forecast.energy(run.batch)
        run.hand_on(completion, energy)
        return BatchRecord(
            self.device,
            run.policy,
            run.launch,
            run.batch.first_stage,
            run.whole,
            finished,
            completion.started,
            completion.finished,
            energy,
            self.chosen[run.batch.model].profile.energy_source,
            count_tokens(run.batch.inputs, completion.outputs, run.launch.stages),
            generated_lengths(completion.outputs),
        )

    def _deliver(self) -> None:
        batch, self._undelivered = self._undelivered, None
        if batch is not None:
            self._answer(batch)

    def _answer(self, batch: BatchRecord) -> None:
        now = self._clock()
        for call in self.delivery.answer(batch, now, self._batcher.queue_length):
            self._admission.seen(call.earliest, now)
        self.delivery.report(batch, self._clock())

    def _leave(self, call: Call) -> None:
        """The call is answered, failed, cancelled or another device's: whoever of it is still here goes."""
        if call not in self._calls:
            return
        if call.missing:
            self._changed()
            for request in call.requests:
                self._batcher.cancel(request)
        call.requests.clear()
        del self._calls[call]
        if not self._calls:
            self._all_answered.set()

    # time-outs of clients

    def _on_expiry(self) -> None:
        self._expiry.leave(self._clock())
        self._changed()
        self._alarm.set(self._batcher.next_expiry())
