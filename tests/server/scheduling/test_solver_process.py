"""Policies solved in a process of their own are those solved here, and its failures are reported."""

import gc
import os
import pickle
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from policies.catalog import choose, solved_again
from policies.profile import Profile, load_profile
from policies.rules import smdp_bins
from policies.rules.smdp_bins import SmdpBins
from policies.types import SpecError
from server.scheduling import solver_process
from server.scheduling.solver_process import choose_in_process, solve_again_in_process

P4 = load_profile("googlenet-tesla-p4").truncated(2)
LONG = "smdp:w2=1.6"


@pytest.fixture(autouse=True)
def solved_anew() -> None:
    """Forget what earlier tests have solved."""
    solver_process._choose.cache_clear()


class Fork:
    """A process forked from this one instead of a new Python, with the part of subprocess.Popen that is needed here."""

    niceness: int

    def __init__(self) -> None:
        """Fork, and run what a new process would."""
        calls, results = os.pipe(), os.pipe()
        self.returncode: int | None = None
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # the child needs no other thread
            self._pid = os.fork()
        if not self._pid:
            gc.disable()  # what the parent opened must not be closed here
            try:
                os.dup2(calls[0], 0)
                os.dup2(results[1], 1)
                os.closerange(3, max(*calls, *results) + 1)
                sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), sys.__stdout__, sys.__stderr__
                solver_process.main()
            except BaseException:  # noqa: BLE001  (as a new process would)
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(calls[0])
        os.close(results[1])
        self.stdin, self.stdout = os.fdopen(calls[1], "wb"), os.fdopen(results[0], "rb")

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stdin.close()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Fork]:
    """The processes that are started, which are forks."""
    found = list[Fork]()

    def start(niceness: int) -> Fork:
        found.append(Fork())
        found[-1].niceness = niceness
        return found[-1]

    monkeypatch.setattr(solver_process, "_start", start)
    return found


def check_the_policy_is_chosen_as_here(spec: str) -> None:
    apart, here = choose_in_process(spec, P4, {}), choose(spec, P4)
    assert (apart.policy, apart.table, apart.parameters) == (here.policy, here.table, here.parameters)
    assert apart.profile is P4, "the controller recognises a profile by its identity"


@pytest.mark.parametrize("spec", ["greedy", LONG])
def test_the_policy_is_the_one_that_is_chosen_here(spec: str) -> None:
    check_the_policy_is_chosen_as_here(spec)


@pytest.mark.usefixtures("started")
def test_the_policy_within_bins_is_the_one_that_is_chosen_here() -> None:
    check_the_policy_is_chosen_as_here("multi-bin:2,inner=smdp")


@pytest.mark.usefixtures("started")
def test_the_policy_for_another_profile_is_the_one_that_is_solved_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.3, 0.7, 0.98])
    chosen = choose("smdp:slo_p95_ms=40", P4)
    slower = replace(P4, service_times=tuple(1.1 * time for time in P4.service_times))
    apart = solve_again_in_process(chosen, slower, 1.0, 0.002)
    assert apart.table == solved_again(chosen, slower, 1.0, 0.002).table != chosen.table
    assert apart.profile is slower


@pytest.mark.usefixtures("started")
def test_bins_that_learn_meanwhile_are_kept() -> None:
    chosen = choose("multi-bin:2,inner=smdp", P4)
    assert solve_again_in_process(chosen, P4, 1.0, 0.0).bins is chosen.bins


@pytest.mark.usefixtures("started")
def test_bins_decided_together_are_solved_for_the_sizes_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smdp_bins, "_LOADS", (0.3,))
    soon_solved = replace(P4, service_times=(0.001, 0.001))
    chosen = replace(choose("smdp-bins:2", soon_solved), solved_sizes=tuple(0.001 + 1e-6 * n for n in range(300)))
    apart = solve_again_in_process(chosen, soon_solved, 1.0, 0.0)
    assert apart.solved_sizes == chosen.solved_sizes
    assert apart.bins is chosen.bins
    assert isinstance(getattr(apart.policy, "inner", None), SmdpBins)


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("spec", ["smdp:w2=-1", "smdp:slo_p95_ms=soon"])
def test_a_spec_that_cannot_be_used_is_rejected_as_here(spec: str) -> None:
    with pytest.raises(SpecError) as here:
        choose(spec, P4)
    with pytest.raises(SpecError) as apart:
        choose_in_process(spec, P4, {})
    assert str(apart.value) == str(here.value)


@pytest.mark.usefixtures("started")
def test_a_bug_in_the_solver_is_reported_with_its_traceback() -> None:
    broken = Profile("broken", ("soon",))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Traceback"):
        choose_in_process("smdp:w2=0", broken, {})


def test_a_process_that_was_killed_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(RuntimeError, match="was killed by signal 9; check the memory limit"):
        choose_in_process(LONG, P4, {})


def test_the_process_ends_with_the_one_that_started_it() -> None:
    program = f"from {solver_process.__name__} import main; main()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    with process:
        assert process.stdin is not None
        process.stdin.write(pickle.dumps((time.sleep, (600.0,))))
        process.stdin.close()
        assert process.wait(60.0) == 1


@pytest.mark.parametrize(("spec", "processes"), [("greedy", 0), ("multi-bin:2,inner=static:2", 0), (LONG, 1)])
def test_only_specs_that_take_long_get_a_process(spec: str, processes: int, started: list[Fork]) -> None:
    chosen = choose_in_process(spec, P4, {})
    solve_again_in_process(chosen, P4, 1.0, 0.0)
    assert len(started) == 2 * processes


def test_the_same_policy_is_solved_once_whatever_the_profile_was_asked_meanwhile(started: list[Fork]) -> None:
    first = choose_in_process(LONG, replace(P4), {})
    asked = replace(P4)
    assert asked.capacity > 0
    second = choose_in_process(LONG, asked, {})
    assert (first.policy, first.table) == (second.policy, second.table)
    assert first.monitor is not second.monitor, "each device has its own"
    assert second.profile is asked
    assert len(started) == 1
    choose_in_process(LONG, P4.truncated(1), {})
    assert len(started) == 2, "another profile is another policy"


def test_a_process_that_failed_is_started_again(started: list[Fork]) -> None:
    broken = Profile("broken", ("soon",))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(RuntimeError):
            choose_in_process("smdp:w2=0", broken, {})
    assert len(started) == 2


def test_a_policy_that_is_waited_for_is_solved_at_a_higher_priority_than_the_servers_own_work(
    started: list[Fork],
) -> None:
    solve_again_in_process(choose_in_process(LONG, P4, {}), P4, 1.0, 0.0)
    asked, own = (each.niceness for each in started)
    assert 0 < asked < own


@pytest.mark.usefixtures("started")
def test_what_the_solver_prints_is_not_taken_for_its_result(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert pickle.loads(solver_process._call(LONG, os.write, 1, b"printed\n")) == len("printed\n")
    assert capfd.readouterr().err == "printed\n"
