"""Pipelines: calls that a user's coroutine serves by requests of other models, in a process of its own."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from math import ceil, inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from policies.types import SpecError
from server.api.inference import Inference
from server.errors import (
    INTERNAL_ERROR,
    BadInputError,
    ExecutionError,
    ExpiredError,
    ModelError,
    ServerError,
    TooLateError,
    WorkerDiedError,
    one_line,
)
from server.models.model import Inputs, ServedModel
from server.models.signature import DTYPES, Tensor, TensorSpec
from server.models.tensors.codec import TensorCodec
from server.scheduling.admission import reject_if_full
from server.scheduling.calls import Sample
from server.scheduling.levels import levels_of
from server.transport.request import ClientDisconnectedError, RequestContext
from server.workers.errors import SentError, received
from server.workers.loop_channel import LoopChannel
from server.workers.worker import Lane, ModelWorker

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright.pipeline")
_MAX_STEPS = 1024  # of one call
_WATCH_INTERVAL = 1.0  # s between two questions to a process whether its loop runs
_WEIGHT = 0.05  # of a call in the mean numbers of steps
_DEVICE = "pipeline"  # label in metrics, in place of a device


class _StepContext(RequestContext):
    """A step of a call: a request without a client."""

    __slots__ = ()

    async def read_body(self, *_: Any) -> NoReturn:
        """Raise: the inputs are there."""
        raise NotImplementedError

    async def respond(self, *_: Any) -> NoReturn:
        """Raise: the result goes to the pipeline."""
        raise NotImplementedError


class _Call:
    """One sample of a call that a pipeline serves.

    Attributes:
        inputs: kept, since the process may read them from the memory that it shares.
        context: of the client's call.
        done: the outputs.
        variables: in which its steps run, with the tracing span of the call.
        tasks: the steps that are served now, by number.
        answers: of the steps so far, with the models' names.
        errors: of the steps that failed.
        made: number of steps so far by model.
    """

    def __init__(self, inputs: Any, context: RequestContext) -> None:
        self.inputs = inputs
        self.context = context
        self.done: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.variables = contextvars.copy_context()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.answers: list[tuple[str, Sample]] = []
        self.errors: dict[int, ServerError] = {}
        self.made: dict[str, int] = {}

    def fail(self, error: ServerError) -> None:
        """End the call with an error, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)

    def drop(self) -> None:
        """Cancel its steps."""
        for task in self.tasks.values():
            task.cancel()
        if self.done.done() and not self.done.cancelled():
            self.done.exception()


class _Process:
    """One process of a pipeline, which is started again after its death.

    Attributes:
        calls: the open ones, by number.
        fails: whether the last start failed.
    """

    def __init__(self, name: str, worker: ModelWorker, serve: Callable[[_Call, str, str, Any], Awaitable[Any]]) -> None:
        """`name` is the pipeline's; `serve` serves a step of a call: the model, the form of its inputs, and these."""
        self._name = name
        self.calls: dict[int, _Call] = {}
        self.fails = False
        self._worker = worker
        self._serve = serve
        self._numbers = count()
        self._starting = asyncio.Lock()
        self._pool = ThreadPoolExecutor(1, "pipeline")
        self._lane: Lane | None = None
        self._channel: LoopChannel | None = None
        self._unanswered = 0  # questions whether its loop runs, since its last message
        self._failing: asyncio.Task[None] | None = None

    async def run(self, call: _Call) -> Mapping[str, Any]:
        """Run a call; if this is cancelled, so is the call.

        Raises:
            ServerError: it failed.
        """
        number = next(self._numbers)
        self.calls[number] = call
        channel: LoopChannel | None = None
        try:
            channel = await self.start()
            channel.send(("call", number, call.inputs))
            return await call.done
        finally:
            del self.calls[number]
            if channel is not None and (not call.done.done() or call.done.cancelled()):
                channel.send(("cancel", number))
            call.drop()

    async def start(self) -> LoopChannel:
        """Start the process, if it is not running, and return the channel to it.

        Raises:
            ExecutionError: it cannot be started.
        """
        async with self._starting:
            if self._channel is None:
                self.fails = True
                try:
                    self._lane = await asyncio.get_running_loop().run_in_executor(self._pool, self._begin)
                except (OSError, SpecError, WorkerDiedError) as error:
                    raise ExecutionError(f"the pipeline's process cannot be started: {one_line(error)}") from error
                self._unanswered, self.fails = 0, False
                self._channel = LoopChannel(self._lane.channel, self._received, partial(self._ended, self._lane))
            return self._channel

    def _begin(self) -> Lane:
        lane = self._worker.lane()
        lane.call("describe")  # which imports the file
        lane.channel.send((next(lane.numbers), "run_pipeline", ()))
        return lane

    @property
    def is_up(self) -> bool:
        """Whether calls need not wait for its start."""
        return self._channel is not None

    def _received(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        self._unanswered = 0
        if not rest:
            return
        number, *what = rest
        call = self.calls.get(number)
        if call is None:
            if kind == "step" and self._channel is not None:
                self._channel.send(("error", number, what[0], ServerError.status, "the call has ended"))
            return
        if kind == "step":
            step, *request = what
            call.tasks[step] = asyncio.get_running_loop().create_task(
                self._step(number, call, step, *request), context=call.variables.copy()
            )
        elif kind == "drop":
            if (task := call.tasks.get(what[0])) is not None:
                task.cancel()
        elif kind == "done":
            if not call.done.done():
                call.done.set_result(what[0])
        else:
            call.fail(_error(self._name, call, *what))

    async def _step(self, number: int, call: _Call, step: int, model: str, form: str, what: Any) -> None:
        try:
            outputs = await self._serve(call, model, form, what)
            if self._channel is not None:
                self._channel.send(("result", number, step, outputs))
            return
        except ServerError as error:
            call.errors[step] = error
            answer = error.status, str(error)
        except Exception:  # noqa: BLE001  (a bug must not leave the pipeline waiting)
            _log.exception("a step of %s failed with an exception", model)
            answer = ServerError.status, INTERNAL_ERROR
        finally:
            del call.tasks[step]
        if self._channel is not None:
            self._channel.send(("error", number, step, *answer))

    def _ended(self, lane: Lane) -> None:
        """Fail the open calls, once it is known how the process ended, and start it again."""
        self._channel = self._lane = None
        lost = [*self.calls.values()]

        async def fail() -> None:
            how = await asyncio.get_running_loop().run_in_executor(self._pool, lane.process.end)
            for call in lost:
                call.fail(ExecutionError(f"the pipeline's process {how}; send the call again"))
            await self.start()

        self._failing = asyncio.get_running_loop().create_task(fail())
        self._failing.add_done_callback(lambda done: done.cancelled() or done.exception())

    def facts(self) -> dict[str, Any]:
        """Id of the process, number of its restarts, and why the last one died; None where there is none."""
        worker = self._worker
        return {"pid": worker.pid, "restarts": worker.restarts, "last_fault": worker.last_fault}

    async def watch(self, limit: float) -> None:
        """Start the process, and replace it if its loop is blocked for longer than a limit, s; until cancelled."""
        with suppress(ExecutionError):
            await self.start()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL)
            if self.fails:
                with suppress(ExecutionError):
                    await self.start()
            if self._channel is None or self._lane is None or not self.calls:
                continue
            if self._unanswered * _WATCH_INTERVAL >= limit:
                _log.error("the loop of a pipeline did not run for %g s; its process is replaced", limit)
                await asyncio.get_running_loop().run_in_executor(self._pool, self._worker.replace, self._lane.process)
            else:
                self._unanswered += 1
                self._channel.send(("ping",))


def _error(name: str, call: _Call, step: int | None, status: int | None, sent: SentError) -> ServerError:
    """The error of a call whose `run` raised an exception."""
    if step is not None and step in call.errors:
        return call.errors[step]
    error = received(sent)
    if "batchwright.model.BadInput" in sent.names:
        return BadInputError(one_line(error))
    if status is not None:
        found = BadInputError(one_line(error)) if status < 500 else ModelError(one_line(error))
        found.status = status
        return found
    _log.error("run of the pipeline %s failed in request %s", name, call.context.request_id, exc_info=error)
    if isinstance(error, ServerError):  # such as outputs that do not fit
        return error
    place = f" in {sent.place}" if sent.place else ""
    return ModelError(f"the pipeline failed with {sent.names[0].rpartition('.')[2]}{place}")


class PipelineRunner:
    """Serves the calls of one pipeline.

    Attributes:
        served: the pipeline, as a model.
        models: names of what it calls.
        open_calls: number of samples that are being served.
        steps: mean number of requests of each model in one call, 1.
    """

    def __init__(
        self,
        served: ServedModel[TensorCodec],
        workers: Sequence[ModelWorker],
        inference: Inference,
        tracing: "Tracing | None",
    ) -> None:
        """`workers` are its processes."""
        model: Any = served.codec.model
        self.served: ServedModel = served
        self.models: Sequence[str] = model.models
        self._declared: Mapping[str, int] = dict(model.steps)
        self.steps: Mapping[str, float] = self._declared
        self.open_calls = 0
        self._inference = inference
        self._tracing = tracing
        self._processes = [_Process(served.name, worker, self._step) for worker in workers]
        self._idle = asyncio.Event()

    async def watch(self, limit: float) -> None:
        """Replace a process whose loop is blocked for longer than a limit, s; until cancelled."""
        await asyncio.gather(*(process.watch(limit) for process in self._processes))

    async def drain(self) -> None:
        """Wait until all calls are answered; new ones are not admitted any more."""
        if self.open_calls:
            self._idle.clear()
            await self._idle.wait()

    @property
    def ready(self) -> bool:
        """Whether new calls should be sent."""
        runs = not all(process.fails for process in self._processes)
        return runs and all(self._inference.is_ready(name) for name in self.models)

    def check_room(self, n: int, timeout: float) -> None:
        """Check whether `n` more samples can be served within a timeout, s.

        Raises:
            RejectedError: they cannot.
        """
        reject_if_full(n, self.open_calls, self._inference.capacity, self._inference.fleet.backlog)
        least = 0.0 if timeout == inf else self.least_time()
        if timeout < least:
            self._learn(self._declared)  # so that an unusual call does not reject others for ever
            raise TooLateError(
                f"the steps of {self.served.name} take at least {1e3 * least:.4g} ms, and the timeout is "
                f"{1e3 * timeout:.4g} ms",
                1,
            )

    def least_time(self) -> float:
        """The time of the mean number of steps on idle devices, s: those of one model together, one after another."""
        return sum(self._least_time(name, round(number)) for name, number in self.steps.items() if round(number))

    def processes(self) -> list[dict[str, Any]]:
        """Id of each process, number of its restarts, and why the last one died; None where there is none."""
        return [process.facts() for process in self._processes]

    def _least_time(self, name: str, number: int) -> float:
        if (other := self._inference.pipelines.get(name)) is not None:
            return other.least_time()
        devices = self._inference.fleet.devices_of(name)
        known = devices[0].learned(name)
        length = min(known.lengths or (0,))
        each = ceil(number / len(devices))
        return min(ceil(each / b) * known.service_time(b, length) for b in range(1, known.max_batch_size + 1))

    async def run(self, samples: Sequence[Any], context: RequestContext) -> list[Sample]:
        """Serve the samples of a call, each by a call of `run`; if this is cancelled, so are their steps.

        Raises:
            ServerError: one of them failed, or the timeout has passed.
        """
        timeout = context.remaining_timeout()
        self.check_room(len(samples), timeout)
        self.open_calls += len(samples)
        tasks = [asyncio.ensure_future(self._run_one(sample, context)) for sample in samples]
        try:
            async with asyncio.timeout(None if timeout == inf else timeout):
                answers = await asyncio.gather(*tasks)
        except TimeoutError:
            raise ExpiredError(
                f"the timeout of {1e3 * context.timeout:g} ms passed in a step of {self.served.name}"
            ) from None
        finally:
            for task in tasks:
                task.cancel()
            self.open_calls -= len(samples)
            if not self.open_calls:
                self._idle.set()
        self._inference.metrics.statistics.batch_completed(self.served.name, len(answers), None)
        return answers

    async def _run_one(self, inputs: Any, context: RequestContext) -> Sample:
        process = min(self._processes, key=lambda each: (not each.is_up, len(each.calls)))
        call = _Call(inputs, context)
        outputs = await process.run(call)
        self._learn(call.made)
        context.steps += [_facts(name, answer) for name, answer in call.answers]
        return _together(outputs, [answer for _, answer in call.answers])

    def _learn(self, made: Mapping[str, int]) -> None:
        means = {name: self.steps.get(name, float(made.get(name, 0))) for name in self.models}
        self.steps = {name: mean + _WEIGHT * (made.get(name, 0) - mean) for name, mean in means.items()}

    async def _step(self, call: _Call, name: str, form: str, what: Any) -> Mapping[str, Any]:
        """Serve a step, counted and traced as a request of its model.

        Raises:
            ServerError: it failed.
        """
        inference = self._inference
        call.made[name] = call.made.get(name, 0) + 1
        if sum(call.made.values()) > _MAX_STEPS:
            raise ModelError(f"the pipeline makes more than {_MAX_STEPS} requests in one call; send less in a call")
        model = inference.model(name)
        context = _StepContext("STEP", name, call.context.headers, monotonic())
        context.received, context.request_id = context.began, call.context.request_id
        with inference.budget.reservation() as context.memory, self._traced(name), _counted(inference, name, context):
            context.timeout = call.context.remaining_timeout()
            context.priority = min(call.context.priority, levels_of(inference.levels, name).count)
            context.least_level = call.context.least_level
            inference.check_begin(name, context.timeout, context.least_level)
            inputs = [_inputs(model, form, what, context)]
            inference.calls[model.id] += 1
            try:
                answers = await inference.infer(model, context, inputs.pop())
            finally:
                inference.end_call(model.id)
            if len(answers) != 1:
                raise BadInputError(f"the body has {len(answers)} samples of {name}; a step has one")
        inference.metrics.pipeline_step(self.served.name, name, context.ended() - context.began)
        call.answers.append((name, answers[0]))
        return {key: tensor[0, ...] for key, tensor in model.codec.stack([answers[0].output]).items()}

    def _traced(self, name: str) -> Any:
        return nullcontext() if self._tracing is None else self._tracing.step(name)


@contextmanager
def _counted(inference: Inference, name: str, context: RequestContext) -> Iterator[None]:
    """Count the outcome of a step, as that of a call."""
    try:
        yield
    except ServerError as error:
        inference.count_failed(name, error, context)
        raise
    except (asyncio.CancelledError, ClientDisconnectedError):
        inference.count(name, "cancelled", context)
        raise
    inference.count_answered(name, context)


def _inputs(model: ServedModel, form: str, what: Any, context: RequestContext) -> Inputs:
    """The inputs of a step.

    Raises:
        BadInputError: they do not fit the model.
        RejectedError: the memory budget has no room for them.
    """
    if form == "body":
        body, content_type = what
        context.memory.grow(len(body))
        return model.codec.from_body(body, content_type)
    context.memory.grow(sum(map(_bytes, what.values())))
    expected = {spec.name: spec for spec in model.signature.inputs}
    if what.keys() != expected.keys():
        raise BadInputError(f"{model.name} takes {', '.join(expected)}, not {', '.join(what) or 'nothing'}")
    return model.codec.from_tensors({name: _tensor(model.name, spec, what[name]) for name, spec in expected.items()})


def _bytes(array: Any) -> int:
    return sum(map(len, array.flat)) if array.dtype.hasobject else array.nbytes


def _tensor(model: str, spec: TensorSpec, array: Any) -> Tensor:
    """One sample of an input as a tensor of a call."""
    texts = array.dtype.hasobject and "BYTES" in spec.sample_shapes
    datatype = "BYTES" if texts else spec.datatype
    shape, dtype = (1, *array.shape), DTYPES[datatype]
    where = f"{model}: input {spec.name}"
    if not spec.accepts(datatype, shape):
        raise BadInputError(f"{where} has the shape {[*array.shape]}; it takes {[*spec.sample_shapes[datatype]]}")
    if texts:
        return Tensor(spec.name, datatype, shape, [e.encode() if isinstance(e, str) else e for e in array.flat])
    if array.dtype != dtype:
        if dtype.hasobject:
            raise BadInputError(f"{where} has values of type {array.dtype}; it takes {datatype}")
        converted = array.astype(dtype) if np.can_cast(array.dtype, dtype, "same_kind") else None
        if converted is None or (dtype.kind in "iu" and (converted != array).any()):
            raise BadInputError(f"{where} has values of type {array.dtype}; it takes {datatype}")
        array = converted
    return Tensor(spec.name, datatype, shape, array[None])


def _facts(name: str, answer: Sample) -> dict[str, Any]:
    return {
        "model": name,
        "batch_size": answer.batch_size,
        "waiting_ms": round(1e3 * answer.waiting, 3),
        "service_ms": round(1e3 * answer.service, 3),
        "energy_mj": None if answer.energy is None else round(1e3 * answer.energy, 3),
    }


def _together(outputs: Mapping[str, Any], steps: Sequence[Sample]) -> Sample:
    """The answer of a call: the largest batch of its steps, and the sums of all else."""
    energies = [each.energy for each in steps if each.energy is not None]
    cpu_times = [each.cpu_time for each in steps if each.cpu_time is not None]
    return Sample(
        None,
        output=outputs,
        batch_size=max((each.batch_size for each in steps), default=0),
        waiting=sum(each.waiting for each in steps),
        service=sum(each.service for each in steps),
        energy=sum(energies) if energies else None,
        cpu_time=sum(cpu_times) if cpu_times else None,
        energy_source=steps[-1].energy_source if steps else "none",
        device=_DEVICE,
    )
