"""`make gpu` without a GPU: records, windows of energy, the page of a call that was stopped, and the call's order."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import device, live, sampler
from benchmarks.gpu.__main__ import GpuCall, Solver, continue_from, find_gpu, parse, power_weight, start_solvers
from benchmarks.gpu.device import Call, Measurement, differences, times_plan
from benchmarks.gpu.live import TIMEOUT, Deployment, Rates, measure_cell, measure_server
from benchmarks.gpu.page import calls, profile_of, write_page
from benchmarks.gpu.records import COLUMNS, RECORDS, Recorder, Samples, read_records
from loadgen.live_run import LoadTarget
from policies.profile import Profile, load_profile
from server.backends.buckets import bucket_sizes
from tests.support.stub_server import Stub, serving_in_a_thread

SAMPLES = "samples-1.csv"
IDLE, BUSY = 100.0, {1: 200.0, 2: 250.0, 4: 300.0}
PROFILE = Profile("net-gpu", (0.008, 0.009, 0.01, 0.01), model="net", device="GPU", source="measured", note="times")


def kinds(folder: Path) -> list[str]:
    return [record["kind"] for record in read_records(folder)]


# Records


def test_records_of_several_processes_are_kept_and_a_line_that_was_cut_off_is_not(tmp_path: Path) -> None:
    script = "from pathlib import Path; from benchmarks.gpu.records import Recorder; import os, signal\n"
    script += f"Recorder(Path({str(tmp_path)!r})).add('x', value=1); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    Recorder(tmp_path).add("y", value=2)
    with (tmp_path / RECORDS).open("a") as file:
        file.write('{"kind": "z", "val')
    assert kinds(tmp_path) == ["x", "y"]
    assert read_records(tmp_path / "nothing") == []


def test_a_part_that_fails_leaves_its_reason_and_the_next_one_runs(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)

    def fail() -> None:
        recorder.add("window")
        raise RuntimeError("use_count > 0\nINTERNAL ASSERT FAILED")

    recorder.part("first", time.monotonic() + 60, fail)
    recorder.part("second", time.monotonic() + 60, lambda: recorder.add("cell"))
    recorder.part("third", time.monotonic() - 1, lambda: recorder.add("never"))
    assert kinds(tmp_path) == ["window", "part", "cell", "part", "part"]
    failed = [record.get("failed") for record in read_records(tmp_path) if record["kind"] == "part"]
    assert failed == [
        "RuntimeError: use_count > 0 INTERNAL ASSERT FAILED", None, "TimeoutError: no time was left for it"
    ]  # fmt: skip


def first_call(folder: Path) -> list[dict[str, Any]]:
    return next(calls(read_records(folder)))


# Samples


def write_samples(folder: Path, power: Callable[[float], float], seconds: float, counter: bool = True) -> None:
    """20 Hz of a counter that steps every 100 ms, or of the power alone."""
    times = np.arange(0.0, seconds, 0.05)
    energy = np.concatenate([[0.0], np.cumsum([power(at) * 0.001 for at in np.arange(0.0, seconds, 0.001)])])
    with (folder / SAMPLES).open("w") as file:
        for at in times:
            joules = energy[round(np.floor(at * 10 + 1e-9) * 100)] if counter else float("nan")
            file.write(f"{at:.4f},{joules:.4f},{power(at):.1f},1500,2600,50,4\n")
        file.write("1.0,2")  # cut off


@pytest.mark.parametrize("counter", [True, False], ids=["energy counter", "power alone"])
def test_energy_is_integrated_between_any_two_instants(counter: bool, tmp_path: Path) -> None:
    write_samples(tmp_path, lambda at: 300.0 if 2.0 <= at < 6.0 else 100.0, 10.0, counter)
    samples = Samples.read(tmp_path / SAMPLES)
    assert samples.power(2.37, 5.81) == pytest.approx(300.0, rel=0.01)
    assert samples.energy(0.5, 9.5) == pytest.approx(9.0 * 100.0 + 4.0 * 200.0, rel=0.01)
    assert samples.power(8.0, 12.0) is None, "the samples end before"
    assert [each.clock for each in samples.conditions_within(1.0, 1.1)] == [1500] * 3
    assert samples.power(3.0, 3.0) is None, "an empty window"
    assert samples.about.startswith("NVML's energy counter") == counter
    assert Samples.read(tmp_path / "nothing").power(0.0, 1.0) is None


def test_a_reading_that_failed_is_left_out(tmp_path: Path) -> None:
    write_samples(tmp_path, lambda _: 200.0, 4.0)
    rows = (tmp_path / SAMPLES).read_text().splitlines()
    rows[30] = "1.5000,nan,nan,0,0,0,0"
    (tmp_path / SAMPLES).write_text("\n".join(rows))
    samples = Samples.read(tmp_path / SAMPLES)
    assert samples.power(1.0, 3.0) == pytest.approx(200.0, rel=0.01)
    assert "counter" in samples.about


def test_the_sampler_writes_a_row_every_50_ms_until_its_end(tmp_path: Path) -> None:
    path, began = tmp_path / SAMPLES, time.monotonic()
    sampler.sample(lambda: (1.0, 2.0, 3, 4, 5, 6), path, began + 0.2)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert 3 <= len(rows) <= 6
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert len(sampler.rehearsal_reader()()) == len(COLUMNS) - 1


def test_the_sampler_reads_what_a_gpu_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        value = 3  # not supported

    def refuse(*_: object) -> None:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}", nvmlDeviceGetTotalEnergyConsumption=lambda _: 5_000,
        nvmlDeviceGetFieldValues=refuse, nvmlDeviceGetClockInfo=lambda _, kind: 1000 + kind,
        nvmlDeviceGetTemperature=lambda *_: 44, nvmlDeviceGetCurrentClocksEventReasons=lambda _: 4,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 4,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    joules, watts, *conditions = sampler.nvml_reader()()
    assert joules == 5.0
    assert np.isnan(watts)
    assert conditions == [1001, 1002, 44, 4]


# Profiles and the page


def write_call(folder: Path, sizes: list[int]) -> None:
    """A call with idle power, and a window of two seconds of each size, of a device of known power."""
    recorder, at = Recorder(folder), 5.0
    about = {"device": "GPU", "date": "2026-01-01", "rehearsal": True, "eager": False, "versions": {"python": "3.12"}}
    recorder.add("call", models=["net"], samples=SAMPLES, **about)
    recorder.add("idle", begin=1.0, end=4.0)
    recorder.add("implementation", model="net", name="fused", failed="its logits differ", seconds=1.0, search=True)
    document = json.loads(PROFILE.to_json())
    recorder.add("times", model="net", first_batches_s=1.0, search=True, replay_s={1: 0.007}, profile=document)
    powers: list[tuple[float, float]] = []
    for size in sizes:
        rate = 1.0 / PROFILE.service_time(size)
        recorder.add("window", model="net", batch_size=size, share=1.0, begin=at, end=at + 2.0, batches_hz=rate)
        powers.append((at, BUSY[size]))
        at += 3.0

    def power(now: float) -> float:
        return next((watts for begin, watts in powers if begin - 0.5 <= now < begin + 2.5), IDLE)

    write_samples(folder, power, at + 5.0)


def test_a_profile_has_the_energies_of_the_windows(tmp_path: Path) -> None:
    write_call(tmp_path, [1, 2, 4, 4, 2, 1])
    found = profile_of(first_call(tmp_path), tmp_path, "net")
    assert found is not None
    assert found.idle_power == pytest.approx(IDLE, rel=0.01)
    assert found.energies is not None
    for size, watts in BUSY.items():
        expected = (watts - IDLE) * PROFILE.service_time(size)
        assert found.energies[size - 1] == pytest.approx(expected, rel=0.03)
    assert "1500 MHz, 50 °C, throttled by the power cap" in found.note


def test_without_the_window_of_the_largest_batch_a_profile_has_times_alone(tmp_path: Path) -> None:
    write_call(tmp_path, [1, 2])
    found = profile_of(first_call(tmp_path), tmp_path, "net")
    assert found == PROFILE
    assert profile_of(first_call(tmp_path), tmp_path, "other") is None


def test_each_call_has_samples_of_its_own(tmp_path: Path) -> None:
    """The second one ran on another machine, whose clock began again."""
    write_call(tmp_path, [1, 4])
    (tmp_path / SAMPLES).rename(tmp_path / "samples-0.csv")
    text = (tmp_path / RECORDS).read_text()
    write_call(tmp_path, [1, 2, 4])
    following = (tmp_path / RECORDS).read_text()[len(text) :]
    (tmp_path / RECORDS).write_text(text.replace(SAMPLES, "samples-0.csv") + following)
    both = [profile_of(call, tmp_path, "net") for call in calls(read_records(tmp_path))]
    assert [found is not None and found.energies is not None for found in both] == [True, True]
    write_page(tmp_path)
    assert (tmp_path / "report.md").read_text().count("GPU, 2026-01-01") == 2


CELL = {
    "rate": 50.0,
    "throughput_hz": 50.0,
    "mean_ms": 12.0,
    "p50_ms": 11.0,
    "p95_ms": 20.0,
    "p99_ms": 30.0,
    "ok": 100,
    "mean_batch_size": 1.5,
    "cpu_s": 1.0,
    "busiest_process": 0.5,
    "send_lag_p99_ms": 1.0,
    "slo_attainment": 0.9,
}


@pytest.mark.parametrize("lines", [1, 2, 4, 6, 100], ids=lambda lines: f"{lines} records")
def test_a_page_is_written_whatever_was_measured_before_the_call_was_stopped(lines: int, tmp_path: Path) -> None:
    write_call(tmp_path, [1, 2, 4])
    recorder = Recorder(tmp_path)
    recorder.add("cell", server=live.OURS, network="captured graphs", policy="greedy", begin=5.0, end=7.0, **CELL)
    recorder.add("cell", server="mosec", network="captured graphs", policy="its own", begin=5.0, end=7.0, **CELL)
    kept = (tmp_path / RECORDS).read_text().splitlines()[:lines]
    (tmp_path / RECORDS).write_text("".join(f"{line}\n" for line in kept))
    write_page(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("GPU, 2026-01-01: net; python 3.12.")
    assert ("its logits differ" in text) == (lines >= 3)
    assert ((tmp_path / "net.profile.json").exists(), (tmp_path / "gpu.png").exists()) == (lines >= 4,) * 2
    assert len([*tmp_path.iterdir()]) <= 8 - 2, "there are two more profiles in a real call"
    if lines == 100:
        ours, mosec = (line.split(" | ") for line in text.splitlines() if "| 50 | 50 |" in line)
        assert (ours[11], mosec[11]) == ("200", "200"), "power in the window"
        assert float(ours[7]) > 8.0, "the predicted mean response time"
        assert mosec[7] == "-"


# The device alone


def test_service_times_are_measured_at_every_bucket_within_their_time() -> None:
    plan = times_plan(128, 25.0)
    assert (plan.sizes, plan.max_time) == (bucket_sizes(128), 25.0)
    assert plan.warm_ups == (128,)


def test_outputs_are_compared_with_those_of_all_samples() -> None:
    expected = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], np.float32)
    assert differences(expected, expected) == {"relative_l2": 0.0, "mixed_up": 0}
    found = differences(expected[[1, 0, 2]], expected)
    assert found["mixed_up"] == 2
    assert found["relative_l2"] == pytest.approx(1.0)


def measurement(folder: Path, windows: float, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """One with a device that takes 1 ms for each batch, and time for this many windows."""

    @contextmanager
    def steady(size: int, share: float) -> Iterator[Any]:
        began = time.monotonic()

        def progress() -> Any:
            passed = time.monotonic() - began
            return SimpleNamespace(batches=int(passed * 1000), time=began + passed)

        yield progress

    monkeypatch.setattr(device, "_SETTLE", 0.0)
    monkeypatch.setattr(device, "_WINDOW", 0.02)
    monkeypatch.setattr(device, "ExecutorLoad", lambda *_: steady)
    monkeypatch.setattr(Measurement, "_subject", lambda *_: SimpleNamespace(executor=None, samples=()))
    made = Measurement(Call(("a", "b"), 2, 2, False, True, {}), Recorder(folder))
    made._loaded = {"a": SimpleNamespace(), "b": SimpleNamespace()}  # type: ignore[dict-item]
    made._call.until["energies"] = time.monotonic() + windows * 0.02 + 0.01
    return made


def test_the_windows_of_a_part_that_is_stopped_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError, match="windows were left out"):
        measurement(tmp_path, 3, monkeypatch).energies()
    assert 1 <= len(read_records(tmp_path)) <= 3
    assert {*kinds(tmp_path)} == {"window"}


def test_the_first_model_has_what_policies_need_before_the_others_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement(tmp_path, 10_000, monkeypatch).energies()
    records = read_records(tmp_path)
    at = kinds(tmp_path).index("measured")
    assert [(each["model"], each["batch_size"], each["share"]) for each in records[:at]] == [
        *(("a", size, 1.0) for size in (1, 2)),
        *(("a", 2, share) for share in (0.2, 0.5, 0.8)),
    ]
    following = [(each["model"], each["batch_size"]) for each in records[at + 1 :]]
    assert following == [("b", 1), ("b", 2), ("a", 2), ("a", 1), ("b", 2), ("b", 1)]
    assert all(record["batches_hz"] == pytest.approx(1000.0, rel=0.2) for record in records if "batches_hz" in record)


# The server and its peers


def test_a_cell_has_the_answers_and_the_instants_of_the_load() -> None:
    began = time.monotonic()
    with serving_in_a_thread(Stub()) as url:
        cell = measure_cell(os.getpid(), LoadTarget(url, pixels=True), 60.0, 0.3, 1000.0)
    assert cell["ok"] == cell["scheduled"] > 5
    assert began < cell["begin"] < cell["end"] < time.monotonic() + 0.1
    assert cell["end"] - cell["begin"] == pytest.approx(0.3)
    assert cell["slo_attainment"] == 1.0
    assert cell["cpu_s"] > 0


class Cells:
    """Servers and cells that are recorded in place of being measured; a rate over 3000/s is not answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: list[str] = []
        self.broken = ""

        @contextmanager
        def served(_: Deployment, profile: Path, policy: str, until: float) -> Iterator[Any]:
            self.starts.append(policy)
            if policy == self.broken:
                raise RuntimeError("server.cli was not ready")
            yield SimpleNamespace(url="http://u", process=SimpleNamespace(pid=1), set_policy=lambda *_: None)

        def cell(pid: int, target: LoadTarget, rate: float, *_: object) -> dict[str, Any]:
            return {"rate": rate, "throughput_hz": min(rate, 3000.0)}

        monkeypatch.setattr(live, "_our_server", served)
        monkeypatch.setattr(live, "measure_cell", cell)


def served(folder: Path) -> list[tuple[str, float]]:
    return [(record["policy"], record["rate"]) for record in read_records(folder) if record["kind"] == "cell"]


def measure(folder: Path, policies: Any, seconds: float = 1e6) -> Rates:
    rates = Rates()
    profile = folder / "profile"
    profile.write_text(load_profile("googlenet-h200-prior").to_json())
    deployment = Deployment("googlenet", "cuda:0", 128, "auto")
    measure_server(deployment, profile, policies, Recorder(folder), rates, time.monotonic() + seconds)
    return rates


def test_the_limit_is_found_and_each_policy_is_measured_at_three_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = Cells(monkeypatch)
    rates = measure(tmp_path, [("smdp:w2=1", Path("a")), ("smdp:slo_p95_ms=2", Path("b"))])
    assert cells.starts == ["a", "b"]
    assert [record["name"] for record in read_records(tmp_path) if record["kind"] == "part"] == [
        "Batchwright, smdp:w2=1", "Batchwright, smdp:slo_p95_ms=2"
    ]  # fmt: skip
    assert rates.best == 3000.0
    expected = [
        (policy, load * 3000.0)
        for policy in ("smdp:w2=1", "greedy", TIMEOUT, "smdp:slo_p95_ms=2")
        for load in live.LOADS
    ]
    assert served(tmp_path) == expected
    assert [record["rate"] for record in read_records(tmp_path) if record["kind"] == "limit"] == [2000.0, 3200.0]


def test_a_server_that_does_not_start_leaves_the_other_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = Cells(monkeypatch)
    cells.broken = "a"
    measure(tmp_path, [("smdp:w2=1", Path("a")), ("smdp:slo_p95_ms=2", Path("b"))])
    assert [*dict.fromkeys(policy for policy, _ in served(tmp_path))] == ["smdp:slo_p95_ms=2", "greedy", TIMEOUT]
    assert "was not ready" in read_records(tmp_path)[0]["failed"]


def test_without_a_solved_policy_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = Cells(monkeypatch)
    measure(tmp_path, [])
    assert cells.starts == ["greedy"]
    assert [*dict.fromkeys(policy for policy, _ in served(tmp_path))] == ["greedy", TIMEOUT]


def test_cells_without_time_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cells(monkeypatch)
    measure(tmp_path, [], live._SPAWN)
    assert served(tmp_path) == []
    (part,) = read_records(tmp_path)
    assert re.search(r"the cells from greedy at \d+/s on were left out", part["failed"])


# The call


def test_a_solver_that_takes_longer_than_its_cell_is_stopped_and_the_next_policy_is_used(tmp_path: Path) -> None:
    call = GpuCall(parse(["--rehearse", "--out", str(tmp_path)]), tmp_path, tmp_path)
    done = tmp_path / "done.json"
    done.write_text("{}")
    slow = live.start([sys.executable, "-c", "import time; time.sleep(600)"], stdout=-3, stderr=-1, text=True)
    fast = live.start([sys.executable, "-c", ""], stdout=-3, stderr=-1, text=True)
    failing = live.start([sys.executable, "-c", "1 / 0"], stdout=-3, stderr=-1, text=True)
    now = time.monotonic()
    recorder = call._recorder
    assert Solver("slow", tmp_path / "none", slow, now).result(now + 0.2, recorder) is None
    assert Solver("failing", tmp_path / "none", failing, now).result(now + 30.0, recorder) is None
    assert Solver("fast", done, fast, now).result(now + 30.0, recorder) == done
    assert slow.poll() is not None
    for process in (slow, fast, failing):
        live.stop(process)  # also one that has ended
    assert ["takes too long" in record.get("failed", "") for record in read_records(tmp_path)] == [True, False, False]
    assert "ZeroDivisionError" in read_records(tmp_path)[1]["failed"]


def test_policies_are_solved_with_one_thread_for_loads_that_one_process_can_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(live, "start", lambda line, environment, **_: started.append((line, environment)))
    path = tmp_path / "profile.json"
    path.write_text(load_profile("googlenet-h200-prior").to_json())
    solvers = start_solvers(path, tmp_path)
    assert [solver.name.partition("=")[0] for solver in solvers] == ["smdp:w2", "smdp:slo_p95_ms"]
    for line, environment in started:
        assert environment == {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        highest = float(line[line.index("--rates") + 1].split(":")[1])
        assert highest * load_profile("googlenet-h200-prior").capacity == pytest.approx(gpu._FASTEST, rel=0.01)


def test_the_second_call_is_of_another_model_or_repeats_the_first_one_safely(tmp_path: Path) -> None:
    chosen = parse(["--second", "--models", "net"])
    again = GpuCall(chosen, tmp_path, tmp_path)
    assert (again._models, again._largest, again._eager) == (["net"], 32, True)
    assert again._samples.name == "samples-1.csv"
    assert again._deployment().optimise == "eager"
    write_call(tmp_path, [1])
    other = GpuCall(chosen, tmp_path, tmp_path)
    assert (other._models, other._largest, other._eager) == (["vit_l_16"], 128, False)
    assert other._samples.name == "samples-2.csv"
    assert other._until["closing"] - other._began < gpu.BUDGETS[True] == chosen.budget_s


def test_the_second_call_continues_records_that_lie_elsewhere(tmp_path: Path) -> None:
    earlier, folder = tmp_path / "earlier", tmp_path / "out"
    earlier.mkdir()
    folder.mkdir()
    write_call(earlier, [1])
    continue_from(earlier, folder)
    assert kinds(folder) == kinds(earlier)
    assert (folder / SAMPLES).exists()
    Recorder(folder).add("call")
    continue_from(earlier, folder)
    assert len(kinds(folder)) == len(kinds(earlier)) + 1


def test_what_fails_between_two_windows_leaves_the_windows_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = GpuCall(parse(["--rehearse", "--out", str(tmp_path)]), tmp_path, tmp_path)
    write_call(tmp_path, [1])
    Recorder(tmp_path).add("measured", model="net")
    monkeypatch.setattr(gpu, "profile_of", lambda *_: 1 / 0)
    for _ in range(2):
        call._solve()
    (policy,) = (record for record in read_records(tmp_path) if record["kind"] == "policy")
    assert policy["failed"] == "ZeroDivisionError: division by zero"


def test_a_device_that_stalls_in_the_search_is_measured_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, eager = GpuCall(parse(["--rehearse", "--out", str(tmp_path)]), tmp_path, tmp_path), list[bool]()
    call._until["implementations"] = time.monotonic() - gpu._STALLED

    def start(line: list[str]) -> Any:
        eager.append(json.loads(line[-1])["eager"])
        return subprocess.Popen([sys.executable, "-c", "" if eager[-1] else "import time; time.sleep(600)"])

    monkeypatch.setattr(live, "start", start)
    call._device()
    assert eager == [False, True]
    assert call._deployment().optimise == "eager"


def test_the_parts_of_both_calls_end_in_order_and_within_their_time() -> None:
    for second, parts in gpu.PARTS.items():
        ends = [*parts.values()]
        assert ends == sorted(ends)
        assert ends[-1] <= gpu.BUDGETS[second] - 20.0, "the time for the page"


def test_power_weighs_as_much_as_time_at_a_batch_of_16() -> None:
    profile = load_profile("googlenet-h200-prior")
    weight = power_weight(profile)
    assert weight is not None
    assert profile.energies is not None
    power = profile.energies[15] / profile.service_time(16)
    assert weight * power == pytest.approx(1e3 * profile.service_time(16))
    assert power_weight(PROFILE) is None


def test_without_a_gpu_it_prints_a_message_and_succeeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if find_gpu() is not None:
        pytest.skip("this machine has a GPU: use make gpu")
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    gpu.main()
    assert "nothing to measure: NVIDIA's driver has no GPU" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
