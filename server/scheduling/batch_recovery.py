"""The recovery of a failed batch: its parts are run again, and their requests answered or failed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from policies.types import Request
from server.backends.executor import LOAD_TIMEOUT, Completion, Executor, RestartableExecutor
from server.errors import (
    BadInputError,
    DeviceLostError,
    DeviceUnavailableError,
    ExecutionError,
    ServerError,
    WorkerDiedError,
)
from server.scheduling.accounting import Accounting
from server.scheduling.calls import BatchRun
from server.scheduling.policies_in_use import PoliciesInUse
from server.scheduling.recovery import Deaths, Part, Run, recover
from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright.dispatcher")


class BatchRecovery:
    """Recovers failed batches of a device.

    Attributes:
        restarting: whether the process of a model is being started again.
    """

    restarting = False

    def __init__(
        self,
        executor: Executor,
        policies: PoliciesInUse,
        accounting: Accounting,
        metrics: Metrics,
        clock: Callable[[], float],
        run: Run,
        expect_within: Callable[[float], None],
    ) -> None:
        """`run` runs a batch; `expect_within` is called with a time, s, in which no decision is made."""
        self._executor = executor
        self._policies = policies
        self._batcher = policies.batcher
        self._accounting = accounting
        self._metrics = metrics
        self._clock = clock
        self._run = run
        self._expect_within = expect_within
        self._deaths = Deaths()

    def served(self) -> None:
        """Note that the device has served a batch."""
        self._deaths.clear()

    async def recover(self, run: BatchRun, error: Exception, following: BatchRun | None = None) -> None:
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
        if any(isinstance(part.result, Completion) for part in recovery.parts):
            self._deaths.clear()
        finished = self._batcher.complete(launch)
        for part in recovery.parts:
            own = replace(launch, requests=part.of(launch.requests))
            if isinstance(part.result, Completion):
                retried = replace(run, launch=own, batch=replace(batch, inputs=part.of(batch.inputs)))
                completed = [request for request in own.requests if request in finished]
                self._accounting.answer(retried, part.result, completed, self._clock())
            else:
                self._fail(batch.model, own.requests, part)
        self._accounting.unprofiled(batch.model)  # failed attempts took energy, too
        if recovery.max_batch_size is not None and batch.model not in self._policies.by_shape:
            self._policies.reduce_batch_size(batch.model, recovery.max_batch_size)  # else it is the shape that is large

    async def _restart(self, model: str, error: DeviceLostError) -> None:
        if not isinstance(self._executor, RestartableExecutor):
            raise error
        self._expect_within(LOAD_TIMEOUT)
        self.restarting = True
        try:
            await self._deaths.survive(partial(self._executor.restart, model, error), self._clock)
        finally:
            self.restarting = False

    def _fail(self, model: str, requests: Sequence[Request], part: Part) -> None:
        for request in requests:
            call = request.payload.call
            level = logging.INFO if isinstance(part.result, BadInputError) else logging.ERROR
            _log.log(level, "%s: the model failed on request %d alone: %s", model, request.id, part.error)
            failed = f"the model failed on this input alone, with {type(part.result).__name__}"
            call.fail(part.result if isinstance(part.result, ServerError) else ExecutionError(failed))
            for other in call.requests:  # their answers could not be sent
                self._batcher.cancel(other)
