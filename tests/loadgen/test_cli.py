"""Tests of the generate-load command."""

import asyncio
import json
import multiprocessing
import os
import re
import signal
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from loadgen import client, history, live_run, processes
from loadgen.cli import lateness_warning, main
from loadgen.history import RunResult
from loadgen.report import Record, make_report, outcome_from_records
from policies.types import SpecError
from tests.loadgen.test_report import KEYS
from tests.support.stub_server import FACTS, METADATA, Stub, busy, serving_in_a_thread

SIMULATE = ["--simulate", "googlenet-tesla-p4"]
GREEDY = [*SIMULATE, "--policy", "greedy"]
LOAD = ["--rate", "1000", "--duration", "0.05"]
URL = "http://127.0.0.1:1"


class Shell:
    """Runs the command in this process and captures its output."""

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
        assert code == 0
        assert re.fullmatch(r"(generate-load: 1 % of the requests were sent at least \d+ ms late, .*\n)?", err), err
        content = json.loads(out)
        assert isinstance(content, dict)
        return content


async def without_energy(_: web.Request) -> web.Response:
    return web.json_response({"batch_size": 1})


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


def test_a_simulated_run_prints_the_keys_of_the_contract(shell: Shell) -> None:
    content = shell.report(*GREEDY, *LOAD, "--slo-ms", "10")
    assert list(content) == KEYS
    assert content["ok"] == content["scheduled"] > 0
    assert content["send_lag_p99_ms"] is None
    assert content["slo_attainment"] is not None


def test_two_profiles_are_two_devices(shell: Shell) -> None:
    both = shell.report("--simulate", "googlenet-tesla-p4,googlenet-tesla-p4", "--policy", "greedy", *LOAD)
    one = shell.report(*GREEDY, *LOAD)
    assert both["scheduled"] == both["ok"] == one["scheduled"]
    assert both["mean_ms"] < one["mean_ms"]
    code, _, err = shell.run("--simulate", "googlenet-tesla-p4,nowhere", "--policy", "greedy", *LOAD)
    assert (code, err.count("\n")) == (2, 1)
    assert "no profile 'nowhere'" in err


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


def test_a_model_of_named_tensors_gets_the_given_sample(shell: Shell, tmp_path: Path) -> None:
    async def with_binary_output(_: web.Request) -> web.Response:
        document = json.dumps({"model_name": "tiny", "parameters": FACTS, "outputs": []}).encode()
        headers = {"Inference-Header-Content-Length": str(len(document))}
        return web.Response(body=document + bytes(8), headers=headers)

    inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}, {"name": "n", "datatype": "INT32", "shape": [-1]}]
    path = tmp_path / "sample.json"
    path.write_text('{"x": [0.5, 2], "n": 7}')
    stub = Stub([with_binary_output] * 1000, metadata=METADATA | {"inputs": inputs})
    with serving_in_a_thread(stub) as url:
        content = shell.report(url, *LOAD, "--model", "tiny=some/file.py:Tiny", "--sample", str(path))
    assert content["ok"] == content["scheduled"] == len(stub.calls) > 0
    assert content["mean_batch_size"] == pytest.approx(2.0)
    assert {body[-12:] for _, _, body in stub.calls} == {struct.pack("<ffi", 0.5, 2, 7)}


def test_a_run_with_steps_of_the_rate_is_reported_by_step_for_each_policy(shell: Shell) -> None:
    arrivals = ("--rate", "100", "--duration", "4", "--arrivals", "steps:1@2,2@2")
    code, out, _ = shell.run(*SIMULATE, *arrivals, "--compare", "greedy", "--compare", "static:2")
    assert code == 0
    assert re.findall(r"^(greedy|static:2) +(\d) +(\d) ", out, re.MULTILINE) == [
        *(("greedy", "0", "2"), ("greedy", "2", "4")),
        *(("static:2", "0", "2"), ("static:2", "2", "4")),
    ]
    content = shell.report(*GREEDY, *arrivals)
    assert sum(step["ok"] for step in content["steps"]) == content["ok"]
    assert re.search(r"99 % +mJ +W", out)
    with serving_in_a_thread(Stub([without_energy] * 100)) as url:
        arrivals = ("--rate", "1000", "--duration", "0.02", "--arrivals", "steps:1@0.01,2@0.01")
        _, out, _ = shell.run(url, *arrivals)
    assert "99 %\n" in out


@pytest.mark.parametrize("spec", ["lazy:slo_ms=100,slack=oracle", "catch-up:slo_ms=100"])
def test_a_policy_that_decides_by_stage_is_simulated_in_ten_equal_stages_or_in_the_given_number(
    shell: Shell, spec: str
) -> None:
    def report_in(*stages: str) -> dict[str, Any]:
        return shell.report(*SIMULATE, "--policy", spec, *LOAD, *stages)

    assert report_in() == report_in("--stages", "10") != report_in("--stages", "2")


@pytest.mark.slow
def test_a_simulated_run_reports_each_priority_level(shell: Shell, tmp_path: Path) -> None:
    policies = [*SIMULATE, "--compare", "greedy", "--compare", "smdp:slo_p95_ms=14"]
    load = ["--rate", "6000", "--duration", "3", "--levels", "0.1,0.9", "--priority-weights", "8,1", "--slo-ms", "14"]
    page = tmp_path / "run.html"
    rows = shell.report(*policies, *load, "--report", str(page))["rows"]
    strict, kept = (row["levels"] for row in rows)
    assert [each["level"] for each in strict] == [1, 2]
    assert strict[0]["mean_ms"] < strict[1]["mean_ms"]
    assert strict[0]["slo_attainment"] < 0.9 < 0.95 <= kept[0]["slo_attainment"]
    assert sum(each["ok"] for each in kept) == rows[1]["ok"]
    assert "level 2, 95 % within, ms" in page.read_text()
    out = shell.run(*SIMULATE, "--compare", "greedy", "--compare", "timeout:1", *load)[1]
    assert re.search(r"by priority level.*\n *policy +level +answered .*within SLO\n *greedy +1 ", out)
    lines = tmp_path / "run.jsonl"
    shell.report(*GREEDY, *load, "--output", str(lines))
    levels = [json.loads(line)["level"] for line in lines.read_text().splitlines()]
    assert Counter(levels) == {each["level"]: each["ok"] for each in strict}


def test_the_same_seed_schedules_the_same_requests_live_and_simulated(shell: Shell, tmp_path: Path) -> None:
    live, simulated = tmp_path / "live.jsonl", tmp_path / "simulated.jsonl"
    with serving_in_a_thread(Stub()) as url:
        shell.report(url, *LOAD, "--seed", "7", "--output", str(live))
    shell.report(*GREEDY, *LOAD, "--seed", "7", "--output", str(simulated))

    def scheduled(path: Path) -> list[float]:
        return sorted(json.loads(line)["scheduled_s"] for line in path.read_text().splitlines())

    assert scheduled(live) == scheduled(simulated)
    assert len(scheduled(live)) > 1


def test_without_json_a_table_is_printed(shell: Shell) -> None:
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
    "arrivals",
    ["poisson", "constant", "backlog", "mmpp:1.5,0.5,0.01,0.01", "steps:2@0.02,0@0.01,1@0.01", "ramp:0.5:1.5"],
)
def test_every_arrival_process_can_be_simulated(shell: Shell, arrivals: str) -> None:
    assert shell.report(*GREEDY, *LOAD, "--arrivals", arrivals)["ok"] > 0


def test_a_trace_needs_neither_rate_nor_duration(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP\n0\n1\n4\n")
    arrivals = ["--arrivals", f"trace:{path}"]
    assert shell.report(*GREEDY, *arrivals)["arrival_rate_hz"] == 3 / 4
    assert shell.report(*GREEDY, *arrivals, "--rate", "1", "--duration", "1.5")["scheduled"] == 2


def test_relative_rates_far_above_the_rate_are_pointed_out(shell: Shell) -> None:
    code, _, err = shell.run(*GREEDY, *LOAD, "--arrivals", "steps:20@1")
    assert code == 0
    assert "relative to --rate 1000" in err
    assert "relative" not in shell.run(*GREEDY, *LOAD, "--arrivals", "steps:5@1")[2]


def test_ctrl_c_reports_the_requests_so_far(shell: Shell) -> None:
    uses: Counter[int] = Counter()
    interrupted = list[bool]()

    async def interrupt(request: web.Request) -> None:
        """Interrupt in the first third use of a connection: the client has then recorded the answer to its first."""
        uses[id(request.transport)] += 1
        if uses[id(request.transport)] == 3 and not interrupted:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)

    with serving_in_a_thread(Stub([interrupt] * 10_000)) as url:
        code, out, _ = shell.run(url, "--rate", "100", "--duration", "600", "--json")
    content = json.loads(out)
    assert code == 130
    assert content["scheduled"] == content["ok"] + content["errors"].get("interrupted", 0) < 60_000
    assert content["ok"] > 0


class Killing(client.RunLog):
    """Kills the first process of the run once a report has arrived."""

    def add(self, record: Record) -> None:
        if not self.records:
            first = min(multiprocessing.active_children(), key=lambda child: int(child.name.rpartition("-")[2]))
            first.kill()
        super().add(record)


@pytest.mark.usefixtures("forked_workers")
def test_a_killed_process_loses_no_results_of_the_others(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, output = tmp_path / "trace.csv", tmp_path / "run.jsonl"
    trace.write_text("TIMESTAMP\n0\n0.001\n600\n")  # the first process sends the first and the last request
    monkeypatch.setattr(client, "RunLog", Killing)
    with serving_in_a_thread(Stub()) as url:
        arguments = ("--arrivals", f"trace:{trace}", "--processes", "2", "--output", str(output), "--json")
        code, out, err = shell.run(url, *arguments)
    assert code == 2
    assert "1 of 2 sending processes died" in err
    assert "signal 9 (Killed); check the memory" in err
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert 0.001 in {record["scheduled_s"] for record in records}
    assert json.loads(out)["ok"] == len(records)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("count", ["1", "2"])
@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, "404 page not found\n", "404 (3 times); the first error is '404 page not found'; check the URL"),
        (400, '{"error": "this is\\nno image"}', "400 (3 times); the first error is 'this is no image'; check the URL"),
        (503, "", "503 (3 times); give a lower --rate"),
    ],
)
def test_a_run_without_an_answered_request_is_pointed_out(
    shell: Shell, status: int, body: str, words: str, count: str
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    arguments = ("--rate", "1000", "--duration", "0.003", "--arrivals", "constant", "--processes", count)
    with serving_in_a_thread(Stub([refuse] * 3)) as url:
        code, _, err = shell.run(url, *arguments)
    assert code == 1
    assert f"generate-load: no request was answered, most often with {words}" in err


def ending_with(end: BaseException | bool, records: Sequence[Record]) -> Callable[..., bool]:
    """A run of the load that logs these records, then raises the exception or returns whether it was interrupted."""

    def run_load(_target: Any, _schedule: Any, _progress: Any, log: client.RunLog, *_: Any) -> bool:
        for record in records:
            log.add(record)
        if isinstance(end, BaseException):
            raise end
        return end

    return run_load


def test_an_interrupted_run_is_reported_up_to_the_interruption(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [Record(0.0, 0.0, 4.0, 200, 1, energy=50.0), Record(9.0, 9.0, 10.0, "interrupted")]
    monkeypatch.setattr(live_run, "run_load", ending_with(True, records))
    arguments = (URL, "--rate", "1", "--duration", "120", "--arrivals", "steps:1@60,2@60", "--json")
    code, out, _ = shell.run(*arguments)
    content = json.loads(out)
    assert (code, content["arrival_rate_hz"]) == (130, 0.2)
    assert [(step["end_s"], step["mean_power_w"]) for step in content["steps"]] == [(10.0, 5.0)]
    monkeypatch.setattr(live_run, "run_load", ending_with(True, []))
    code, out, _ = shell.run(*arguments)
    assert (code, json.loads(out)["steps"]) == (130, []), "interrupted before the first request"


def test_a_run_whose_process_died_is_reported_up_to_its_last_response(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        processes, "run_load_in_processes", ending_with(SpecError("dead"), [Record(0.0, 0.0, 10.0, 200)])
    )
    code, out, err = shell.run(URL, "--rate", "1", "--duration", "600", "--processes", "2", "--json")
    assert (code, json.loads(out)["arrival_rate_hz"]) == (2, 0.1)
    assert err == "generate-load: dead\n"


@pytest.mark.parametrize(("second", "reported"), [([Record(0.0, 0.0, 0.1, 200)], False), ([], True)])
def test_a_second_ctrl_c_ends_the_command_without_a_report(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: list[Record], reported: bool
) -> None:
    runs = iter([ending_with(False, [Record(0.0, 0.0, 0.2, 200)]), ending_with(KeyboardInterrupt(), second)])

    def run_load(*arguments: Any) -> bool:
        return next(runs)(*arguments)

    monkeypatch.setattr(processes, "run_load_in_processes", run_load)
    page = tmp_path / "run.html"
    compare = ("--compare", "greedy", "--compare", "static:2", "--processes", "2", "--report", str(page))
    with serving_in_a_thread(Stub()) as url:
        code, out, _ = shell.run(url, *LOAD, *compare)
    assert (code, page.exists(), "greedy" in out) == (130, reported, reported), "the first Ctrl-C before the start"


def test_a_live_comparison_swaps_the_policy_and_restores_it(shell: Shell, tmp_path: Path) -> None:
    stub, path = Stub(policy="static:8", key="secret"), tmp_path / "run.html"
    compare = ["--compare", "greedy", "--compare", "timeout:5", "--api-key", "secret", "--report", str(path)]
    with serving_in_a_thread(stub) as url:
        content = shell.report(url, *LOAD, *compare, "--w2", "2")
    assert stub.swaps == ["greedy", "timeout:5"] * 2 + ["static:8"]  # the first round checks all policies
    rows = content["rows"]
    assert [row["policy"] for row in rows] == ["greedy", "timeout:5"]
    assert rows[0]["scheduled"] == rows[1]["scheduled"] == rows[1]["ok"]
    assert rows[0]["cost"] == pytest.approx(rows[0]["mean_ms"] + 2 * rows[0]["mean_power_w"])
    assert (content["w1"], content["w2"]) == (1.0, 2.0)
    text = path.read_text()
    assert "secret" not in text
    assert "timeout:5" in text


def test_a_rejected_policy_stops_a_comparison_before_the_first_request(shell: Shell) -> None:
    stub = Stub(policy="static:8")
    with serving_in_a_thread(stub) as url:
        code, out, err = shell.run(url, *LOAD, "--compare", "greedy", "--compare", "clever")
    assert (code, out) == (2, "")
    assert "cannot set the policy 'clever'" in err
    assert stub.swaps == ["greedy", "static:8"]
    assert stub.calls == []


def test_the_api_key_can_come_from_the_environment(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_in_a_thread(Stub(key="secret")) as url:
        assert "requires an API key" in shell.run(url, *LOAD)[2]
        monkeypatch.setenv("BATCHWRIGHT_API_KEY", "secret")
        content = shell.report(url, *LOAD)
    assert content["ok"] == content["scheduled"]


def test_plot_and_page_are_written(shell: Shell, tmp_path: Path) -> None:
    plot, page = tmp_path / "run.png", tmp_path / "run.html"
    shell.report(*GREEDY, *LOAD, "--plot", str(plot), "--report", str(page), "--slo-ms", "5")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "--slo-ms 5" in page.read_text()


@pytest.mark.parametrize(("sent", "warned"), [(0.009, False), (0.05, True)])
def test_a_generator_that_sends_late_gives_a_warning(sent: float, warned: bool) -> None:
    records = [Record(0.0, sent, 0.1, 200)]
    warning = lateness_warning(
        [RunResult("", make_report(outcome_from_records(records), 1.0), history.history_from_records(records))]
    )
    assert ("50 ms late" in warning) == ("--processes" in warning) == warned
    assert bool(warning) == warned


def test_a_usage_error_leaves_no_file_behind(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    assert shell.run(*SIMULATE, "--policy", "clever", *LOAD, "--report", str(path))[0] == 2
    assert not path.exists()


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (LOAD, "URL of a server, or --simulate"),
        ([URL, *GREEDY, *LOAD], "exclude each other"),
        ([URL, "--policy", "greedy", *LOAD], "--policy is for --simulate"),
        ([URL, "--stages", "4", *LOAD], "--stages is for --simulate"),
        ([*GREEDY, "--stages", "0", *LOAD], "0 stages are invalid"),
        ([URL, "--compare", "greedy", *LOAD], "no server responds at http://127.0.0.1:1"),
        ([URL, "--processes", "2", *LOAD], "no server responds at http://127.0.0.1:1"),
        ([URL, "--processes", "0", *LOAD], "--processes is '0'"),
        ([URL, "--processes", "many", *LOAD], "--processes is 'many'"),
        ([URL, "--api-key", "a b", *LOAD], "API key"),
        ([*GREEDY, "--processes", "2", *LOAD], "--processes is for a server"),
        ([*SIMULATE, "--compare", "greedy", "--compare", "greedy", *LOAD], "name each once"),
        ([*GREEDY, "--compare", "serial", *LOAD], "exclude each other"),
        ([*SIMULATE, *LOAD], "--policy SPEC"),
        ([*GREEDY, "--pixels", *LOAD], "are for a server"),
        ([URL, "--pixels", "--image", "x.jpg", *LOAD], "exclude each other"),
        ([URL, "--pixels", "--sample", "x.json", *LOAD], "--sample excludes"),
        ([*GREEDY, "--sample", "x.json", *LOAD], "--sample is for a server"),
        ([URL, "--sample", "x.json", *LOAD], "no file 'x.json'"),
        ([*SIMULATE, "--compare", "greedy", "--output", "x", *LOAD], "--output takes one run"),
        (["127.0.0.1:8000", *LOAD], "is no URL"),
        ([URL, *LOAD], "no server responds at http://127.0.0.1:1"),
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
        ([*GREEDY, *LOAD, "--priority-weights", "8,1"], "--priority-weights is for --levels; add --levels"),
        ([URL, *LOAD, "--levels", "0.5,0.5", "--priority-weights", "8,1"], "give it to serve-model"),
        ([*GREEDY, *LOAD, "--levels", "0.5,0.5", "--priority-weights", "8"], "give 2 to 8 numbers"),
        ([*GREEDY, *LOAD, "--levels", "0.5,0.5", "--priority-weights", "8,2,1"], "give 2 weights"),
        (
            ["--simulate", "googlenet-tesla-p4,googlenet-tesla-p4", "--policy", "greedy", *LOAD, "--levels", "0.5,0.5"],
            "priority levels are simulated on one device",
        ),
        ([*GREEDY, *LOAD, "--slo-ms", "0"], "--slo-ms is 0"),
        ([*GREEDY, *LOAD, "--give-up-after", "nan"], "--give-up-after is nan"),
        ([*GREEDY, *LOAD, "--w2", "-1"], "--w2 is -1"),
        ([*GREEDY, *LOAD, "--w1", "nan"], "--w1 is nan"),
        ([*GREEDY, *LOAD, "--output", "/nowhere/run.jsonl"], "cannot write --output"),
        ([*GREEDY, *LOAD, "--report", "/nowhere/run.html"], "cannot write --report"),
        ([*GREEDY, *LOAD, "--plot", "/nowhere/run.png"], "cannot write --plot"),
        ([*GREEDY, *LOAD, "--plot", "/proc/run.png"], "cannot write --plot"),
        ([*GREEDY, *LOAD, "--plot", "/tmp/run.bmp"], "unknown plot format '.bmp'"),
        ([*GREEDY, *LOAD, "--arrivals", "bursty"], "unknown arrivals 'bursty'"),
        ([*GREEDY, *LOAD, "--arrivals", "poisson:3"], "take nothing after the colon"),
        ([*GREEDY, *LOAD, "--arrivals", "mmpp:1,2,3"], "mmpp takes four numbers"),
        ([*GREEDY, *LOAD, "--arrivals", "mmpp:1,2,0,1"], "lengths above 0"),
        ([*GREEDY, *LOAD, "--arrivals", "mmpp:1,2,1e-300,1"], "too short"),
        ([*GREEDY, *LOAD, "--arrivals", "mmpp:a,2,1,1"], "mmpp:R1,R2,S1,S2"),
        ([*GREEDY, *LOAD, "--arrivals", "steps:1@2@3"], "cannot be read"),
        ([*GREEDY, *LOAD, "--arrivals", "ramp:1"], "ramp takes two numbers"),
        ([*GREEDY, *LOAD, "--arrivals", "ramp:0:0"], "has no arrivals"),
        ([*GREEDY, *LOAD, "--arrivals", "ramp:-1:1"], "0 or more"),
        ([*GREEDY, *LOAD, "--arrivals", "ramp:0:inf"], "0 or more"),
        ([*GREEDY, *LOAD, "--arrivals", "steps:-1@2"], "0 or more"),
        ([*GREEDY, *LOAD, "--arrivals", "trace:nowhere.csv"], "no trace file"),
        (["--simulate", "nothing", "--policy", "greedy", *LOAD], "no profile 'nothing'"),
        ([*SIMULATE, "--policy", "clever", *LOAD], "unknown policy 'clever'"),
        ([*GREEDY, *LOAD, "--widths", "uniform:1:20"], "--widths"),
    ],
)
def test_a_usage_error_is_one_line_on_stderr_and_exit_code_2(shell: Shell, arguments: list[str], words: str) -> None:
    code, out, err = shell.run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--output", "--plot", "--report"])
def test_a_full_disk_costs_no_report(shell: Shell, tmp_path: Path, flag: str) -> None:
    file = tmp_path / "file.png"
    file.symlink_to("/dev/full")
    code, out, err = shell.run(*GREEDY, *LOAD, flag, str(file))
    assert code == 2
    assert "requests                43" in out
    assert err == f"generate-load: cannot write {flag} '{file}' (No space left on device); choose another file\n"


@pytest.mark.usefixtures("coarse_plots")
@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("full", [["--plot"], ["--output", "--plot", "--report"]])
def test_a_file_that_cannot_be_written_prevents_no_other(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_live: bool, full: list[str]
) -> None:
    monkeypatch.setattr(live_run, "run_load", ending_with(False, [Record(0.0, 0.0, 0.1, 200)]))
    files = {flag: tmp_path / f"{flag[2:]}.png" for flag in ("--output", "--plot", "--report")}
    for flag in full:
        files[flag].symlink_to("/dev/full")
    flags = [text for flag, file in files.items() for text in (flag, str(file))]
    with serving_in_a_thread(Stub()) as url:
        code, out, err = shell.run(*([url] if is_live else GREEDY), *LOAD, *flags)
    assert (code, err.count("\n")) == (2, 1)
    assert "answered" in out
    assert sorted(re.findall(r"cannot write (--\w+)", err)) == full
    assert all(file.stat().st_size for flag, file in files.items() if flag not in full)
