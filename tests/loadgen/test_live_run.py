"""Tests of live runs: several processes, policy swaps, and the progress line."""

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen import processes
from loadgen.client import RunLog, open_session
from loadgen.live_run import LoadTarget, loop_factory
from loadgen.policy_admin import find_policy_admin, read_policy_info, restored_policy
from loadgen.processes import process_count
from loadgen.progress import Progress, progress_line
from loadgen.report import Record
from loadgen.schedule import Schedule
from policies.types import SpecError
from tests.support.stub_server import METADATA, Stub, busy, serving, serving_in_a_thread


def quiet(schedule: Schedule) -> Progress:
    return Progress(schedule, "", quiet=True)


def test_several_processes_send_the_requests_of_the_schedule() -> None:
    schedule, log, stub = Schedule(np.linspace(0.0, 0.03, 31), 0.031), RunLog(), Stub([None, busy])
    with serving_in_a_thread(stub) as url:
        interrupted = processes.run_load_in_processes(LoadTarget(url, pixels=True), schedule, quiet(schedule), log, 2)
    assert not interrupted
    assert sorted(r.scheduled for r in log.records) == schedule.instants.tolist()
    assert Counter(r.status for r in log.records) == {200: 30, 503: 1}
    assert (log.sent, log.errors) == (31, 1)
    assert all(r.scheduled <= r.sent <= r.finished for r in log.records)


class Interrupting(RunLog):
    """Ctrl-C while the first message of a worker is received."""

    def add(self, record: Record) -> None:
        if not self.records:
            os.kill(os.getpid(), signal.SIGINT)
        super().add(record)


@pytest.mark.usefixtures("forked_workers")
def test_ctrl_c_stops_all_processes_and_keeps_the_records() -> None:
    schedule, log = Schedule(np.linspace(0.0, 600.0, 600_000), 600.0), Interrupting()
    with serving_in_a_thread(Stub()) as url:
        assert processes.run_load_in_processes(LoadTarget(url, pixels=True), schedule, quiet(schedule), log, 2)
    assert 0 < len(log.records) == log.sent < 600_000


@pytest.mark.usefixtures("forked_workers")
def test_an_error_in_a_worker_process_is_raised_in_the_parent() -> None:
    schedule = Schedule(np.zeros(2), 1.0)
    with serving_in_a_thread(Stub()) as url, pytest.raises(SpecError, match="no model 'huge'"):
        processes.run_load_in_processes(LoadTarget(url, "huge"), schedule, quiet(schedule), RunLog(), 2)


@pytest.mark.usefixtures("forked_workers")
def test_a_process_that_fails_before_the_start_is_an_error_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "work", divmod)  # raises a TypeError, since it takes two arguments
    schedule = Schedule(np.zeros(2), 1.0)
    with pytest.raises(SpecError, match="died before the start: exit code 1; its error is printed above"):
        processes.run_load_in_processes(LoadTarget("http://x"), schedule, quiet(schedule), RunLog(), 2)


VECTOR = METADATA | {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]}
PADDED = METADATA | {
    "inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1, -1]}],
    "parameters": {"weights": "model.py", "max_length": 64},
}


def path_of(stub: Stub, model: str | None = None, **content: Any) -> str:
    """The path that requests are sent to."""

    async def main() -> str:
        async with serving(stub) as url, open_session() as session:
            return (await LoadTarget(url, model, **content).sender(session)).content.path

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("metadata", "content", "path"),
    [
        (METADATA, {}, "/predict/tiny"),
        (METADATA, {"pixels": True}, "/v2/models/tiny/infer"),
        (PADDED, {}, "/v2/models/tiny/infer"),
        (PADDED, {"lengths": [3]}, "/v2/models/tiny/infer"),
        (VECTOR, {}, "/v2/models/tiny/infer"),
    ],
)
def test_the_content_is_what_the_model_takes(metadata: Any, content: dict[str, Any], path: str) -> None:
    assert path_of(Stub(metadata=metadata), **content) == path


def test_an_image_is_sent_to_a_server_without_metadata() -> None:
    assert path_of(Stub(models=None)) == "/predict"
    assert path_of(Stub(models=None), "huge") == "/predict/huge"


@pytest.mark.parametrize(
    ("stub", "content", "words"),
    [
        (Stub(models=None), {"pixels": True}, "has no metadata of its model; name one with --model"),
        (Stub(models=None), {"model": "huge", "pixels": True}, "has no metadata of huge"),
        (Stub(models=None), {"lengths": [1]}, "has no metadata of its model"),
        (Stub(models=None), {"sample": Path("x.json")}, "has no metadata of its model"),
        (Stub(metadata=VECTOR), {"pixels": True}, r"tiny takes x as FP32 \[-1, 4\], not UINT8"),
        (Stub(metadata=VECTOR), {"image": Path("x.jpg")}, r"takes x as FP32 \[-1, 4\], no image; leave out --image"),
        (Stub(metadata=VECTOR), {"lengths": [1]}, "has samples of one size; leave out --sizes"),
        (Stub(metadata=VECTOR), {"sample": Path("x.txt")}, "unknown type of the sample 'x.txt'"),
    ],
)
def test_content_that_the_model_does_not_take_is_an_error(stub: Stub, content: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        path_of(stub, **content)


@pytest.mark.parametrize(("rate", "expected"), [(10, 1), (2500, 3)])
def test_auto_starts_enough_processes_for_the_peak_rate(rate: int, expected: int) -> None:
    instants = np.concatenate([np.zeros(5), 1.0 + np.arange(rate) / rate])
    assert process_count("auto", Schedule(instants, 2.0), cores=8) == expected
    assert process_count("auto", Schedule(instants, 2.0), cores=1) == 1
    assert process_count("3", Schedule(instants, 2.0), cores=1) == 3


@pytest.mark.parametrize("words", ["0", "65", "-1", "two", "1.5", ""])
def test_an_invalid_number_of_processes_is_an_error(words: str) -> None:
    with pytest.raises(SpecError, match="--processes is"):
        process_count(words, Schedule(np.zeros(1), 1.0), cores=8)


@pytest.mark.parametrize("failure", [None, SpecError("x"), KeyboardInterrupt()])
def test_the_original_policy_is_restored_after_any_exception(failure: BaseException | None) -> None:
    stub = Stub(policy="static:8")
    with (
        serving_in_a_thread(stub) as url,
        suppress(SpecError, KeyboardInterrupt),
        restored_policy(find_policy_admin(url, None, None)) as swap,
    ):
        swap("greedy")
        if failure is not None:
            raise failure
    assert stub.swaps == ["greedy", "static:8"]


def test_a_rejected_policy_is_an_error_with_the_servers_reason() -> None:
    words = "cannot set the policy 'clever' at .*: unknown policy 'clever'"
    with (
        serving_in_a_thread(Stub()) as url,
        restored_policy(find_policy_admin(url, "tiny", None)) as swap,
        pytest.raises(SpecError, match=words),
    ):
        swap("clever")


def test_a_policy_that_cannot_be_restored_is_an_error_with_the_url_to_put_it_to() -> None:
    words = r"the policy 'clever' is not restored: .*PUT it to .*/admin/models/tiny/policy"
    with (
        serving_in_a_thread(Stub(policy="clever")) as url,
        pytest.raises(SpecError, match=words),
        restored_policy(find_policy_admin(url, None, None)) as swap,
    ):
        swap("greedy")


def test_the_policy_is_described_if_the_server_allows_reading_it() -> None:
    with serving_in_a_thread(Stub(key="secret")) as url:
        assert read_policy_info(url, None, "secret") == {"policy": "greedy", "profile": "tiny on a stub"}
        assert read_policy_info(url, None, None) == {}


def test_the_progress_line_has_requests_sent_responses_and_remaining_time() -> None:
    schedule, log = Schedule(np.linspace(0.0, 3.0, 4), 4.0), RunLog(sent=3)
    log.add(Record(0.0, 0.0, 0.02, 200))
    log.add(Record(1.0, 1.0, 1.5, 503))
    line = progress_line(schedule, 2.5, 1.0, log)
    assert line == "2 s, 2 s to go · 3 of 4 sent (1/s) · 1 answered, 1 errors · p95 20 ms"
    assert "waiting for 1 responses" in progress_line(schedule, 5.0, 0.0, log)


def test_a_quiet_progress_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = Schedule(np.zeros(1), 1.0)
    with quiet(schedule) as progress:
        progress.show(10.0, RunLog())
    assert capsys.readouterr() == ("", "")


def test_requests_that_end_while_a_report_is_being_sent_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(np.array([0.0, 0.2]), 0.3)
    ours, theirs = Pipe()

    class SlowPipe:
        """Takes longer to send the first report than the run lasts."""

        def __init__(self) -> None:
            self.sent: list[Any] = []

        def send(self, message: Any) -> None:
            self.sent.append(message)
            if len(self.sent) == 2:
                time.sleep(0.5)

        def recv(self) -> float:
            return time.monotonic()

        def fileno(self) -> int:
            return theirs.fileno()

    pipe = SlowPipe()
    monkeypatch.setattr(processes, "_REPORT_INTERVAL", 0.05)
    with serving_in_a_thread(Stub()) as url:
        asyncio.run(processes._work(pipe, LoadTarget(url, pixels=True), schedule.instants))  # type: ignore[arg-type]
    ours.close()
    assert sum(len(records) for _, records, _ in pipe.sent[1:]) == 2


def test_a_report_larger_than_the_pipes_buffer_waits_for_the_parent() -> None:
    ours, theirs = Pipe()
    report = bytes(1 << 22)

    async def main() -> Any:
        processes._cancel_on_message(asyncio.create_task(asyncio.sleep(600.0)), theirs)
        sending = asyncio.create_task(asyncio.to_thread(theirs.send, report))
        await asyncio.wait([sending], timeout=0.05)
        assert not sending.done(), sending.exception()
        received = await asyncio.to_thread(ours.recv)
        await sending
        return received

    with ours, theirs, asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert runner.run(main()) == report
