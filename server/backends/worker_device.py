"""A model in a worker, as a Device. Without torch."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.cpus import available_cpus
from server.backends.executor import Batch, Completion, resolve
from server.backends.real_device import Optimise
from server.errors import WorkerDiedError
from server.workers.errors import SentError, received
from server.workers.standby import StandbyMemory
from server.workers.worker import Lane, ModelWorker, WorkerProcess, shared_memory

_log = logging.getLogger("batchwright.model")
_TRIALS = 3  # of each number of threads, of which the fastest counts
_LARGE = 2**18  # bytes of inputs, which a thread sends: copying more would delay the event loop


def more_threads_pay(fewer: float, more: float) -> bool:
    """Whether more threads are worth it, by the times of one request with fewer and with more of them, s.

    They have to save a tenth of the time with them, and either a millisecond or half of that time: threads wait for
    each other, and where another process has a processor, such a wait takes milliseconds.
    """
    return fewer > max(1.1 * more, min(1.5 * more, more + 1e-3))


class Cost(NamedTuple):
    """Service time of a batch, and CPU time of the model's process for it, s."""

    time: float
    cpu_time: float


class WorkerDevice:
    """A Device for one model, which its worker loads and runs on a thread of its own.

    Attributes:
        threads: of the model, those in use; None if it does not use torch on the CPU.
    """

    def __init__(self, name: str, worker: ModelWorker, place: str, optimise: Optimise = "auto") -> None:
        """Serve the model of a worker, once `load` was called, on a device by torch's name of it."""
        self._name = name
        self._worker = worker
        self._place = place
        self._optimise: Optimise = optimise
        self._lane: BatchLane | None = None
        self._serving = False  # whether a thread waits for a batch
        self.threads: int | None = None

    def load(self) -> None:
        """Load the model.

        Raises:
            SpecError: it raised an exception.
            WorkerDiedError: its process ended.
        """
        if self._place != "cpu":
            shared_memory().keeps_pages = True
        self._lane = BatchLane(self._worker.load(f"loading {self._name}", self._place, self._optimise))

    def choose_threads(self, batch: Batch, wanted: int | None) -> None:
        """Use this many threads, or, if None, all processors if `more_threads_pay`, else one less.

        Only for a model that uses torch on the CPU; those of others are as they were loaded.
        """
        cpus = available_cpus()
        if self._place != "cpu" or not self.use_threads(wanted or cpus):
            return
        if wanted is not None or cpus == 1:
            return
        times = {cpus - 1: math.inf, cpus: math.inf}
        for count in (cpus - 1, cpus) * _TRIALS:  # in turns, so that other work of a moment slows down both
            times[count] = min(times[count], self.time_with(count, batch).time)
        self.use_threads(cpus if more_threads_pay(times[cpus - 1], times[cpus]) else cpus - 1)
        text = ", ".join(f"{1e3 * each:.3g} ms with {count}" for count, each in times.items())
        _log.info("%s: %d threads; one request alone takes %s", self._name, self.threads, text)

    def use_threads(self, count: int) -> bool:
        """Use this many threads for the next batches; False if the model does not use torch. No batch may run."""
        assert self._lane is not None
        if not self._lane.set_threads(count):
            return False
        self.threads = count
        return True

    def time_with(self, count: int, batch: Batch) -> Cost:
        """What a batch costs with this many threads; those in use stay. No other batch may run."""
        assert self._lane is not None
        assert self.threads is not None
        self._lane.set_threads(count)  # `threads` stay: those of the next process if this one dies
        try:
            self._served(batch)  # the first one starts the threads
            done = self._served(batch)
            return Cost(done.finished - done.started, done.cpu_time or 0.0)
        finally:
            with suppress(WorkerDiedError):
                self._lane.set_threads(self.threads)

    def upload(self, sample: Any, /) -> Any:
        """The sample, its arrays copied to the memory that the worker shares, unless they are small, or there."""
        if isinstance(sample, np.ndarray):
            return shared_memory().place(sample)
        return {name: shared_memory().place(array) for name, array in sample.items()}

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
            if self.threads is not None:
                self._lane.set_threads(self.threads)

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """One output for each input; it blocks.

        Raises:
            WorkerDiedError: the process ended.
            Exception: as the device in the worker.
        """
        return self._served(batch).outputs

    def _served(self, batch: Batch) -> Completion:
        if self._lane is None:
            raise WorkerDiedError("the model is not loaded")
        self._serving = True
        try:
            return self._lane.serve(batch)
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

    def watch(self, on_restart: Callable[[str], None]) -> None:
        """Have a function called at each restart of the process, in any thread, with "died" or "hung"."""
        self._worker.on_restart = on_restart

    def facts(self) -> dict[str, Any]:
        """Id of the process, number of its restarts, and why the last one died; None where there is none."""
        return {"pid": self._worker.pid, "restarts": self._worker.restarts, "last_fault": self._worker.last_fault}

    def end(self) -> None:
        """End the process."""
        self._worker.close()


class StageOutput:
    """Output of a stage that is not the last, which stays in the worker until nothing refers to this.

    Attributes:
        process: the worker's.
        number: of the output there.
        sample: that it was computed from, in case that the process dies.
    """

    __slots__ = ("_dropped", "number", "process", "sample")

    def __init__(self, process: WorkerProcess, number: int, sample: Any, dropped: "deque[int]") -> None:
        self.process = process
        self.number = number
        self.sample = sample
        self._dropped = dropped

    def __del__(self) -> None:
        """Let the worker drop the output with the next batch."""
        self._dropped.append(self.number)


class BatchLane:
    """The lane of a worker's thread that runs batches, one at a time, with its standby.

    The message of a batch is its number, inputs, first stage, number of stages, and the numbers of outputs that the
    worker may drop. The inputs of stages after the first are numbers of outputs.

    Attributes:
        process: that the thread is of.
        hangs: whether the batch that it runs was given up.
    """

    def __init__(self, lane: Lane) -> None:
        """Give the lane a standby."""
        self.process = lane.process
        self._call = lane.call
        self._channel, self._numbers = lane.channel, lane.numbers
        self._standby = StandbyMemory(shared=shared_memory())
        for file in self._standby.files:
            try:
                self._channel.send((0, "", ()), file)
            except OSError:  # it has ended, which the first call says
                break
        self._loop: asyncio.AbstractEventLoop | None = None  # that waits for the completion
        self._closed = self.hangs = False
        self._in_service: _Work | None = None
        self._offered: _Work | None = None
        self._dropped = deque[int]()  # outputs of stages
        self._offered_dropped = list[int]()
        self._ended: Callable[[], None] = lambda: None
        self._others: Callable[[], bool] = lambda: False

    def __del__(self) -> None:
        """Close the standby."""
        self._standby.close()

    def serve(self, batch: Batch) -> Completion:
        """Run a batch; it blocks. Raises as `Lane.call`.

        No launch is taken from the standby after it: the offer to a batch before may not be withdrawn yet.
        """
        batch = self._runnable(batch)
        outputs, started, finished, cpu_time = self._call("serve_alone", *self._message(batch))
        return Completion(self._received(batch, outputs), started, finished, cpu_time=cpu_time)

    def set_threads(self, count: int) -> bool:
        """Set the threads of torch for batches; False if the model does not use it. Raises as `Lane.call`."""
        return bool(self._call("set_threads", count))

    def run(self, batch: Batch, ended: Callable[[], None], others: Callable[[], bool]) -> asyncio.Future[Completion]:
        """Run a batch; see `DirectDevice.run`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Completion] = loop.create_future()
        if self._closed:
            ended()
            done.set_exception(WorkerDiedError("the model's process has ended"))
            return done
        self._loop = loop
        loop.add_reader(self._channel.fileno(), self._on_answer)  # until it ends: `serve` may read the answer after it
        loop.add_reader(self.process.ended, self._on_end)
        self._ended, self._others = ended, others
        batch = self._runnable(batch)
        work = _Work(next(self._numbers), batch, done)
        self._begin(work)
        if batch.standby is not None:
            batch.standby.worker = self
        message = work.number, "serve", self._message(batch)
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
        if batch.model_id != running.model_id or _size(batch.inputs) > _LARGE:
            return False
        batch = self._runnable(batch)
        number, message = next(self._numbers), self._message(batch)
        self._offered_dropped = message[-1]
        if not self._standby.offer((number, *message)):
            self._dropped.extend(self._offered_dropped)
            return False
        self._offered = _Work(number, batch, done)
        return True

    def _runnable(self, batch: Batch) -> Batch:
        """The batch, from its first stage on if an output of a former stage is gone with its process."""
        if all(each.process is self.process for each in batch.inputs if isinstance(each, StageOutput)):
            return batch
        return replace(batch, inputs=[each.sample for each in batch.inputs], first_stage=0, stages=batch.last_stage)

    def _message(self, batch: Batch) -> tuple[Any, int, int | None, list[int]]:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        inputs = [each.number for each in batch.inputs] if batch.first_stage else [*batch.inputs]
        return inputs, batch.first_stage, batch.stages, dropped

    def _received(self, batch: Batch, outputs: Sequence[Any]) -> Sequence[Any]:
        """The outputs of a batch; of stages before the last they stay in the worker."""
        if not outputs or not isinstance(outputs[0], int):
            return outputs
        samples = [each.sample if isinstance(each, StageOutput) else each for each in batch.inputs]
        return [
            StageOutput(self.process, number, sample, self._dropped)
            for number, sample in zip(outputs, samples, strict=True)
        ]

    def withdraw(self) -> bool:
        """Withdraw the offer; False if the worker has taken it."""
        withdrawn = self._standby.withdraw()
        if withdrawn:
            self._offered = None
            self._dropped.extend(self._offered_dropped)
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
        following: _Work | None = None
        if next_started is not None:
            following, self._offered = self._offered, None
            assert following is not None
        if isinstance(answer, SentError):
            result: Completion | Exception = received(answer)
        else:
            outputs, started, finished, cpu_time = answer
            outputs = self._received(work.batch, outputs)
            if following is not None and not following.batch.inputs:
                following.batch = replace(following.batch, inputs=outputs)
            result = Completion(outputs, started, finished, next_started, cpu_time)
        if following is not None:
            self._begin(following)
        resolve(work.done, result)

    def _on_end(self) -> None:
        """Fail what is in service, once it is known how the process ended."""
        self._remove_readers()
        self._closed = True
        assert self._loop is not None
        lost = [*filter(None, (self._in_service, self._taken()))]

        def fail(how: "asyncio.Future[str]") -> None:
            death = WorkerDiedError(f"the model's process {how.result()}")  # one for both batches
            for work in lost:
                work.answered = True
                resolve(work.done, death)

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
            self._standby.offer(None)  # it was not taken: the dispatcher withdraws it later, and its launch waits on
            return None
        taken, self._offered = self._offered, None
        return taken


@dataclass(eq=False)
class _Work:
    number: int
    batch: Batch
    done: "asyncio.Future[Completion]"
    answered: bool = False


def _size(inputs: Sequence[Any]) -> int:
    """Bytes of inputs that are copied for a batch."""
    find = shared_memory().contains
    return sum(array.nbytes for sample in inputs for array in _arrays(sample) if not find(array))


def _arrays(sample: Any) -> Iterable[NDArray[Any]]:
    if isinstance(sample, np.ndarray):
        return (sample,)
    return sample.values() if isinstance(sample, Mapping) else ()
