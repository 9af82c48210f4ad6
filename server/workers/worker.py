"""The worker of a model: its process, started when it is needed and again after its death, and calls to it."""

import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any

from server.errors import WorkerDiedError
from server.workers.channel import Channel, channel_pair
from server.workers.errors import SentError, received

_log = logging.getLogger("batchwright.worker")
_PROGRAM = "import sys; sys.path[:] = {path!r}; from server.app.model_process import main; main()"
_END = 1.0  # s that a process has to end, once its sockets are closed


class Lane:
    """Calls to one thread of a worker; a thread at a time may call.

    Each call has a number, and so has its answer: that of a call that was given up is not taken for another's.

    Attributes:
        process: that the thread is of.
        channel: to that thread.
        numbers: of the calls.
    """

    def __init__(self, process: "WorkerProcess", channel: Channel, numbers: "count[int] | None" = None) -> None:
        self.process = process
        self.channel = channel
        self.numbers = numbers or count()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker's model, and return its result.

        Raises:
            WorkerDiedError: the process has ended.
            Exception: what the method raised.
        """
        sent = next(self.numbers)
        try:
            self.channel.send((sent, method, arguments))
            (number, answer), _ = self.channel.receive()
            while number != sent:
                (number, answer), _ = self.channel.receive()
        except (EOFError, OSError) as error:
            raise WorkerDiedError(f"the model's process {self.process.end()}") from error
        if isinstance(answer, SentError):
            raise received(answer)
        return answer[0]


class WorkerProcess:
    """One process.

    Attributes:
        pid: its id.
        idle: lanes that no thread uses.
    """

    def __init__(self, *setup: Any) -> None:
        """Start the process, and send it what it needs to know."""
        self._control, theirs = channel_pair()
        with theirs:
            self._process = _starter().submit(_start, theirs.fileno()).result()
        self.pid = self._process.pid
        self.idle: deque[tuple[Channel, count[int]]] = deque()
        with suppress(OSError):  # it has ended; the first call says so
            self._control.send(setup)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def lane(self) -> Lane:
        """A new thread of the process; without effect if it has ended, which the first call says."""
        channel, theirs = channel_pair()
        with theirs, suppress(OSError):
            self._control.send(None, theirs.fileno())
        return Lane(self, channel)

    def kill(self) -> None:
        """End it at once; calls to it raise WorkerDiedError."""
        self._process.kill()

    def end(self) -> str:
        """End it, and say how it ended."""
        self._control.shut_down()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        self._process.kill()
        code = self._process.wait()
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


class ModelWorker:
    """The worker of one model.

    Attributes:
        restarts: number of starts after the first one.
        last_fault: how the last process ended before its time; None if none did.
    """

    def __init__(self, *setup: Any) -> None:
        """`setup` is sent to each process at its start."""
        self.restarts = 0
        self.last_fault: str | None = None
        self._setup = setup
        self._current: list[WorkerProcess] = []  # none, or one
        self._starting, self._alone = threading.Lock(), threading.Lock()
        weakref.finalize(self, _end_all, self._current)

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it is started."""
        return self._current[0].pid if self._current else None

    def lane(self) -> Lane:
        """A thread of the worker of its own, for batches."""
        return self._process().lane()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the model on a thread of the worker that is free; raises as `Lane.call`.

        If the process dies it is called again in the next one, alone, so that only the call that is the cause fails.
        """
        try:
            return self._call(method, arguments)
        except WorkerDiedError as error:
            _log.error("%s failed: %s; it is called again", method, error)
            with self._alone:
                return self._call(method, arguments)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        process = self._process()
        try:
            lane = Lane(process, *process.idle.popleft())
        except IndexError:
            lane = process.lane()
        try:
            result = lane.call(method, *arguments)
        except WorkerDiedError:
            raise
        except Exception:
            process.idle.append((lane.channel, lane.numbers))
            raise
        process.idle.append((lane.channel, lane.numbers))
        return result

    def replace(self, process: WorkerProcess) -> None:
        """Kill a process if it is the one in use; the next call starts another one."""
        with self._starting:
            if process in self._current:
                process.kill()
                process.end()

    def close(self) -> None:
        """End the process, without waiting for it, also while it is being started."""
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
                _log.info("the process of %s is started again", self._setup[0])
            self._current[:] = [WorkerProcess(*self._setup)]
            return self._current[0]


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
        command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(control,)
    )
