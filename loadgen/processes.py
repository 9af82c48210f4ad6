"""A live run from several processes: each sends every n-th request of the schedule.

Protocol on each worker's pipe: the worker sends None (ready) or an error message; the parent sends the common start by
time.monotonic, which all processes of a machine share; the worker sends reports of the number of requests sent since
the one before, their records and the first error. Any message from the parent, or its end, stops the worker.
"""

import asyncio
import os
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
from loadgen.live_run import LoadTarget, allow_many_connections, loop_factory
from loadgen.progress import INTERVAL, Progress
from loadgen.report import Record
from loadgen.schedule import Schedule
from policies.types import SpecError

MAX_PROCESSES = 64
_RATE_PER_PROCESS = 1000.0  # requests/s that one process sends on time on most machines
_START_DELAY = 0.1  # s, in which all workers receive the start
_REPORT_INTERVAL = 0.2  # s between two messages with records
_PEAK_WINDOW = 1.0  # s over which the peak rate is measured


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection


def process_count(text: str, schedule: Schedule, cores: int) -> int:
    """Number of processes for a value of --processes.

    Args:
        text: a whole number, or auto: enough for the peak rate, but at most one per core.
        schedule: schedule of the run.
        cores: number of available cores.

    Raises:
        SpecError: the value is neither.
    """
    if text == "auto":
        busiest = int(np.bincount((schedule.instants / _PEAK_WINDOW).astype(np.int64)).max())
        return min(ceil(busiest / _PEAK_WINDOW / _RATE_PER_PROCESS), cores, MAX_PROCESSES)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_PROCESSES:
        raise SpecError(f"--processes is {text!r}; give a whole number within 1..{MAX_PROCESSES}, or auto")
    return int(text)


def run_load_in_processes(target: LoadTarget, schedule: Schedule, progress: Progress, log: RunLog, count: int) -> bool:
    """Send all requests from `count` processes; return whether Ctrl-C interrupted the run.

    Raises:
        SpecError: the target cannot be used, or a process died; the log has what was reported before.
    """
    with progress, _started(target, schedule, count) as workers:
        start = time.monotonic() + _START_DELAY
        for worker in workers:
            with suppress(BrokenPipeError):  # it died; see below
                worker.pipe.send(start)
        interrupted = _gather(workers, log, lambda: progress.show(max(0.0, time.monotonic() - start), log))
        deaths = [cause for worker in workers if (cause := _cause_of_death(worker.process))]
        if deaths:
            raise SpecError(
                f"{len(deaths)} of {count} sending processes died, and the requests that they had not reported are "
                f"missing from the results: {deaths[0]}"
            )
    return interrupted


def _cause_of_death(process: SpawnProcess) -> str:
    """How a process that has closed its pipe failed, and what to do; empty if it did not fail."""
    process.join()
    code = process.exitcode or 0
    if code < 0:
        return f"signal {-code} ({signal.strsignal(-code)}); check the memory, or give fewer --processes"
    return f"exit code {code}; its error is printed above" if code else ""


@contextmanager
def _started(target: LoadTarget, schedule: Schedule, count: int) -> Iterator[list[_Worker]]:
    """Start workers that are ready to send; end them with the context."""
    workers: list[_Worker] = []
    try:
        for first in range(count):
            workers.append(_start(target.share(first, count), schedule.instants[first::count].tolist()))  # noqa: PERF401  (the list must be complete if this raises)
        for worker in workers:
            try:
                error = worker.pipe.recv()
            except EOFError:
                error = f"a sending process died before the start: {_cause_of_death(worker.process)}"
            if error is not None:
                raise SpecError(error)
        yield workers
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
            worker.process.join()
            worker.process.close()


def _start(target: LoadTarget, instants: list[float]) -> _Worker:
    context = get_context("spawn")  # a forked child could inherit locks held by threads that it does not have
    parent_end, worker_end = context.Pipe()
    process = context.Process(target=work, args=(worker_end, target, instants), daemon=True)
    process.start()
    worker_end.close()
    return _Worker(process, parent_end)


def _gather(workers: Sequence[_Worker], log: RunLog, show: Callable[[], None]) -> bool:
    """Collect records until each worker has closed its pipe; return whether Ctrl-C interrupted the run."""
    open_pipes = [worker.pipe for worker in workers]
    with _stopped_by_ctrl_c(open_pipes) as interrupted:
        while open_pipes:
            for pipe in wait(open_pipes, INTERVAL):
                assert isinstance(pipe, Connection)
                if not _receive(pipe, log):
                    open_pipes.remove(pipe)
            show()
    return bool(interrupted)


@contextmanager
def _stopped_by_ctrl_c(pipes: Sequence[Connection]) -> Iterator[list[int]]:
    """Stop the workers on Ctrl-C; yield the signals so far. A second Ctrl-C ends the program.

    KeyboardInterrupt would be raised while a message is received, and lose its records.
    """
    signals: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in a background job
        yield signals
        return

    def stop(number: int, _: object) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        for pipe in pipes:
            with suppress(OSError):
                pipe.send(None)

    signal.signal(signal.SIGINT, stop)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


def _receive(pipe: Connection, log: RunLog) -> bool:
    """Receive a worker's records; return False once its pipe is closed."""
    try:
        sent, records, error = pipe.recv()
    except (EOFError, OSError):
        return False
    log.sent += sent
    log.first_error = log.first_error or error
    for record in records:
        log.add(Record(*record))
    return True


def work(pipe: Connection, target: LoadTarget, instants: Sequence[float]) -> None:
    """Main function of a worker: send at these instants (s after the common start) and send the records back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent stops workers
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
        sending = asyncio.create_task(offer(sender, instants, log, start=start, precise=target.precise))
        _cancel_on_message(sending, pipe)
        reported = (0, 0)
        while not sending.done():
            await asyncio.wait([sending], timeout=_REPORT_INTERVAL)
            reported = await _report(pipe, log, reported)
        await _report(pipe, log, reported)  # of requests that ended during the report before
        if not sending.cancelled():
            sending.result()


def _cancel_on_message(sending: asyncio.Task[None], pipe: Connection) -> None:
    """Cancel the task once the pipe is readable: a message to stop, or the end of the parent."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(pipe.fileno())
        sending.cancel()

    loop.add_reader(pipe.fileno(), stop)
    os.set_blocking(pipe.fileno(), True)  # uvloop cleared it, and a report would fail once the pipe is full


async def _report(pipe: Connection, log: RunLog, reported: tuple[int, int]) -> tuple[int, int]:
    """Send what is new; `reported` and the result are numbers of requests sent and completed."""
    sent, completed = log.sent, len(log.records)
    rows = [
        (r.scheduled, r.sent, r.finished, r.status, r.batch_size, r.waiting, r.service, r.energy, r.cpu_time, r.level)
        for r in log.records[reported[1] : completed]
    ]
    await asyncio.to_thread(pipe.send, (sent - reported[0], rows, log.first_error))
    return sent, completed
