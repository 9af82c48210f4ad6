"""The same load from several processes: every n-th request from each, counted from one common start.

Each is told its instants, says when it is ready to send, is told the start by the clock that all processes of a machine
share (time.monotonic), and hands over its records as they come. A word from the parent, or its end, stops it.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import numpy as np

from loadgen.client import RunLog, offer, open_session
from loadgen.live import LoadTarget, allow_many_connections, loop_factory
from loadgen.progress import EVERY, Progress
from loadgen.report import Record
from loadgen.schedule import Schedule
from policies.types import SpecError

MAX_PROCESSES = 64
_COMFORTABLE = 1000.0  # requests per second that one process sends on time, on most machines
_HEADSTART = 0.1  # s, for the word of the start to reach everybody
_HAND_OVER = 0.2  # s, from one hand-over of records to the next
_PEAK = 1.0  # s over which the highest rate counts


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection


def process_count(words: str, schedule: Schedule, cores: int) -> int:
    """The number of processes that --processes asks for.

    Args:
        words: a whole number, or auto: enough for the busiest second, but no more than there are cores.
        schedule: what they are to send.
        cores: of this machine.

    Raises:
        SpecError: neither.
    """
    if words == "auto":
        busiest = int(np.bincount((schedule.instants / _PEAK).astype(np.int64)).max())
        return min(ceil(busiest / _PEAK / _COMFORTABLE), cores, MAX_PROCESSES)
    if not words.isascii() or not words.isdigit() or not 1 <= int(words) <= MAX_PROCESSES:
        raise SpecError(f"--processes is {words!r}; give a whole number within 1..{MAX_PROCESSES}, or auto")
    return int(words)


def run_load_in_processes(target: LoadTarget, schedule: Schedule, progress: Progress, log: RunLog, count: int) -> bool:
    """Send all requests from `count` processes and gather their records; whether Ctrl-C cut that short.

    Raises:
        SpecError: nothing can be sent at all, or a process died.
    """
    with progress, _started(target, schedule, count) as workers:
        start = time.monotonic() + _HEADSTART
        for worker in workers:
            worker.pipe.send(start)
        interrupted = _gather(workers, log, lambda: progress.show(max(0.0, time.monotonic() - start), log))
        for worker in workers:
            worker.process.join()
            if worker.process.exitcode:
                code = worker.process.exitcode
                raise SpecError(f"a sending process died (exit code {code}); give fewer --processes, or look at memory")
    return interrupted


@contextmanager
def _started(target: LoadTarget, schedule: Schedule, count: int) -> Iterator[list[_Worker]]:
    """Workers that are ready to send; none of them is left at the end."""
    workers: list[_Worker] = []
    try:
        for first in range(count):
            workers.append(_start(target.share(first, count), schedule.instants[first::count].tolist()))  # noqa: PERF401  (kept when it breaks)
        for worker in workers:
            if (refusal := worker.pipe.recv()) is not None:
                raise SpecError(refusal)
        yield workers
    except EOFError:
        raise SpecError("a sending process died before it began; give fewer --processes") from None
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
            worker.process.join()
            worker.process.close()


def _start(target: LoadTarget, instants: list[float]) -> _Worker:
    context = get_context("spawn")  # a fork would copy locks of threads that it does not copy
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, target, instants), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _gather(workers: Sequence[_Worker], log: RunLog, show: Callable[[], None]) -> bool:
    """Until each has closed its pipe; whether Ctrl-C came in between."""
    open_pipes, interrupted = [worker.pipe for worker in workers], False
    while open_pipes:
        try:
            for pipe in wait(open_pipes, EVERY):
                assert isinstance(pipe, Connection)
                if not _take(pipe, log):
                    open_pipes.remove(pipe)
            show()
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            for pipe in open_pipes:
                with suppress(OSError):
                    pipe.send(None)
    return interrupted


def _take(pipe: Connection, log: RunLog) -> bool:
    try:
        sent, records = pipe.recv()
    except (EOFError, OSError):
        return False
    log.sent += sent
    for record in records:
        log.add(Record(*record))
    return True


def work(pipe: Connection, target: LoadTarget, instants: Sequence[float]) -> None:
    """What each process does: send at these instants (s after the common start), and hand over what happened."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent tells us
    allow_many_connections()
    with suppress(BrokenPipeError, EOFError), asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_work(pipe, target, instants))
    pipe.close()


async def _work(pipe: Connection, target: LoadTarget, instants: Sequence[float]) -> None:
    async with open_session(target.give_up_after, target.key) as session:
        try:
            sender = await target.sender(session)
        except SpecError as error:
            pipe.send(str(error))
            return
        pipe.send(None)
        start, log = await asyncio.to_thread(pipe.recv), RunLog()
        sending = asyncio.create_task(offer(sender, instants, log, start=start))
        _cancel_at_a_word(sending, pipe)
        handed = (0, 0)
        while not sending.done():
            await asyncio.wait([sending], timeout=_HAND_OVER)
            handed = await _hand_over(pipe, log, handed)
        if not sending.cancelled():
            sending.result()


def _cancel_at_a_word(sending: asyncio.Task[None], pipe: Connection) -> None:
    """Whatever can be read is a word to stop, or the end of the parent."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(pipe.fileno())
        sending.cancel()

    loop.add_reader(pipe.fileno(), stop)


async def _hand_over(pipe: Connection, log: RunLog, handed: tuple[int, int]) -> tuple[int, int]:
    """Pass on what is new since so many were sent and over; how many now."""
    sent, over = log.sent, len(log.records)
    rows = [
        (r.scheduled, r.sent, r.finished, r.status, r.batch_size, r.waiting, r.service, r.energy)
        for r in log.records[handed[1] : over]
    ]
    await asyncio.to_thread(pipe.send, (sent - handed[0], rows))
    return sent, over
