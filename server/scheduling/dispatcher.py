"""The dispatcher: a Batcher on the event loop's clock, in front of one executor.

Its loop decides, then launches a batch and fans out the results of the previous one meanwhile, or waits for an arrival
or an instant. It is the only writer of the queue. All of it runs on the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from policies.catalog import ModelPolicy, choose, combine
from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.queue.monitor import inherit_rates
from policies.rules.finish_first import FinishRetired
from policies.rules.per_kind import slowdowns
from policies.types import Action, BatchKey, Launch, Request, Wait
from server.backends.executor import (
    LOAD_TIMEOUT,
    TIMEOUT_FACTOR,
    Batch,
    Completion,
    Executor,
    RecoverableExecutor,
    RestartableExecutor,
    check_outputs,
    start_timeout,
    with_timeout,
)
from server.errors import (
    BadInputError,
    DeviceLostError,
    DeviceUnavailableError,
    DrainingError,
    ExecutionError,
    ExpiredError,
    ServerError,
    UnavailableError,
    WorkerDiedError,
)
from server.scheduling.admission import DEFAULT_LIMITS, Admission, Limits, reject_if_full, reject_if_too_many_shapes
from server.scheduling.calls import BatchRun, InferenceCall, Sample, fail_all, make_batch
from server.scheduling.forecast import Forecast
from server.scheduling.lookahead import Lookahead
from server.scheduling.recovery import Deaths, Part, recover
from server.telemetry.batch_record import BatchRecord
from server.telemetry.logs import log_batch
from server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright.dispatcher")
_GRACE = 5.0  # s by which the loop may be late; it then is not alive
_CHECK_INTERVAL = 1.0  # s, of an idle device that may become unavailable
_NEGLIGIBLE = 1e-3  # 1/s; a lower rate is reported as 0, since the estimate decays for ever


class Dispatcher:
    """Queues requests for one device and launches batches as the policy decides.

    Attributes:
        chosen: by model, the current policy, its profile, and its spec.
        tracing: links the spans of calls and batches; None: nothing is traced.
        on_served: called after each whole batch, with model, size, time to the launch of the next batch, s, or service
            time if the device began none, and the length of the longest request, 0 where requests do not differ.
        on_unprofiled_work: called in its place with a model that ran single stages, a failed attempt, or beside other
            work, whose times or energy the profile does not predict.
        on_batch_size_reduced: called with a model whose maximum batch size was reduced, and its policy before.
        learned: returns the profile of a model as it is known now; by default the one in use.
        on_broken: called when nothing can be served any more, or for now, with the calls that have no answer, which
            another device may take over, and the error for the others.
        on_available: called when a device that was unavailable serves again.
        broken: set when nothing can be served any more: the device is lost, or the loop failed.
        available: whether the device can be used now; false while it recovers by itself, as another server may.
        shared: whether a model is being loaded on the device. Its batches disturb service times and energies, so that
            none of these are reported to `on_served`.
    """

    tracing: "Tracing | None" = None
    on_served: Callable[[str, int, float, float], None] | None = None
    on_unprofiled_work: Callable[[str], None] | None = None
    on_batch_size_reduced: Callable[[str, ModelPolicy], None] | None = None
    learned: Callable[[str], Profile]
    on_broken: Callable[[Sequence[InferenceCall], ServerError], None] = staticmethod(fail_all)
    on_available: Callable[[], None] | None = None
    available = True
    shared = False

    def __init__(
        self,
        executor: Executor,
        chosen: Mapping[str, ModelPolicy],
        metrics: Metrics,
        clock: Callable[[], float],
        limits: Limits = DEFAULT_LIMITS,
        by_shape: Collection[str] = (),
    ) -> None:
        """`clock` is the executor's, time.monotonic, s; `by_shape` are the models whose inputs vary in shape."""
        self.chosen = dict(chosen)
        self.learned = lambda model: self.chosen[model].profile
        self.broken = asyncio.Event()
        self._executor = executor
        self._upload: Callable[[str, Any], Any] | None = getattr(executor, "upload", None)
        self._recoverable = executor if isinstance(executor, RecoverableExecutor) else None
        self._metrics = metrics
        self._clock = clock
        self._limits = limits
        self._admission = Admission()
        self._by_shape = set(by_shape)
        self._loaded: dict[str, str | None] = {model: model for model in chosen}  # ids by name; None: unloaded
        self._retiring = set[str]()  # ids of models that were replaced, and still have calls
        policy, monitor = combine(self.chosen, self._by_shape)
        largest = {model: choice.profile.max_batch_size for model, choice in chosen.items()}
        tokens = {model: choice.profile.max_batch_tokens for model, choice in chosen.items()}
        self._batcher = Batcher(policy, largest, monitor, tokens)
        self._forecast = Forecast(self.chosen, self._batcher, clock)
        self._lookahead = Lookahead(self._batcher, self._forecast, self.chosen, clock)
        self._next_step_by = inf  # latest instant at which the loop should decide again
        self._check_at = inf if self._recoverable is None else 0.0  # instant of the next check of an idle device
        self._ids = count()
        self._wake = asyncio.Event()
        self._all_answered = asyncio.Event()
        self._calls: dict[InferenceCall, None] = {}  # in order of arrival
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deaths = Deaths()
        self._draining = self._restarting = False
        self._last_finish: float | None = None  # end of the previous batch; None if the policy has waited since
        self._expiry_timer: asyncio.TimerHandle | None = None  # fires also while the device is busy
        self._expiry_timer_at = inf

    def submit(
        self,
        model: str,
        inputs: Sequence[Any],
        timeout: float = inf,
        lengths: Sequence[float] = (),
        shapes: Sequence[str] = (),
        id: str = "",
    ) -> "asyncio.Future[list[Sample]]":
        """Queue the samples of a call, all or none; cancelling the future removes them from the queue.

        Args:
            model: one of `chosen`.
            inputs: decoded samples, as the model's codec made them; at least one.
            timeout: remaining timeout of the client, s.
            lengths: length of each sample, by which its service time differs; empty where requests do not differ.
            shapes: shape of each sample, with which it shares a batch; empty where they do not differ.
            id: of the model whose codec made the inputs; empty if that is its name.

        Raises:
            QueueFullError: the queue has no room for all of them.
            TooLateError: the answer is expected after the timeout.
            DrainingError: the server is stopping.
            TooManyShapesError: with these samples too many different shapes would wait.
        """
        if model in self._by_shape:
            reject_if_too_many_shapes(self._batcher.waiting_shapes(model).union(shapes), self.backlog)
        earliest, now = self.check_room(model, len(inputs), timeout), self._clock()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # a system call in Python 3.11
        future: asyncio.Future[list[Sample]] = self._loop.create_future()
        call = InferenceCall(
            future,
            model,
            inputs,
            lengths,
            shapes,
            arrival=now,
            expires=now + timeout,
            earliest=earliest,
            span=None if self.tracing is None else self.tracing.current(),
            id=id,
        )
        self._metrics.history.arrived(model, len(inputs))
        self.enqueue(call)
        return call.future

    def enqueue(self, call: InferenceCall) -> None:
        """Queue the samples of a call that have no answer yet, without admission control.

        The call may come from another device that was lost.
        """
        now = self._clock()
        for request in call.make_requests(self.chosen[call.model], self._ids):
            if self._upload is not None:
                request.payload.data = self._upload(call.id, request.payload.input)
            if self._retiring:
                request.kind = self._kind_of(request)
            self._batcher.arrive(request, now)
        call.future.add_done_callback(lambda _: self._remove(call))
        self._calls[call] = None
        if not self._batcher.busy:
            self._next_step_by = now
        self._on_change()
        if call.expires < inf:
            self._set_expiry_timer()

    def check_room(self, model: str, n: int, timeout: float = inf) -> float:
        """Check that `n` more samples of `model` would be admitted now; it can be called before the body is read.

        Returns:
            The least instant at which they could be answered, s. 0 without a timeout, or without a backlog: then the
            policy may wait for more requests, and the response time says nothing about the device's lateness.

        Raises:
            QueueFullError: the queue has no room for them.
            TooLateError: their answers are expected after `timeout`, s.
            DrainingError: the server is stopping.
            UnavailableError: the device is unavailable for now.
        """
        if self._draining or self.broken.is_set():
            raise DrainingError("the server is stopping; send the request to another one", 1)
        if not self.available:
            raise self._unavailable_error()
        reject_if_full(n, self._batcher.queue_length, self._limits.capacity, self.backlog)
        if timeout == inf:
            return 0.0
        now, needed = self._clock(), self._forecast.backlog({model: n})
        backlogged = self._forecast.is_backlogged(model, n, needed)
        self._admission.reject_if_late(needed, timeout, now if backlogged else None)
        return now + needed if backlogged else 0.0

    def backlog(self, more: Mapping[str, int] | None = None) -> float:
        """Return the least time in which the device serves all queued requests, and `more` by model, s."""
        return self._forecast.backlog(more or {})

    def set_policy(self, model: str, chosen: ModelPolicy) -> ModelPolicy:
        """Set the policy of `model`, and the limits of batches to those of its profile, from the next decision on.

        Queued requests and the rate estimate survive the swap.

        Returns:
            The policy as set, with a monitor that continues from the current rate estimate.
        """
        self.chosen[model] = replace(chosen, monitor=inherit_rates(self.chosen[model].monitor, chosen.monitor))
        self._batcher.set_limits(model, chosen.profile.max_batch_size, chosen.profile.max_batch_tokens)
        self._apply_policies()
        return self.chosen[model]

    def switch(self, model: str, id: str | None, chosen: ModelPolicy | None = None, by_shape: bool = False) -> None:
        """Give the name `model` to another loaded model, for the calls that are made from now on, with its policy.

        The calls of the former one are served by that, without waiting for more, until `forget`.

        Args:
            model: one of `chosen`.
            id: of the loaded model; the executor has it. None: the name has none any more.
            chosen: its policy and profile.
            by_shape: whether its inputs vary in shape.
        """
        former, self._loaded[model] = self._loaded[model], id
        if former is not None:
            self._retiring.add(former)
        if chosen is None:
            self._apply_policies()
            return
        (self._by_shape.add if by_shape else self._by_shape.discard)(model)
        self.set_policy(model, chosen)

    def forget(self, id: str) -> None:
        """Launch by the policy alone again, since a model that was replaced has no calls any more."""
        self._retiring.discard(id)
        self._apply_policies()

    def _apply_policies(self) -> None:
        self._batcher.set_kinds(self._kind_of)
        if not self._draining:
            policy, self._batcher.monitor = combine(self.chosen, self._by_shape)
            self._batcher.policy = FinishRetired(policy, self._batcher.drain_policy()) if self._retiring else policy
        self._on_change()

    def _kind_of(self, request: Request) -> BatchKey:
        """The kind of a queued request by the present policy; its size becomes that of the present profile."""
        model, loaded = request.kind.model, request.payload.call.id
        request.size = self.chosen[model].profile.time_alone(request.payload.length)
        kind = self.chosen[model].kind(model, request.size, request.kind.shape)
        return kind if loaded == self._loaded[model] else kind._replace(retired=loaded)

    @property
    def device(self) -> str:
        """The device's name in the metrics."""
        return self._executor.name

    def now(self) -> float:
        """Return the current instant on the dispatcher's clock, s."""
        return self._clock()

    @property
    def waiting(self) -> int:
        """The number of waiting requests, of all models."""
        return self._batcher.queue_length

    def queue_length(self, model: str) -> int:
        """Return the number of waiting requests of `model`."""
        return self._batcher.waiting_of(model)

    def oldest_age(self, model: str) -> float:
        """Return the age of the oldest waiting request of `model`, s; 0 without one."""
        return max(self._clock() - self._batcher.oldest_of(model), 0.0)

    def arrival_rate(self, model: str) -> float:
        """Return the measured arrival rate of `model`, 1/s; 0 if it is negligible."""
        rates = self._batcher.monitor.rates(self._clock())
        rate = sum(rate for kind, rate in rates.items() if kind.model == model)
        return rate if rate >= _NEGLIGIBLE else 0.0

    def slowdown(self, model: str) -> float:
        """Return the factor by which other models slow the device down in the table of `model`; 1 if it has none."""
        if not self.chosen[model].uses_slowdown:
            return 1.0
        profiles = {name: each.profile for name, each in self.chosen.items()}
        return slowdowns(self._batcher.monitor.rates(self._clock()), profiles).get(model, 1.0)

    def worker_of(self, model: str) -> dict[str, Any]:
        """Facts of the process of a model; empty without one."""
        find: Callable[[str], dict[str, Any]] | None = getattr(self._executor, "worker_of", None)
        return {} if find is None else find(model)

    @property
    def open_calls(self) -> int:
        """Number of calls that are accepted and not answered."""
        return len(self._calls)

    @property
    def up(self) -> bool:
        """Whether the device works."""
        return self.available and not self.broken.is_set()

    @property
    def ready(self) -> bool:
        """Whether new calls are admitted, and no process of a model is being started again."""
        return self.up and not (self._draining or self._restarting)

    @property
    def alive(self) -> bool:
        """Whether the loop runs: it is not broken, and not overdue."""
        return not self.broken.is_set() and self._clock() <= self._next_step_by + _GRACE

    def retire(self) -> None:
        """Reject new calls, and serve the accepted ones without waiting for more."""
        self._draining = True
        self._batcher.drain()
        self._on_change()

    def resume(self) -> None:
        """Admit calls again, and launch by the policy."""
        self._draining = False
        self._apply_policies()

    async def drain(self) -> None:
        """Retire, and return when all calls are answered."""
        self.retire()
        while self._calls:
            self._all_answered.clear()
            await self._all_answered.wait()

    def abandon(self) -> None:
        """Reject new calls, and fail the accepted ones, to stop the server without draining."""
        self._draining = True
        error = DrainingError("the server stopped before the answer; send the request to another one", 1)
        fail_all(self._calls, error)

    async def run(self) -> None:
        """Serve until cancelled, or until nothing can be served any more.

        Then `broken` is set, `on_broken` gets the calls that have no answer, and new calls are rejected.
        """
        try:
            while True:
                try:
                    await self._step()
                except DeviceUnavailableError as error:
                    await self._wait_until_available(error)
        except DeviceLostError as error:
            _log.critical("%s is lost (%s); restart the server to use it again", self.device, error)
            self._end(UnavailableError("the device is lost; send the request to another server", 1))
        except Exception as error:  # noqa: BLE001  (a bug here must not leave a call without an answer)
            _log.exception("the dispatcher of %s failed; restart the server to use it again", self.device)
            self._end(ExecutionError(f"the dispatcher failed: {type(error).__name__}"))

    async def _wait_until_available(self, error: DeviceUnavailableError) -> None:
        """Give up all calls, and return when the device can serve again."""
        assert self._recoverable is not None
        _log.error("%s is unavailable: %s", self.device, error)
        self.available, self._next_step_by = False, inf
        self._give_up(self._unavailable_error())
        await self._recoverable.wait_until_available()
        _log.warning("%s is available again", self.device)
        self.available = True
        if self.on_available is not None:
            self.on_available()

    def _unavailable_error(self) -> UnavailableError:
        return UnavailableError(f"{self.device} does not answer for now; send the request again", 1)

    def _end(self, error: ServerError) -> None:
        self.broken.set()
        self._give_up(error)
        self._batcher.abandon()  # another device serves them, and frees their calls

    def _give_up(self, error: ServerError) -> None:
        calls = [call for call in self._calls if not call.future.done()]
        for call in calls:
            call.lose_device()
            self._remove(call)
        self.on_broken(calls, error)

    async def _step(self) -> None:
        """Make one decision and carry it out."""
        self._wake.clear()
        match self._decide():
            case Launch() as launch:
                batch = make_batch(launch, self._lookahead.standby)
                await self._serve(BatchRun(self.chosen[batch.model].name, launch, batch, self._run(batch)))
            case Wait(until):
                self._last_finish = None
                self._next_step_by = until
                if self._recoverable is not None and self._clock() >= self._check_at:
                    self._check_at = self._clock() + _CHECK_INTERVAL
                    await self._recoverable.check()
                else:
                    await self._sleep(min(until, self._check_at))

    def _run(self, batch: Batch) -> "asyncio.Future[Completion]":
        self._begin(batch)
        return with_timeout(self._executor, batch, self._timeout(batch))

    def _timeout(self, batch: Batch) -> float:
        return max(self._limits.batch_timeout, TIMEOUT_FACTOR * self._forecast.greatest_time(batch))

    def _begin(self, batch: Batch) -> None:
        """Expect the end of a batch, whose service begins now."""
        now = self._clock()
        self._forecast.free_at, self._next_step_by = now + self._forecast.least_time(batch), now + self._timeout(batch)
        if self._recoverable is not None:
            self._check_at = now + _CHECK_INTERVAL

    def _decide(self) -> Action:
        now = self._clock()
        self._expire(now)
        try:
            self._drop_late(now)
            return self._batcher.decide(now)
        except Exception:  # noqa: BLE001  (a bug of a policy must not fail the requests)
            _log.exception("the policy failed; serving greedily until another one is set")
            for model in self.chosen:
                self._serve_greedily(model, self.chosen[model].profile)
            self._batcher.drain()
            return self._batcher.decide(now)

    async def _serve(self, run: BatchRun) -> None:
        """Wait for the completion of a batch, and of those that the device takes from the standby after it."""
        following: BatchRun | None = run
        began = self._clock()
        while following is not None:
            run = following
            self._lookahead.begin(run, began)
            try:
                completion = check_outputs(run.batch, await run.running)
            except Exception as error:  # noqa: BLE001  (whatever the device raised, as few requests as possible fail)
                self._last_finish, began = None, self._clock()
                following = self._lookahead.end(began)
                if following is not None and not following.batch.inputs:
                    following = None  # a stage of the failed batch itself
                await self._recover(run, error, following)
            else:
                began = completion.finished
                following = self._lookahead.end(began)
                if following is not None and not following.batch.inputs:
                    following = replace(following, batch=replace(following.batch, inputs=completion.outputs))
                self._complete(run, completion, following)
            if following is not None:
                self._begin(following.batch)
                start_timeout(following.running, len(following.batch.inputs), self._timeout(following.batch))

    def _complete(self, run: BatchRun, completion: Completion, following: BatchRun | None) -> None:
        """Answer the calls of a completed batch, which the device may have followed by another one."""
        if self._last_finish is not None:
            self._metrics.idle_gap(self._executor.name, completion.started - self._last_finish)
        if following is not None and following.launch.requests is run.launch.requests:
            self._batcher.advance(run.launch)
            finished: Sequence[Request] = ()
        else:
            finished = self._batcher.complete(run.launch)
        self._answer(self._record(run, completion, finished))
        self._last_finish = completion.finished if following is not None or len(self._batcher) else None
        self._deaths.clear()

    def _on_change(self) -> None:
        """Wake the loop, and look ahead again, since the queue or the policy has changed."""
        self._lookahead.change()
        self._wake.set()

    async def _recover(self, run: BatchRun, error: Exception, following: BatchRun | None = None) -> None:
        """Retry a failed batch part by part; `following` is in service after it."""
        launch, batch = run.launch, replace(run.batch, standby=None)
        # the reason is logged once, without a traceback, where that says nothing more
        known = isinstance(error, DeviceUnavailableError) or (isinstance(error, ServerError) and not error.__cause__)
        if isinstance(error, WorkerDiedError):
            _log.error("%s: %s", batch.model, error)
            known = True
            await self._deaths.count(error, self._clock())
        if not isinstance(error, BadInputError):  # which is the client's fault
            _log.error("%s: a batch of %d failed", batch.model, len(launch.requests), exc_info=None if known else error)
            self._metrics.device_fault(batch.model, type(error).__name__)
        error.__traceback__ = None  # its frames have the inputs
        try:
            recovery = await recover(self._run, self._restart, batch, error)
        except DeviceUnavailableError:
            self._batcher.fail(launch)
            if following is not None:
                self._batcher.fail(following.launch)
            raise
        for part in recovery.parts:
            if isinstance(part.result, Completion):
                self._deaths.clear()
        finished = self._batcher.complete(launch)
        for part in recovery.parts:
            own = replace(launch, requests=part.of(launch.requests))
            if isinstance(part.result, Completion):
                retried = replace(batch, inputs=part.of(batch.inputs))
                completed = [request for request in own.requests if request in finished]
                self._answer(self._record(replace(run, launch=own, batch=retried), part.result, completed))
            else:
                self._fail(batch.model, own.requests, part)
        self._report(self.on_unprofiled_work, batch.model)  # failed attempts took energy, too
        if (
            recovery.max_batch_size is not None and batch.model not in self._by_shape
        ):  # else it is the shape that is large
            self._reduce_batch_size(batch.model, recovery.max_batch_size)

    async def _restart(self, model: str, error: DeviceLostError) -> None:
        if not isinstance(self._executor, RestartableExecutor):
            raise error
        self._next_step_by = self._clock() + LOAD_TIMEOUT
        self._restarting = True
        try:
            await self._deaths.survive(partial(self._executor.restart, model, error), self._clock)
        finally:
            self._restarting = False

    def _fail(self, model: str, requests: Sequence[Request], part: Part) -> None:
        for request in requests:
            call = request.payload.call
            level = logging.INFO if isinstance(part.result, BadInputError) else logging.ERROR
            _log.log(level, "%s: the model failed on request %d alone: %s", model, request.id, part.error)
            failed = f"the model failed on this input alone, with {type(part.result).__name__}"
            call.fail(part.result if isinstance(part.result, ServerError) else ExecutionError(failed))
            for other in call.requests:  # their answers could not be sent
                self._batcher.cancel(other)

    def _reduce_batch_size(self, model: str, max_batch_size: int) -> None:
        """Reduce the maximum batch size, and serve greedily until the controller has solved a policy for it."""
        before = self.chosen[model]
        if max_batch_size >= before.profile.max_batch_size:
            return
        _log.error("%s: out of memory; the maximum batch size is %d from now on", model, max_batch_size)
        self._serve_greedily(model, before.profile.truncated(max_batch_size))
        if self.on_batch_size_reduced is not None:
            try:
                self.on_batch_size_reduced(model, before)
            except Exception:  # noqa: BLE001  (a bug in the controller must not end the dispatcher)
                _log.exception("no policy is solved for the smaller batches; they are served greedily")

    def _serve_greedily(self, model: str, profile: Profile) -> None:
        before = self.chosen[model]
        greedy = replace(choose("greedy", profile, before.defaults), promised=before.objective)
        self.set_policy(model, greedy)
        self._metrics.policy(model, self.device, "greedy", "greedy")

    async def _sleep(self, until: float) -> None:
        if until == inf:
            await self._wake.wait()
            return
        timer = asyncio.get_running_loop().call_later(max(0.0, until - self._clock()), self._wake.set)
        await self._wake.wait()  # a timer may fire early: the next decision then waits again
        timer.cancel()

    def _record(self, run: BatchRun, completion: Completion, finished: Sequence[Request]) -> BatchRecord:
        energy, profile = self._forecast.energy(run.batch), self.chosen[run.batch.model].profile
        run.record_outputs(completion, energy)
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
            profile.energy_source,
            completion.next_started,
        )

    def _answer(self, batch: BatchRecord) -> None:
        """Give the results of a batch to its calls, and then account for it: the answers are sent before that."""
        now = self._clock()
        if self.tracing is not None:
            self.tracing.batch(batch)
        for request in batch.finished:
            sample: Sample = request.payload
            sample.output, sample.data, sample.input = sample.data, None, None
            sample.batch_size, sample.device, sample.energy_source = batch.size, batch.device, batch.energy_source
            sample.waiting = request.started - request.arrival
            sample.service = batch.service if batch.whole else batch.ended - request.started
            call = sample.call
            call.complete()
            if not call.missing:
                self._admission.observe(call.earliest, now)
        asyncio.get_running_loop().call_soon(self._account, batch, self._batcher.queue_length)

    def _account(self, batch: BatchRecord, waiting: int) -> None:
        """Report a batch, with the queue length at its end, to the metrics, the log and the controller."""
        self._metrics.batch_completed(batch)
        self._metrics.requests_completed(batch.device, batch.finished)
        log_batch(batch, waiting)
        if self.shared or not batch.whole or batch.launch.requests[0].kind.retired:
            self._report(self.on_unprofiled_work, batch.model)
        elif self.on_served is not None:
            longest = max([request.payload.length for request in batch.launch.requests])
            self._report(self.on_served, batch.model, batch.size, batch.cycle, longest)

    def _report(self, observer: Callable[..., None] | None, *work: Any) -> None:
        """Report work of the device to the controller."""
        if observer is None:
            return
        try:
            observer(*work)
        except Exception:  # noqa: BLE001  (a bug in the controller must not end the dispatcher)
            _log.exception("the controller failed; the policy stays as it is from now on")
            self.on_served = self.on_unprofiled_work = None

    def _remove(self, call: InferenceCall) -> None:
        """Remove a call that is answered, failed, cancelled or moved to another device, with its queued requests."""
        if call not in self._calls:
            return
        if call.missing:
            self._lookahead.withdraw()
            self._on_change()
            for request in call.requests:
                self._batcher.cancel(request)
        call.requests.clear()
        if call.future.done():
            call.samples = []  # they refer to the call: their memory is freed at once, not by the garbage collector
        del self._calls[call]
        if not self._calls:
            self._all_answered.set()

    def _on_expiry(self) -> None:
        self._expiry_timer = None
        self._expire(self._clock())
        self._on_change()
        self._set_expiry_timer()

    def _set_expiry_timer(self) -> None:
        """Set the timer to the next expiry, unless it is set to an earlier one."""
        at = self._batcher.next_expiry()
        if at == inf:
            return
        if self._expiry_timer is not None:
            if self._expiry_timer_at <= at:
                return
            self._expiry_timer.cancel()
        self._expiry_timer_at = at
        self._expiry_timer = asyncio.get_running_loop().call_later(max(0.0, at - self._clock()), self._on_expiry)

    def _expire(self, now: float) -> None:
        """Drop the requests whose timeout has passed."""
        if self._batcher.next_expiry() <= now:
            self._lookahead.withdraw()
        for request in self._batcher.expire(now):
            self._fail_expired(request, now, now)

    def _drop_late(self, now: float) -> None:
        """Drop the requests of the next launch whose timeout passes before it can complete."""
        while (expiry := self._batcher.next_expiry()) < inf and expiry < now + self._forecast.next_launch_bound():
            action = self._batcher.policy.decide(self._batcher.state(now))
            if not isinstance(action, Launch):
                return
            end = now + self._forecast.least_time_of(action)
            late = [request for request in action.requests if request.expires < end]
            if not late:
                return
            for request in late:
                self._batcher.cancel(request)
                self._fail_expired(request, now, end)

    def _fail_expired(self, request: Request, now: float, answered: float) -> None:
        call, waited = request.payload.call, 1e3 * (now - request.arrival)
        self._admission.observe(call.earliest, answered)
        passes = "passed" if request.expires <= now else "would pass"
        call.fail(ExpiredError(f"after {waited:.0f} ms the timeout {passes} before an answer"))
