"""The worker of a model: its process, started when it is needed and again after its death, and calls to it."""

import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from typing import Any

from policies.types import SpecError
from server.errors import WorkerDiedError
from server.telemetry.logs import log_options
from server.workers.channel import Channel, channel_pair
from server.workers.errors import SentError, received
from server.workers.shared_memory import SharedMemory

_log = logging.getLogger("batchwright.worker")
_PROGRAM = "import sys; sys.path[:] = {path!r}; from server.app.model_process import main; main()"
_END = 1.0  # s that a process has to end, once its sockets are closed
_numbers = count()  # of all calls: a lane is used again
_REPEAT_LIMIT = 30.0  # s for a call that is repeated


class Lane:
    """Calls to one thread of a worker; a thread at a time may call.

    Each call has a number, and so has its answer: that of a call that was given up is not taken for another's.

    Attributes:
        process: that the thread is of.
        channel: to that thread.
        numbers: of the calls.
    """

    def __init__(self, process: "WorkerProcess", channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.numbers = _numbers

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker's model, and return its result.

        Raises:
            WorkerDiedError: the process has ended.
            Exception: what the method raised.
        """
        sent = next(self.numbers)
        try:
            self.channel.send((sent, method, arguments))
            (number, answer, _), _ = self.channel.receive()
            while number != sent:
                (number, answer, _), _ = self.channel.receive()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDiedError(f"the model's process {self.process.end()}") from error
        if isinstance(answer, SentError):
            raise received(answer)
        return answer


class WorkerProcess:
    """One process, which leads a group of the processes that it starts.

    Attributes:
        pid: its id.
        ended: a descriptor that is readable once it has ended.
        batches: the lane of the thread that has loaded the model, if it has.
        idle: lanes that no thread uses.
    """

    def __init__(self) -> None:
        """Start the process."""
        self._control, theirs = channel_pair()
        with theirs:
            self._process = _starter().submit(_start, theirs.fileno()).result()
        self.pid = self._process.pid
        self.ended = os.pidfd_open(self.pid)
        self._close = weakref.finalize(self, os.close, self.ended)
        self.batches: Lane | None = None
        self.idle: deque[Channel] = deque()
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        with suppress(OSError):  # it has ended; the first call says so
            self._control.send(log_options(), shared_memory().file)

    def set_model(self, model: Any) -> None:
        """Say which model the calls are for; those of threads that were started before might come too early."""
        self.idle.clear()
        with suppress(OSError):
            self._control.send(model)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def lane(self) -> Lane:
        """A new thread of the process; without effect if it has ended, which the first call says."""
        channel, theirs = channel_pair(shared_memory())
        self._channels.add(channel)
        with theirs, suppress(OSError):
            self._control.send(None, theirs.fileno())
        return Lane(self, channel)

    def kill(self) -> None:
        """End it and what it has started at once; calls to it raise WorkerDiedError."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> str:
        """End it, and say how it ended."""
        self._control.shut_down()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        self.kill()
        code = self._process.wait()
        for channel in [*self._channels]:  # a process that it has started may have its ends
            channel.shut_down()
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


class ModelWorker:
    """The worker of one model.

    Attributes:
        restarts: number of starts after the first one.
        last_fault: how the last process ended before its time; None if none did.
        on_restart: called at each restart, in any thread, with "died", or "hung" if the process was replaced.
    """

    def __init__(self, model: Any) -> None:
        """`model` is what the processes serve: a `FileModel` or a `TorchvisionModel`."""
        self.restarts = 0
        self.last_fault: str | None = None
        self.on_restart: Callable[[str], None] = lambda _: None
        self._replaced = False
        self._model = model
        self._load: tuple[Any, ...] = ()  # arguments of `load`, once the model has been loaded
        self._current: list[WorkerProcess] = []  # none, or one
        self._spare: list[WorkerProcess] = []  # for repeated calls
        self._starting, self._alone = threading.Lock(), threading.Lock()
        self._repeats = 0
        self._closed = False
        weakref.finalize(self, _end_all, self._current).atexit = False  # at exit they end by themselves

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it is started."""
        return self._current[0].pid if self._current else None

    def describe(self) -> Any:
        """What `describe` of the worker returns; raises as `Lane.call`."""
        return _call(self._process(), "describe", ())

    def load(self, *arguments: Any) -> Lane:
        """Load the model by these arguments, also in each process from now on, and return the lane for its batches.

        Raises:
            WorkerDiedError: the process has ended.
            Exception: what `load` of the model raised.
        """
        with self._starting:
            self._load = arguments
            if self._current and self._current[0].runs and self._current[0].batches is None:
                self._loaded(self._current[0])
        return self.batches()

    def batches(self) -> Lane:
        """The lane for batches of the process, which is started again if it has ended; raises as `load`."""
        lane = self._process().batches
        assert lane is not None
        return lane

    def lane(self) -> Lane:
        """A thread of its own of the process, which is started if it is not running; raises as `load`."""
        return self._process().lane()

    def another(self) -> "ModelWorker":
        """A worker of the same model, with a process of its own."""
        return ModelWorker(self._model)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the model on a thread of the worker that is free; raises as `Lane.call`.

        If the process dies meanwhile, it is called again in a process of its own, so that an input that ends it fails
        alone.
        """
        try:
            return _call(self._process(), method, arguments)
        except WorkerDiedError as error:
            if self._closed:
                raise
            _log.error("%s failed: %s; it is called again", method, error)
            with self._repeating() as process:
                return _call(process, method, arguments)

    @contextmanager
    def _repeating(self) -> Iterator[WorkerProcess]:
        """A process for one call at a time, which ends with the last call that waits for it, or after a limit."""
        with self._starting:
            self._repeats += 1
        try:
            with self._alone:
                if not (self._spare and self._spare[0].runs):
                    self._start_in(self._spare)
                timer = threading.Timer(_REPEAT_LIMIT, self._spare[0].kill)
                timer.start()
                try:
                    yield self._spare[0]
                finally:
                    timer.cancel()
        finally:
            with self._starting:
                self._repeats -= 1
                if not self._repeats:
                    _end_all(self._spare)

    def replace(self, process: WorkerProcess) -> None:
        """Kill a process if it is the one in use; the next call starts another one."""
        with self._starting:
            if process in self._current:
                self._replaced = True
                process.kill()
                process.end()

    def close(self) -> None:
        """End the process, without waiting for it, also while it is being started; none is started any more."""
        self._closed = True
        for process in (*self._current, *self._spare):
            process.kill()
        threading.Thread(target=self._close, name="worker-end", daemon=True).start()

    def _close(self) -> None:
        with self._starting:
            _end_all(self._current)

    def _process(self) -> WorkerProcess:
        with self._starting:
            if self._current and self._current[0].runs:
                return self._current[0]
            if self._current:
                self.restarts += 1
                self.last_fault = self._current[0].end()
                self.on_restart("hung" if self._replaced else "died")
                self._replaced = False
                _log.info("the process of %s is started again", self._model)
            return self._start_in(self._current)

    def _start_in(self, place: list[WorkerProcess]) -> WorkerProcess:
        """Start a process, and load the model if it has been loaded before."""
        if self._closed:
            raise WorkerDiedError("the model's process was ended, since the model is unloaded")
        process = _idle_process(self._model.needs_torch) or WorkerProcess()
        process.set_model(self._model)
        place[:] = [process]  # before it is loaded, so that `close` ends a load that hangs
        self._kill_if_closed(process)
        if self._load:
            self._loaded(process)
        return process

    def _kill_if_closed(self, process: WorkerProcess) -> None:
        if self._closed:  # `close` may not have seen it
            process.kill()

    def _loaded(self, process: WorkerProcess) -> None:
        lane = process.lane()
        try:
            lane.call("load", *self._load)
        except BaseException:
            process.end()
            raise
        process.batches = lane


_idle: list[WorkerProcess] = []  # which has imported torch, and has no model yet


def find_in_worker(spec: str) -> Any:
    """The device of a spec as torch finds it, a `RealDevice`. The process is kept for a model until `end_idle`.

    Raises:
        SpecError: there is no such device, or the process ended.
    """
    if not (_idle and _idle[0].runs):
        _idle[:] = [WorkerProcess()]
    try:
        return _call(_idle[0], "find_device", (spec,))
    except WorkerDiedError as error:
        raise SpecError(f"{error} while torch looked for {spec}; give cpu, or repair torch") from error


def end_idle() -> None:
    """End the process that no model has used."""
    _end_all(_idle)


def _idle_process(needs_torch: bool) -> WorkerProcess | None:
    return _idle.pop() if needs_torch and _idle and _idle[0].runs else None


@cache
def shared_memory() -> SharedMemory:
    """The memory that this process shares with its workers."""
    return SharedMemory()


def _call(process: WorkerProcess, method: str, arguments: tuple[Any, ...]) -> Any:
    try:
        lane = Lane(process, process.idle.popleft())
    except IndexError:
        lane = process.lane()
    try:
        return lane.call(method, *arguments)
    finally:
        process.idle.append(lane.channel)  # useless if the process has ended, and then so is `process`


def _end_all(processes: list[WorkerProcess]) -> None:
    for process in processes:
        threading.Thread(target=process.end, name="worker-end", daemon=True).start()
    processes.clear()


@cache
def _starter() -> ThreadPoolExecutor:
    """The thread that starts processes: each gets SIGKILL when it ends, and it lives as long as this process."""
    return ThreadPoolExecutor(1, "worker-starter")


def _start(control: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", _PROGRAM.format(path=sys.path), str(control), str(os.getpid())]
    return subprocess.Popen(  # noqa: S603  (this program)
        command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(control,), start_new_session=True
    )
