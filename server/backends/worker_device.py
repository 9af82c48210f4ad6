"""A user's model in a worker, as a Device. Without torch."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.backends.executor import Batch, Completion, resolve
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


class WorkerDevice:
    """A Device for one model, which its worker loads and runs on a thread of its own."""

    def __init__(self, served: ServedModel[TensorCodec], device: str) -> None:
        """Serve the model of the codec, once `load` was called; `device` is torch's name of it."""
        assert isinstance(served.codec.model, RemoteModel)
        self._name = served.name
        self._worker = served.codec.model.worker
        self._device = device
        self._lane: BatchLane | None = None
        self._serving = False  # whether a thread waits for a batch

    def load(self) -> None:
        """Load the model.

        Raises:
            SpecError: it raised an exception.
            WorkerDiedError: its process ended.
        """
        self._lane = BatchLane(self._worker.load(self._device, f"loading {self._name}"))

    def restart(self, hung: bool) -> None:
        """Run batches in the next process, with the model loaded; if a batch of this model `hung`, it is killed."""
        lane = self._lane
        if lane is not None:
            if hung and (self._serving or lane.hangs):
                self._worker.replace(lane.process)
            lane.abandon()
        following = self._worker.batches()
        if lane is None or following.process is not lane.process:
            _log.warning("%s was loaded again in a new process", self._name)
            self._lane = BatchLane(following)

    def serve(self, batch: Batch, /) -> Sequence[Row]:
        """For each sample its outputs, arrays by name; it blocks.

        Raises:
            WorkerDiedError: the process ended.
            Exception: as `TensorDevice.serve`.
        """
        if self._lane is None:
            raise WorkerDiedError("the model is not loaded")
        self._serving = True
        try:
            rows: Sequence[Row] = self._lane.call("run", batch.inputs)
            return rows
        finally:
            self._serving = False

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
        hangs: whether the batch that it runs was given up.
    """

    def __init__(self, lane: Lane) -> None:
        """Give the lane a standby."""
        self.process = lane.process
        self.call = lane.call
        self._channel, self._numbers = lane.channel, lane.numbers
        self._standby = StandbyMemory()
        for file in self._standby.files:
            try:
                self._channel.send((0, "", ()), file)
            except OSError:  # it has ended, which the first call says
                break
        self._loop: asyncio.AbstractEventLoop | None = None  # that waits for the completion
        self._closed = self.hangs = False
        self._in_service: _Work | None = None
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
        loop.add_reader(self.process.ended, self._on_end)
        self._ended, self._others = ended, others
        work = _Work(next(self._numbers), batch, done)
        self._begin(work)
        if batch.standby is not None:
            batch.standby.worker = self
        message = work.number, "serve", (list(batch.inputs),)
        if _size(batch.inputs) > _LARGE:
            loop.run_in_executor(None, self._send, work, message)
        else:
            self._send(work, message)
        return done

    def offer(self, batch: Batch, done: "asyncio.Future[Completion]") -> bool:
        """Offer a batch to the worker; False if it is another model's, large, or others wait for the device."""
        if self._in_service is None or self._others():
            return False
        running = self._in_service.batch
        if (batch.model, batch.revision) != (running.model, running.revision) or _size(batch.inputs) > _LARGE:
            return False
        number = next(self._numbers)
        if not self._standby.offer((number, list(batch.inputs))):
            return False
        self._offered = _Work(number, batch, done)
        return True

    def withdraw(self) -> bool:
        """Withdraw the offer; False if the worker has taken it."""
        withdrawn = self._standby.withdraw()
        if withdrawn:
            self._offered = None
        return withdrawn

    def _begin(self, work: "_Work") -> None:
        self._in_service = work
        work.done.add_done_callback(partial(self._on_done, work))

    def _on_done(self, work: "_Work", _: "asyncio.Future[Completion]") -> None:
        """Free the device after a batch that no other has followed, also if its timeout has passed."""
        if self._in_service is work:
            self._in_service, self.hangs = None, not work.answered
            self._remove_readers()
            self._ended()

    def _remove_readers(self) -> None:
        assert self._loop is not None
        for file in (self._channel.fileno(), self.process.ended):
            self._loop.remove_reader(file)

    def _send(self, work: "_Work", message: Any) -> None:
        try:
            self._channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return  # it has ended, which is read
        except Exception as error:  # noqa: BLE001  (such as too many open files)
            assert self._loop is not None
            work.answered = True
            self._loop.call_soon_threadsafe(resolve, work.done, error)

    def _on_answer(self) -> None:
        work = self._in_service
        try:
            (number, answer, next_started), _ = self._channel.receive(wait=False)
        except BlockingIOError:
            return
        except EOFError:
            self._on_end()
            return
        except Exception as error:  # noqa: BLE001  (such as outputs that cannot be read here)
            if work is not None:
                work.answered = True
                resolve(work.done, error)
            return
        if work is None or number != work.number:  # of a batch that was given up
            return
        work.answered = True
        if next_started is not None:
            assert self._offered is not None
            self._begin(self._offered)
            self._offered = None
        if isinstance(answer, SentError):
            resolve(work.done, received(answer))
        else:
            rows, started, finished = answer
            resolve(work.done, Completion(rows, started, finished, next_started))

    def _on_end(self) -> None:
        """Fail what is in service, once it is known how the process ended."""
        self._remove_readers()
        self._closed = True
        assert self._loop is not None
        lost = [*filter(None, (self._in_service, self._taken()))]

        def fail(how: "asyncio.Future[str]") -> None:
            for work in lost:
                work.answered = True
                resolve(work.done, WorkerDiedError(f"the model's process {how.result()}"))

        self._loop.run_in_executor(None, self.process.end).add_done_callback(fail)

    def abandon(self) -> None:
        """Fail a launch that was taken by a process that has ended; on any thread."""
        if self._loop is not None and not self.process.runs:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._fail_taken)

    def _fail_taken(self) -> None:
        taken = self._taken()
        if taken is not None:
            resolve(taken.done, WorkerDiedError("the model's process ended after it took the batch"))

    def _taken(self) -> "_Work | None":
        """The offer if the process, which has ended, has taken it."""
        if self._offered is None:
            return None
        if self._standby.withdraw():
            self._standby.offer(None)  # the side that offered it withdraws it
            return None
        taken, self._offered = self._offered, None
        return taken


@dataclass(eq=False)
class _Work:
    number: int
    batch: Batch
    done: "asyncio.Future[Completion]"
    answered: bool = False


def _size(inputs: Sequence[Row]) -> int:
    return sum(array.nbytes for sample in inputs for array in sample.values())
