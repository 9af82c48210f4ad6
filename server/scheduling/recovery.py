"""Recovery of failed batches: parts of a batch are run again, so that only the failing samples fail.

A batch that does not fit the device's memory is halved until it does. A batch that raises, or whose outputs are not
finite, is bisected down to the failing samples. A batch whose model's process died is run again first, since something
else may have killed it, and so is a request alone. A batch that it had taken from the standby is recovered in the same
way, after the one in service; one that it had not taken still waits. If the device is lost or unavailable, recovery
ends with its exception.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from policies.types import Request
from server.backends.executor import (
    LOAD_TIMEOUT,
    Batch,
    Completion,
    Executor,
    RestartableExecutor,
    check_outputs,
)
from server.errors import (
    BadInputError,
    BatchTimeoutError,
    DeviceLostError,
    DeviceUnavailableError,
    ExecutionError,
    OutOfMemoryError,
    ServerError,
    WorkerDiedError,
    one_line,
)
from server.scheduling.accounting import Accounting
from server.scheduling.calls import BatchRun
from server.scheduling.policies_in_use import PoliciesInUse
from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright.dispatcher")
_T = TypeVar("_T")
_MOST_DEATHS, _WITHIN = 5, 60.0  # in this time, s
_BACKOFF = 0.05  # s, doubled with each death
Run = Callable[[Batch], "asyncio.Future[Completion]"]
Restart = Callable[[str, DeviceLostError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive requests of a failed batch that were run together.

    Attributes:
        first: index of the first request in the batch.
        size: number of requests.
        result: their completion, or the exception of a single request.
    """

    first: int
    size: int
    result: Completion | Exception

    def of(self, whole: Sequence[_T]) -> Sequence[_T]:
        """Return the items of this part, given the batch's requests or inputs."""
        return whole[self.first : self.first + self.size]

    @property
    def error(self) -> str:
        """The exception in one line."""
        text = "" if isinstance(self.result, Completion) else one_line(self.result)
        return f"{type(self.result).__name__}: {text}"


@dataclass(frozen=True, slots=True)
class Recovery:
    """Result of the recovery of a failed batch.

    Attributes:
        parts: all requests of the batch, in order.
        smallest_unfit: the smallest batch size that did not fit the memory; None if all fitted.
    """

    parts: Sequence[Part]
    smallest_unfit: int | None

    @property
    def max_batch_size(self) -> int | None:
        """The maximum batch size from now on: half of the smallest size that did not fit; None if all fitted."""
        return None if self.smallest_unfit is None else max(1, (self.smallest_unfit + 1) // 2)


class Deaths:
    """Deaths of models' processes on a device, without a served batch between.

    Those while a batch is run again and in parts are not counted.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._instants: list[float] = []
        self._last: WorkerDiedError | None = None

    def clear(self) -> None:
        """A batch was served."""
        self._instants.clear()

    async def count(self, error: WorkerDiedError, now: float) -> None:
        """Count a death at an instant, s, and wait longer after each; two batches that it ended count once.

        Raises:
            WorkerDiedError: this one; there were five in a minute, so the device is lost.
        """
        if error is self._last:
            return
        self._last = error
        self._instants = [at for at in self._instants if at > now - _WITHIN] + [now]
        if len(self._instants) >= _MOST_DEATHS:
            raise error
        if len(self._instants) > 1:
            await asyncio.sleep(_BACKOFF * 2.0 ** len(self._instants))

    async def survive(self, restart: Callable[[], Awaitable[None]], clock: Callable[[], float]) -> None:
        """Restart a process, again if it dies while its model is loaded; raises as `count`."""
        while True:
            try:
                return await restart()
            except WorkerDiedError as died:
                died.__traceback__ = None  # it is kept until the next death
                await self.count(died, clock())


async def run_in_parts(run: Run, restart: Restart, batch: Batch, error: Exception, first: bool = True) -> Recovery:
    """Retry the two halves of a batch that failed with `error`, and halves of those that fail again.

    After the batch timeout each request is retried alone: every attempt that hangs takes that long.

    Args:
        run: runs a part of the batch.
        restart: makes the device usable again after the batch timeout or a death; raises DeviceLostError or
            DeviceUnavailableError if it cannot.
        batch: the batch.
        error: the exception that it raised.
        first: whether it has been run only once, so that it is run again as it is after a death.

    Raises:
        DeviceLostError: the device is lost.
        DeviceUnavailableError: the device is unavailable for now.
    """
    hung, died = isinstance(error, BatchTimeoutError), isinstance(error, WorkerDiedError)
    if isinstance(error, BatchTimeoutError | WorkerDiedError):
        await restart(batch.model, error)
    elif isinstance(error, DeviceLostError | DeviceUnavailableError):
        raise error
    if died and first:
        return await _retry(run, restart, batch)
    size = len(batch.inputs)
    if size == 1:  # a sample that does not fit alone says nothing about batches of others
        return Recovery([Part(0, 1, error)], None)
    unfit = [size] if isinstance(error, OutOfMemoryError) else []
    parts: list[Part] = []
    step = 1 if hung else (size + 1) // 2
    for begin in range(0, size, step):
        part_of_batch = _slice(batch, begin, min(begin + step, size))
        retried = await _retry(run, restart, part_of_batch, len(part_of_batch.inputs) == 1)
        parts += (replace(part, first=part.first + begin) for part in retried.parts)
        unfit += [] if retried.smallest_unfit is None else [retried.smallest_unfit]
    return Recovery(parts, min(unfit, default=None))


async def _retry(run: Run, restart: Restart, batch: Batch, first: bool = False) -> Recovery:
    try:
        return Recovery([Part(0, len(batch.inputs), check_outputs(batch, await run(batch)))], None)
    except Exception as error:  # noqa: BLE001  (whatever the device raised is recovered part by part)
        error.__traceback__ = None  # its frames refer to the inputs and to the future that has it: a cycle
        return await run_in_parts(run, restart, batch, error, first)


def _slice(batch: Batch, start: int, stop: int) -> Batch:
    return replace(batch, inputs=batch.inputs[start:stop])


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
        """Retry a failed batch part by part; `following` was taken by the device after it, and may have failed, too."""
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
            recovery = await run_in_parts(self._run, self._restart, batch, error)
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
        replaced = launch.requests[0].kind.retired  # its batches say nothing about those of the model in service
        if recovery.max_batch_size is not None and not replaced and batch.model not in self._policies.by_shape:
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
