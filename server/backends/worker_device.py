"""A user's model in a worker, as a Device. Without torch."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from server.backends.executor import Batch, Completion
from server.backends.tensor_batches import Row
from server.errors import WorkerDiedError
from server.models.model import ServedModel
from server.models.tensors.codec import TensorCodec
from server.workers.errors import SentError, received
from server.workers.remote_model import RemoteModel
from server.workers.standby import StandbyMemory
from server.workers.worker import Lane

_log = logging.getLogger("batchwright.model")
_LARGE = 2**18  # bytes of inputs, which a thread sends: copying more would delay the event loop
_Work = tuple[Batch, "asyncio.Future[Completion]"]


class WorkerDevice:
    """A Device for one model, which its worker loads and runs on a thread of its own."""

    def __init__(self, served: ServedModel[TensorCodec], device: str) -> None:
        """Serve the model of the codec, once `load` was called; `device` is torch's name of it."""
        assert isinstance(served.codec.model, RemoteModel)
        self._name = served.name
        self._worker = served.codec.model.worker
        self._device = device
        self._lane: BatchLane | None = None

    def load(self) -> None:
        """Load the model.

        Raises:
            SpecError: it raised an exception.
            WorkerDiedError: its process ended.
        """
        lane = BatchLane(self._worker.lane())
        lane.call("load", self._device, f"loading {self._name}")
        self._lane = lane

    def restart(self) -> None:
        """Load the model in a new process; the old one, which may hang, is killed."""
        _log.warning("%s is loaded again in a new process", self._name)
        if self._lane is not None:
            self._worker.replace(self._lane.process)
        self.load()

    def serve(self, batch: Batch, /) -> Sequence[Row]:
        """For each sample its outputs, arrays by name; it blocks.

        Raises:
            WorkerDiedError: the process ended.
            Exception: as `TensorDevice.serve`.
        """
        if self._lane is None:
            raise WorkerDiedError("the model is not loaded")
        rows: Sequence[Row] = self._lane.call("run", batch.inputs)
        return rows

    def run(self, batch: Batch, ended: Callable[[], None], others: Callable[[], bool], /) -> asyncio.Future[Completion]:
        """Run a batch without blocking; see `DirectDevice`."""
        if self._lane is not None:
            return self._lane.run(batch, ended, others)
        ended()
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        done.set_exception(WorkerDiedError("the model is not loaded"))
        return done

    def facts(self) -> dict[str, Any]:
        """Id of the process, number of its restarts, and why the last one died; None where there is none."""
        return {"pid": self._worker.pid, "restarts": self._worker.restarts, "last_fault": self._worker.last_fault}

    def end(self) -> None:
        """End the process."""
        self._worker.close()


class BatchLane:
    """The lane of a worker's thread that runs batches, one at a time, with its standby.

    Attributes:
        process: that the thread is of.
    """

    def __init__(self, lane: Lane) -> None:
        """Give the lane a standby."""
        self.process = lane.process
        self.call = lane.call
        self._channel = lane.channel
        self._standby = StandbyMemory()
        for file in self._standby.files:
            try:
                self._channel.send((None, ()), file)
            except OSError:  # it has ended, which the first call says
                break
        self._loop: asyncio.AbstractEventLoop | None = None  # that waits for the completion
        self._closed = False
        self._in_service: deque[_Work] = deque()
        self._offered: _Work | None = None
        self._ended: Callable[[], None] = lambda: None
        self._others: Callable[[], bool] = lambda: False

    def __del__(self) -> None:
        """Close the standby."""
        self._standby.close()

    def run(self, batch: Batch, ended: Callable[[], None], others: Callable[[], bool]) -> asyncio.Future[Completion]:
        """Run a batch; see `DirectDevice.run`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Completion] = loop.create_future()
        if self._closed:
            ended()
            done.set_exception(WorkerDiedError("the model's process has ended"))
            return done
        self._loop = loop
        loop.add_reader(self._channel.fileno(), self._on_answer)  # until it ends: `call` may read the answer after it
        self._ended, self._others = ended, others
        self._in_service.append((batch, done))
        if batch.standby is not None:
            batch.standby.worker = self
        message = "serve", (list(batch.inputs),)
        if _size(batch.inputs) > _LARGE:
            loop.run_in_executor(None, self._send, message)
        else:
            self._send(message)
        return done

    def _send(self, message: Any) -> None:
        try:
            self._channel.send(message)
        except OSError:
            self._channel.shut_down()  # so that the end is read

    def offer(self, batch: Batch, done: "asyncio.Future[Completion]") -> bool:
        """Offer a batch to the worker; False if it is another model's, large, or others wait for the device."""
        running = self._in_service[-1][0] if self._in_service else None
        if running is None or (batch.model, batch.revision) != (running.model, running.revision) or self._others():
            return False
        if _size(batch.inputs) > _LARGE or not self._standby.offer(list(batch.inputs)):
            return False
        self._offered = batch, done
        return True

    def withdraw(self) -> bool:
        """Withdraw the offer; False if the worker has taken it."""
        withdrawn = self._standby.withdraw()
        if withdrawn:
            self._offered = None
        return withdrawn

    def _on_answer(self) -> None:
        assert self._loop is not None
        try:
            answer, _ = self._channel.receive()
        except EOFError:
            self._on_end()
            return
        _, done = self._in_service.popleft()
        if isinstance(answer, SentError):
            result: Completion | Exception = received(answer)
        else:
            rows, started, finished, next_started = answer
            result = Completion(rows, started, finished, next_started)
            if next_started is not None:
                assert self._offered is not None
                self._in_service.append(self._offered)
                self._offered = None
        if not self._in_service:
            self._loop.remove_reader(self._channel.fileno())
            self._ended()
        _resolve(done, result)

    def _on_end(self) -> None:
        """Fail what is in service, once it is known how the process ended."""
        assert self._loop is not None
        self._loop.remove_reader(self._channel.fileno())
        self._closed = True
        lost = [*self._in_service]
        self._in_service.clear()
        if not lost:
            return

        def fail(how: "asyncio.Future[str]") -> None:
            self._ended()
            for _, done in lost:
                _resolve(done, WorkerDiedError(f"the model's process {how.result()}"))

        self._loop.run_in_executor(None, self.process.end).add_done_callback(fail)


def _size(inputs: Sequence[Row]) -> int:
    return sum(array.nbytes for sample in inputs for array in sample.values())


def _resolve(done: "asyncio.Future[Completion]", result: Completion | Exception) -> None:
    if done.done():
        return
    if isinstance(result, Completion):
        done.set_result(result)
    else:
        done.set_exception(result)
