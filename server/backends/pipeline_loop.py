"""The event loop of a pipeline's process: calls from the main process, and their steps, which that serves.

Messages to the process: ("call", call, inputs), ("cancel", call), ("result", call, step, outputs),
("error", call, step, status, text) and ("ping",). From it: ("step", call, step, model, form, what), ("drop", call,
step), ("done", call, outputs), ("failed", call, step, status, error) and ("pong",). `call` and `step` are numbers. In
"failed", `step` is that of an error which no `run` caught, and `status` that of one which `run` chose; else None.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from batchwright.model import BadInput
from batchwright.pipeline import InferenceError, Pipeline
from server.backends.tensor_batches import checked_rows
from server.models.signature import DTYPES, Signature, TensorSpec
from server.models.tensors.codec import TensorCodec
from server.models.tensors.python_source import place_of
from server.workers.channel import Channel
from server.workers.errors import sent
from server.workers.loop_channel import LoopChannel


def serve_pipeline(channel: Channel, pipeline: Pipeline) -> None:
    """Serve the calls of a pipeline until the other end of the channel is closed."""
    uvloop.run(_serve(channel, pipeline))


async def _serve(channel: Channel, pipeline: Pipeline) -> None:
    ended = asyncio.Event()
    calls = _Calls(pipeline)
    calls.channel = LoopChannel(channel, calls.received, ended.set)
    await ended.wait()
    calls.cancel_all()


class _StepError(InferenceError):
    """The error of a step, with its number, by which the main process knows it."""

    def __init__(self, status: int, text: str, step: int) -> None:
        super().__init__(status, text)
        self.step = step


class _Calls:
    """The open calls of a pipeline."""

    channel: LoopChannel

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._signature = TensorCodec(pipeline).signature(0)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._steps: dict[tuple[int, int], asyncio.Future[Any]] = {}

    def received(self, message: tuple[Any, ...]) -> None:
        """Act on a message of the main process."""
        kind, *rest = message
        if kind == "ping":
            self.channel.send(("pong",))
        elif kind == "call":
            number, inputs = rest
            self._tasks[number] = asyncio.create_task(self._run(number, inputs))
        elif kind == "cancel":
            if (task := self._tasks.get(rest[0])) is not None:
                task.cancel()
        else:
            number, step, *what = rest
            future = self._steps.get((number, step))
            if future is None or future.done():  # `run` does not wait for it any more
                return
            if kind == "result":
                future.set_result(what[0])
            else:
                status, text = what
                future.set_exception(_StepError(status, text, step))

    def cancel_all(self) -> None:
        """Cancel all calls."""
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, number: int, inputs: Mapping[str, Any]) -> None:
        """Run a call. After a cancellation, which the main process has asked for, it does not read the answer."""
        own = {name: array.copy() for name, array in inputs.items()}  # their memory is used again after the call
        try:
            found = await self._pipeline.run(_Models(self._pipeline.models, self, number), **own)
            self.channel.send(("done", number, _outputs(self._signature, found)))
        except BaseException as error:  # noqa: BLE001  (it is the answer)
            self.channel.send(_failed(number, error))
        finally:
            del self._tasks[number]
            for future in [each for (call, _), each in self._steps.items() if call == number]:
                future.cancel()

    async def step(self, number: int, step: int, model: str, form: str, what: Any) -> Any:
        """Have the main process serve a step of a call."""
        future = self._steps[number, step] = asyncio.get_running_loop().create_future()
        try:
            self.channel.send(("step", number, step, model, form, what))
            return await future
        except asyncio.CancelledError:
            self.channel.send(("drop", number, step))
            raise
        finally:
            del self._steps[number, step]


class _Models:
    """The models of a pipeline in one of its calls, as `batchwright.Pipeline.run` describes them."""

    def __init__(self, names: Sequence[str], calls: _Calls, number: int) -> None:
        self._names = names
        steps = count()

        def serve(model: str, form: str, what: Any) -> Any:
            return calls.step(number, next(steps), model, form, what)

        self._serve = serve

    def __getattr__(self, name: str) -> "_Step":
        if name not in self._names:
            raise AttributeError(f"{name!r} is not in `models` of the pipeline; it has {', '.join(self._names)}")
        return _Step(self._serve, name)

    def __getitem__(self, name: str) -> "_Step":
        return self.__getattr__(name)


class _Step:
    """A model as a pipeline calls it."""

    def __init__(self, serve: Callable[[str, str, Any], Any], name: str) -> None:
        self._serve, self._name = serve, name

    async def __call__(self, **inputs: Any) -> Any:
        arrays = {name: _array(value, f"{self._name}: {name}") for name, value in inputs.items()}
        return await self._serve(self._name, "inputs", arrays)

    async def predict(self, body: bytes, content_type: str = "") -> Any:
        return await self._serve(self._name, "body", (bytes(body), content_type))


def _array(value: Any, where: str) -> Any:
    """A value of a step as an array of numbers, or of bytes."""
    array = np.asarray(value)
    if array.dtype.kind in "biuf":
        return array
    array = np.asarray(value, object)
    odd = next((each for each in array.flat if not isinstance(each, str | bytes)), None)
    if odd is not None:
        raise TypeError(f"{where} has a value of type {type(odd).__name__}; give numbers or bytes")
    return _encoded(array)


def _encoded(array: NDArray[Any]) -> NDArray[Any]:
    """Texts as bytes, which are of no class of the user's."""
    elements = [each.encode() if isinstance(each, str) else bytes(each) for each in array.flat]
    return np.fromiter(elements, object, len(elements)).reshape(array.shape)


def _outputs(signature: Signature, found: Any) -> Mapping[str, NDArray[Any]]:
    """What `run` returned, as arrays of the outputs' datatypes; raises as `checked_rows`."""
    if isinstance(found, Mapping):
        specs = [spec for spec in signature.outputs if spec.name in found]
        found = {**found, **{spec.name: [_converted(found[spec.name], spec)] for spec in specs}}
    row: Mapping[str, NDArray[Any]]
    (row,) = checked_rows(signature, found, 1)
    return row


def _converted(value: Any, spec: TensorSpec) -> NDArray[Any]:
    """An array of the output's datatype, if its values are of the same kind and within its range."""
    dtype = DTYPES[spec.datatype]
    array = np.asarray(value, object if dtype.hasobject else None)
    if array.shape == (0,) and array.ndim < len(spec.sample_shape):  # an empty list has no inner shape
        return np.zeros([max(0, size) for size in spec.sample_shape], dtype)
    if dtype.hasobject:
        texts = all(isinstance(each, str | bytes) for each in array.flat)
        return _encoded(array) if texts else array
    converted = array.astype(dtype) if np.can_cast(array.dtype, dtype, "same_kind") else array
    wraps = dtype.kind in "iu" and array.dtype.kind in "iu" and (converted != array).any()
    return array if wraps else converted


def _failed(number: int, error: BaseException) -> tuple[Any, ...]:
    cause = next(filter(None, map(_known, _leaves(error))), error)
    status = getattr(cause, "status", None) if isinstance(cause, InferenceError) else None
    return "failed", number, getattr(cause, "step", None), status, sent(cause, place_of(cause))


def _known(error: BaseException) -> BaseException | None:
    return error if isinstance(error, InferenceError | BadInput) else None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group, such as that of a TaskGroup, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
