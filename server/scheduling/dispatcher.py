"""The dispatcher: a Batcher on the event loop's clock, in front of one executor.

Its loop decides, then launches a batch and fans out the results of the previous one meanwhile, or waits for an arrival
or an instant. It is the only writer of the queue. All of it runs on the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

from policies.catalog import ModelPolicy
from policies.profile import Profile
from policies.types import Action, Launch, Request, Wait
from server.backends.executor import (
    TIMEOUT_FACTOR,
    Batch,
    Completion,
    Executor,
    RecoverableExecutor,
    check_outputs,
    start_timeout,
    with_timeout,
)
from server.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    DrainingError,
    ExecutionError,
    ServerError,
    UnavailableError,
)
from server.scheduling.accounting import Accounting
from server.scheduling.admission import DEFAULT_LIMITS, Admission, Limits, reject_if_full, reject_if_too_many_shapes
from server.scheduling.calls import BatchRun, InferenceCall, Sample, fail_all, make_batch
from server.scheduling.expiry import Expiry
from server.scheduling.forecast import Forecast
from server.scheduling.levels import Levels, levels_of
from server.scheduling.lookahead import Lookahead
from server.scheduling.policies_in_use import PoliciesInUse
from server.scheduling.queue_view import QueueView
from server.scheduling.recovery import BatchRecovery
from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright.dispatcher")
_GRACE = 5.0  # s by which the loop may be late; it then is not alive
_CHECK_INTERVAL = 1.0  # s, of an idle device that may become unavailable


def unavailable_error(device: str) -> UnavailableError:
    """The error of calls while a device is unavailable."""
    return UnavailableError(f"{device} does not answer for now; send the request again", 1)


class Dispatcher:
    """Queues requests for one device and launches batches as the policy decides.

    Attributes:
        device: its name in the metrics.
        executor: runs its batches.
        clock: the executor's, time.monotonic, s.
        policies: the policies of its models.
        chosen: by model, the current policy, its profile, and its spec; those of `policies`.
        levels: by model, its priority levels, where it has several.
        queue: what is known of its queue.
        accounting: gives the results to the calls, and reports to the controller.
        learned: returns the profile of a model as it is known now; by default the one in use.
        latest_ratio: returns the service times of a model's latest batches over those of the profile in use; by default
            1.
        mean_rate: returns the mean arrival rate of a model over about ten seconds, 1/s; by default 0.
        on_broken: called when nothing can be served any more, or for now, with the calls that have no answer, which
            another device may take over, and the error for the others.
        on_available: called when a device that was unavailable serves again.
        broken: set when nothing can be served any more: the device is lost, or the loop failed.
        available: whether the device can be used now; false while it recovers by itself, as another server may.
    """

    learned: Callable[[str], Profile]
    latest_ratio: Callable[[str], float]
    mean_rate: Callable[[str], float]
    on_broken: Callable[[Sequence[InferenceCall], ServerError], None] = staticmethod(fail_all)
    on_available: Callable[[], None] | None = None
    available = True

    def __init__(
        self,
        executor: Executor,
        chosen: Mapping[str, ModelPolicy],
        metrics: Metrics,
        clock: Callable[[], float],
        limits: Limits = DEFAULT_LIMITS,
        by_shape: Collection[str] = (),
        levels: Mapping[str, Levels] | None = None,
    ) -> None:
        """Start with an empty queue.

        Args:
            executor: the device.
            chosen: by model, its policy and profile.
            metrics: of the server.
            clock: the executor's, time.monotonic, s.
            limits: of the queue and of a batch.
            by_shape: models whose inputs vary in shape.
            levels: by model, its priority levels, where it has several.
        """
        self.device, self.clock, self.levels = executor.name, clock, levels or {}
        counts = {model: each.count for model, each in self.levels.items()}
        self.policies = PoliciesInUse(self.device, chosen, by_shape, metrics, self._on_change, counts)
        self.chosen = self.policies.chosen
        self.learned = lambda model: self.chosen[model].profile
        self.latest_ratio = lambda model: 1.0
        self.mean_rate = lambda model: 0.0
        self.broken = asyncio.Event()
        self.executor = executor
        self._upload: Callable[[str, Any], Any] | None = getattr(executor, "upload", None)
        self._recoverable = executor if isinstance(executor, RecoverableExecutor) else None
        self._metrics = metrics
        self._limits = limits
        self._admission = Admission()
        self._batcher = self.policies.batcher
        self.queue = QueueView(self._batcher, self.chosen, clock)
        self._forecast = Forecast(self.chosen, self._batcher, clock)
        self._lookahead = Lookahead(self._batcher, self._forecast, self.chosen, clock)
        self._expiry = Expiry(
            self._batcher, self._forecast, self._admission, clock, self._lookahead.withdraw, self._on_change
        )
        self.accounting = Accounting(self.device, self._batcher, self._forecast, self._admission, metrics)
        self._recovery = BatchRecovery(
            executor, self.policies, self.accounting, metrics, clock, self._run, self._expect_within
        )
        self._next_step_by = inf  # latest instant at which the loop should decide again
        self._check_at = inf if self._recoverable is None else 0.0  # instant of the next check of an idle device
        self._ids = count()
        self._wake = asyncio.Event()
        self._all_answered = asyncio.Event()
        self._calls: dict[InferenceCall, None] = {}  # in order of arrival
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_finish: float | None = None  # end of the previous batch; None if the policy has waited since

    def submit(
        self,
        model: str,
        samples: Sequence[Sample],
        timeout: float = inf,
        id: str = "",
        level: int = 1,
    ) -> "asyncio.Future[list[Sample]]":
        """Queue the samples of a call, all or none; cancelling the future removes them from the queue.

        Args:
            model: one of `chosen`.
            samples: at least one.
            timeout: remaining timeout of the client, s.
            id: of the model whose codec made the inputs; empty if that is its name.
            level: priority level of the call.

        Raises:
            QueueFullError: the queue has no room for all of them.
            TooLateError: the answer is expected after the timeout.
            DrainingError: the server is stopping, or the device was taken out of service.
            UnavailableError: the device is unavailable for now.
            TooManyShapesError: with these samples too many different shapes would wait.
        """
        if model in self.policies.by_shape:
            shapes = {sample.shape for sample in samples}
            reject_if_too_many_shapes(self._batcher.waiting_shapes(model) | shapes, self.backlog)
        earliest, now = self.check_room(model, len(samples), timeout, level), self.clock()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # a system call in Python 3.11
        future: asyncio.Future[list[Sample]] = self._loop.create_future()
        tracing = self.accounting.tracing
        call = InferenceCall(
            future,
            model,
            samples,
            arrival=now,
            expires=now + timeout,
            earliest=earliest,
            span=None if tracing is None else tracing.current(),
            id=id,
            level=level,
            urgent_from=now + levels_of(self.levels, model).max_wait(level),
        )
        self._metrics.history.arrived(model, len(samples))
        self.enqueue(call)
        return call.future

    def enqueue(self, call: InferenceCall) -> None:
        """Queue the samples of a call that have no answer yet, without admission control.

        The call may come from another device that was lost.
        """
        now = self.clock()
        for request in call.make_requests(self.chosen[call.model], self._ids):
            if self._upload is not None:
                request.payload.data = self._upload(call.id, request.payload.input)
            if self.policies.retiring:
                request.kind = self.policies.key_of(request)
            self._batcher.arrive(request, now)
        call.future.add_done_callback(lambda _: self._remove(call))
        self._calls[call] = None
        if not self._batcher.busy:
            self._next_step_by = now
        self._on_change()
        if call.expires < inf:
            self._expiry.set_timer()

    def check_room(self, model: str, n: int, timeout: float = inf, level: int = 1) -> float:
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
        if self.policies.draining or self.broken.is_set():
            raise DrainingError("the server is stopping; send the request to another one", 1)
        if not self.available:
            raise unavailable_error(self.device)
        places = levels_of(self.levels, model).places(self._limits.capacity, level)
        reject_if_full(n, self._batcher.queue_length, places, lambda: self.backlog({model: 0}, level))
        if timeout == inf:
            return 0.0
        now, needed = self.clock(), self.backlog({model: n}, level)
        backlogged = self._forecast.is_backlogged(model, self._ahead(model, level) + n, needed)
        self._admission.reject_if_late(needed, timeout, now if backlogged else None)
        return now + needed if backlogged else 0.0

    def backlog(self, more: Mapping[str, int] | None = None, level: int | None = None) -> float:
        """Return the least time in which the device serves all queued requests, and `more` by model, s.

        Of the models in `more` only requests of this priority level and those before it count; None: all.
        """
        more = more or {}
        waiting = None
        if level is not None and not self.levels.keys().isdisjoint(more):
            ahead = {model: self._ahead(model, level) for model in more}
            waiting = {**self._batcher.waiting_by_model(), **ahead}
        return self._forecast.backlog(more, waiting)

    def _ahead(self, model: str, level: int) -> int:
        """Number of waiting requests of a model that later levels do not include."""
        batcher = self._batcher
        return batcher.waiting_through(model, level) if model in self.levels else batcher.waiting_of(model)

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
        return self.up and not (self.policies.draining or self._recovery.restarting)

    @property
    def alive(self) -> bool:
        """Whether the loop runs: it is not broken, and not overdue."""
        return not self.broken.is_set() and self.clock() <= self._next_step_by + _GRACE

    async def drain(self) -> None:
        """Reject new calls, and return when the accepted ones are answered."""
        self.policies.drain()
        while self._calls:
            self._all_answered.clear()
            await self._all_answered.wait()

    def abandon(self) -> None:
        """Reject new calls, and fail the accepted ones, to stop the server without draining."""
        self.policies.draining = True
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
            self._give_up(UnavailableError("the device is lost; send the request to another server", 1), for_good=True)
        except Exception as error:  # noqa: BLE001  (a bug here must not leave a call without an answer)
            _log.exception("the dispatcher of %s failed; restart the server to use it again", self.device)
            self._give_up(ExecutionError(f"the dispatcher failed: {type(error).__name__}"), for_good=True)

    async def _wait_until_available(self, error: DeviceUnavailableError) -> None:
        """Give up all calls, and return when the device can serve again."""
        assert self._recoverable is not None
        _log.error("%s is unavailable: %s", self.device, error)
        self.available, self._next_step_by = False, inf
        self._give_up(unavailable_error(self.device))
        await self._recoverable.wait_until_available()
        _log.warning("%s is available again", self.device)
        self.available = True
        if self.on_available is not None:
            self.on_available()

    def _give_up(self, error: ServerError, for_good: bool = False) -> None:
        """Pass on all calls that have no answer."""
        if for_good:
            self.broken.set()
        calls = [call for call in self._calls if not call.future.done()]
        for call in calls:
            call.lose_device()
            self._remove(call)
        self.on_broken(calls, error)
        if for_good:
            self._batcher.abandon()  # another device serves them, and frees their calls

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
                if self._recoverable is not None and self.clock() >= self._check_at:
                    self._check_at = self.clock() + _CHECK_INTERVAL
                    await self._recoverable.check()
                else:
                    await self._wait_until(min(until, self._check_at))

    def _run(self, batch: Batch) -> "asyncio.Future[Completion]":
        return with_timeout(self.executor, batch, self._begin(batch))

    def _begin(self, batch: Batch) -> float:
        """Expect the end of a batch, whose service begins now; return its timeout, s."""
        now, greatest = self.clock(), self._forecast.greatest_time(batch)
        timeout = max(self._limits.batch_timeout, TIMEOUT_FACTOR * greatest)
        self._forecast.free_at, self._next_step_by = now + self._forecast.least_time(batch), now + timeout
        if self._recoverable is not None:
            self._check_at = now + _CHECK_INTERVAL
        return timeout

    def _expect_within(self, seconds: float) -> None:
        self._next_step_by = self.clock() + seconds

    async def _wait_until(self, instant: float) -> None:
        """Wait until the queue or the policy changes, at most until an instant, s."""
        if instant == inf:
            await self._wake.wait()
            return
        timer = asyncio.get_running_loop().call_later(max(0.0, instant - self.clock()), self._wake.set)
        await self._wake.wait()  # a timer may fire early: the next decision then waits again
        timer.cancel()

    def _decide(self) -> Action:
        now = self.clock()
        self._expiry.drop_expired(now)
        try:
            self._expiry.drop_late(now)
            return self._batcher.decide(now)
        except Exception:  # noqa: BLE001  (a bug of a policy must not fail the requests)
            _log.exception("the policy failed; serving greedily until another one is set")
            for model in self.chosen:
                self.policies.serve_greedily(model, self.chosen[model].profile)
            self._batcher.drain()
            return self._batcher.decide(now)

    async def _serve(self, run: BatchRun) -> None:
        """Wait for the completion of a batch, and of those that the device takes from the standby after it."""
        following: BatchRun | None = run
        began = self.clock()
        while following is not None:
            run = following
            self._lookahead.begin(run, began)
            try:
                completion = check_outputs(run.batch, await run.running)
            except Exception as error:  # noqa: BLE001  (whatever the device raised, as few requests as possible fail)
                self._last_finish, began = None, self.clock()
                following = self._lookahead.end(began)
                if following is not None and not following.batch.inputs:
                    following = None  # a stage of the failed batch itself
                await self._recovery.recover(run, error, following)
            else:
                began = completion.finished
                following = self._lookahead.end(began)
                if following is not None and not following.batch.inputs:
                    following = replace(following, batch=replace(following.batch, inputs=completion.outputs))
                self._complete(run, completion, following)
            if following is not None:
                start_timeout(following.running, len(following.batch.inputs), self._begin(following.batch))

    def _complete(self, run: BatchRun, completion: Completion, following: BatchRun | None) -> None:
        """Answer the calls of a completed batch, which the device may have followed by another one."""
        if self._last_finish is not None:
            self.accounting.idle_gap(completion.started - self._last_finish)
        if following is not None and following.launch.requests is run.launch.requests:
            self._batcher.advance(run.launch)
            finished: Sequence[Request] = ()
        else:
            finished = self._batcher.complete(run.launch)
        self.accounting.answer(run, completion, finished, self.clock())
        self._last_finish = completion.finished if following is not None or len(self._batcher) else None
        self._recovery.served()

    def _on_change(self) -> None:
        """Wake the loop, and look ahead again, since the queue or the policy has changed."""
        self._lookahead.change()
        self._wake.set()

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
