"""generate-load as people and scripts use it."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from loadgen.cli import main
from tests.loadgen.stub import Stub, busy, serving_in_a_thread
from tests.loadgen.test_report import KEYS

SIMULATE = ["--simulate", "googlenet-tesla-p4"]
GREEDY = [*SIMULATE, "--policy", "greedy"]
LOAD = ["--rate", "1000", "--duration", "0.05"]
URL = "http://127.0.0.1:1"


class Shell:
    """Runs the command in this process and keeps what it prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.argv", ["generate-load", *arguments])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def report(self, *arguments: str) -> dict[str, Any]:
        code, out, err = self.run(*arguments, "--json")
        assert (code, err) == (0, "")
        content = json.loads(out)
        assert isinstance(content, dict)
        return content


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


def test_a_simulated_run_prints_the_keys_of_the_contract(shell: Shell) -> None:
    content = shell.report(*GREEDY, *LOAD, "--slo-ms", "10")
    assert list(content) == KEYS
    assert content["ok"] == content["scheduled"] > 0
    assert content["send_lag_p99_ms"] is None
    assert content["slo_attainment"] is not None


@pytest.mark.parametrize("how", [[], ["--pixels"]])
def test_a_live_run_prints_the_keys_of_the_contract(shell: Shell, how: list[str]) -> None:
    with serving_in_a_thread(Stub([None, busy])) as url:
        content = shell.report(url + "/", *LOAD, *how)
    assert list(content) == KEYS
    assert content["errors"] == {"503": 1}
    assert content["ok"] == content["scheduled"] - 1
    assert content["mean_batch_size"] == pytest.approx(2.0)
    assert content["energy_per_request_mj"] == pytest.approx(30.0)
    assert content["slo_attainment"] is None


def test_the_same_seed_schedules_the_same_requests_live_and_simulated(shell: Shell, tmp_path: Path) -> None:
    live, simulated = tmp_path / "live.jsonl", tmp_path / "simulated.jsonl"
    with serving_in_a_thread(Stub()) as url:
        shell.report(url, *LOAD, "--seed", "7", "--output", str(live))
    shell.report(*GREEDY, *LOAD, "--seed", "7", "--output", str(simulated))

    def scheduled(path: Path) -> list[float]:
        return sorted(json.loads(line)["scheduled_s"] for line in path.read_text().splitlines())

    assert scheduled(live) == scheduled(simulated)
    assert len(scheduled(live)) > 1


def test_for_people_there_is_a_table(shell: Shell) -> None:
    code, out, err = shell.run(*GREEDY, *LOAD)
    assert (code, err) == (0, "")
    assert "response time, mean" in out


def test_a_comparison_has_a_row_for_each_policy(shell: Shell) -> None:
    both = [*SIMULATE, "--compare", "greedy", "--compare", "static:2", *LOAD]
    rows = shell.report(*both)["rows"]
    assert [row["policy"] for row in rows] == ["greedy", "static:2"]
    assert [list(row)[1:] for row in rows] == [KEYS, KEYS]
    assert rows[0]["scheduled"] == rows[1]["scheduled"]
    assert rows[0] == {"policy": "greedy", **shell.report(*GREEDY, *LOAD)}
    assert "static:2" in shell.run(*both)[1]


@pytest.mark.parametrize(
    "arrivals", ["poisson", "constant", "backlog", "mmpp:1.5,0.5,0.01,0.01", "steps:2@0.02,0@0.01,1@0.01"]
)
def test_every_process_is_known_by_name(shell: Shell, arrivals: str) -> None:
    assert shell.report(*GREEDY, *LOAD, "--arrivals", arrivals)["ok"] > 0


def test_a_trace_needs_neither_rate_nor_duration(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP\n0\n1\n4\n")
    arrivals = ["--arrivals", f"trace:{path}"]
    assert shell.report(*GREEDY, *arrivals)["arrival_rate_hz"] == 3 / 4
    assert shell.report(*GREEDY, *arrivals, "--rate", "1", "--duration", "1.5")["scheduled"] == 2


def test_ctrl_c_reports_what_there_is(shell: Shell) -> None:
    async def interrupt(_: web.Request) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)

    with serving_in_a_thread(Stub([None, interrupt])) as url:
        code, out, _ = shell.run(url, "--rate", "1000", "--duration", "600", "--json")
    content = json.loads(out)
    assert code == 130
    assert content["scheduled"] == content["ok"] + content["errors"].get("interrupted", 0) < 600_000
    assert content["ok"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (LOAD, "URL of a server, or --simulate"),
        ([URL, *GREEDY, *LOAD], "exclude each other"),
        ([URL, "--policy", "greedy", *LOAD], "are for --simulate"),
        ([URL, "--compare", "greedy", *LOAD], "are for --simulate"),
        ([*GREEDY, "--compare", "serial", *LOAD], "exclude each other"),
        ([*SIMULATE, *LOAD], "--policy SPEC"),
        ([*GREEDY, "--pixels", *LOAD], "are for a server"),
        ([URL, "--pixels", "--image", "x.jpg", *LOAD], "exclude each other"),
        ([*SIMULATE, "--compare", "greedy", "--output", "x", *LOAD], "--output holds one run"),
        (["127.0.0.1:8000", *LOAD], "is no URL"),
        ([URL, *LOAD], "no server answers at http://127.0.0.1:1"),
        ([URL, "--image", "nowhere.jpg", *LOAD], "nowhere.jpg"),
        ([*GREEDY, "--rate", "0", "--duration", "1"], "--rate is 0"),
        ([*GREEDY, "--rate", "nan", "--duration", "1"], "--rate is nan"),
        ([*GREEDY, "--rate", "inf", "--duration", "1"], "--rate is inf"),
        ([*GREEDY, "--rate", "many", "--duration", "1"], "--rate"),
        ([*GREEDY, "--rate", "1", "--duration", "-1"], "--duration is -1"),
        ([*GREEDY, "--rate", "1"], "need --rate and --duration"),
        ([*GREEDY, "--duration", "1"], "need --rate and --duration"),
        ([*GREEDY, "--rate", "1e9", "--duration", "1e9"], "over 10,000,000 requests"),
        ([*GREEDY, "--rate", "1e-9", "--duration", "1"], "no request arrives"),
        ([*GREEDY, *LOAD, "--seed", "-1"], "--seed is -1"),
        ([*GREEDY, *LOAD, "--slo-ms", "0"], "--slo-ms is 0"),
        ([*GREEDY, *LOAD, "--give-up-after", "nan"], "--give-up-after is nan"),
        ([*GREEDY, *LOAD, "--output", "/nowhere/run.jsonl"], "cannot write --output"),
        ([*GREEDY, *LOAD, "--arrivals", "bursty"], "unknown arrivals 'bursty'"),
        ([*GREEDY, *LOAD, "--arrivals", "poisson:3"], "take nothing after the colon"),
        ([*GREEDY, *LOAD, "--arrivals", "mmpp:1,2,3"], "mmpp takes four numbers"),
        ([*GREEDY, *LOAD, "--arrivals", "mmpp:1,2,0,1"], "lengths above 0"),
        ([*GREEDY, *LOAD, "--arrivals", "mmpp:1,2,1e-300,1"], "too short"),
        ([*GREEDY, *LOAD, "--arrivals", "mmpp:a,2,1,1"], "mmpp:R1,R2,S1,S2"),
        ([*GREEDY, *LOAD, "--arrivals", "steps:1@2@3"], "cannot be read"),
        ([*GREEDY, *LOAD, "--arrivals", "steps:-1@2"], "0 or more"),
        ([*GREEDY, *LOAD, "--arrivals", "trace:nowhere.csv"], "no trace file"),
        (["--simulate", "nothing", "--policy", "greedy", *LOAD], "no profile 'nothing'"),
        ([*SIMULATE, "--policy", "clever", *LOAD], "unknown policy 'clever'"),
        ([*GREEDY, *LOAD, "--sizes", "uniform:1:20"], "--sizes"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(shell: Shell, arguments: list[str], words: str) -> None:
    code, out, err = shell.run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
