"""Stage A of benchmarks/gpu.py on the CPU, in place of CUDA."""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support import gpu_kernels
from benchmarks.support.gpu_kernels import (
    Cuda,
    Rehearsal,
    Step,
    keep_choice,
    mean_times,
    measure_kernels,
    measure_uploads,
)
from server.backends.cuda.networks import ChoiceKey


def results(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::result ")]
    return dict(json.loads(line.removeprefix("::result ")) for line in lines)


class Stubborn(Rehearsal):
    """Captures no graph."""

    def capture(self, step: Step) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.mark.usefixtures("few_repeats")
def test_each_size_of_each_variant_has_times_and_a_small_error(capsys: pytest.CaptureFixture[str]) -> None:
    measure_kernels("squeezenet1_1", Rehearsal(), (2, 1), compile_too=False, until=1e12)
    cells = results(capsys)["cells"]
    assert [(cell["variant"], cell["batch_size"]) for cell in cells] == [
        (variant, size) for variant in dict.fromkeys(cell["variant"] for cell in cells) for size in (2, 1)
    ]
    assert cells[0]["variant"] == "eager"
    assert cells[0]["relative_l2"] == 0.0
    for cell in cells:
        assert cell["relative_l2"] < 1e-4
        assert cell["finite"]
        assert min(cell["eager_ms"], cell["graph_ms"], cell["first_call_ms"]) > 0


@pytest.mark.usefixtures("few_repeats")
def test_an_implementation_that_fails_leaves_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Tensor) -> Tensor:
        raise ValueError("no kernel\nfound")

    monkeypatch.setattr(gpu_kernels, "makers", lambda net: {"fused": lambda: broken, "eager": lambda: net})
    measure_kernels("squeezenet1_1", Rehearsal(), (1,), compile_too=False, until=1e12)
    fused, eager = results(capsys)["cells"]
    assert fused == {"variant": "fused", "batch_size": 1, "failed": "ValueError: no kernel found"}
    assert eager["graph_ms"] > 0


@pytest.mark.usefixtures("few_repeats")
def test_a_network_that_cannot_be_captured_has_its_eager_times(capsys: pytest.CaptureFixture[str]) -> None:
    measure_kernels("squeezenet1_1", Stubborn(), (1,), compile_too=False, until=1e12)
    cell = results(capsys)["cells"][0]
    assert cell["graph"] == "not captured: operation not permitted when stream is capturing"
    assert cell["eager_ms"] > 0
    assert "graph_ms" not in cell


def test_sizes_for_which_there_is_no_time_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    measure_kernels("squeezenet1_1", Rehearsal(), (1,), compile_too=False, until=0.0)
    assert results(capsys) == {"stopped": "no time for eager at 1 and what follows"}


class FakeEvent:
    """An event of CUDA, with the time in ms at which it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.time = 0.0

    def record(self, stream: object) -> None:
        FakeCuda.now += 2.5
        self.time = FakeCuda.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.time - self.time


class FakeCuda:
    """torch.cuda as far as the measurements use it, with a log of its calls."""

    now = 0.0


def test_cuda_is_timed_by_events_and_captured_on_its_own_stream_after_all_work_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Stream:
        cuda_stream = 7

        def __repr__(self) -> str:
            return "side"

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def capture(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        log.append(f"begin on {stream}, {capture_error_mode}")
        yield
        log.append("end")

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        log.append(f"with {stream}")
        yield

    real = inspect.signature(torch.cuda.graph.__init__).parameters
    assert {"stream", "capture_error_mode"} <= set(real), "the fake takes what the real one does"
    for name, fake in {
        "Stream": lambda place: Stream(),
        "Event": FakeEvent,
        "CUDAGraph": Graph,
        "graph": capture,
        "stream": use,
        "synchronize": lambda place=None: log.append("synchronize"),
        "set_device": lambda place: log.append(f"device {place}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    cuda = Cuda(1)
    assert cuda.stream == 7
    assert torch.backends.cudnn.benchmark
    replay = cuda.capture(lambda: torch.zeros(1))
    assert cuda.seconds(replay) == 2.5e-3
    assert log == ["device cuda:1", "synchronize", "begin on side, thread_local", "end", "with side", "replay"]


def test_uploads_are_measured_by_the_length_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Counting(Rehearsal):
        def pinned(self, *shape: int) -> Tensor:
            return torch.ones(shape, dtype=torch.uint8)

    measure_uploads(Counting(), samples=16)
    rows = results(capsys)["uploads"]
    assert [row["samples"] for row in rows] == [1, 8]
    assert all(row["gb_per_s"] > 0 for row in rows)


class Profiled(Rehearsal):
    """Counts kernels, and notes how many cells had been reported before."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.before: list[int] = []

    def kernels(self, launch: Any) -> int | None:
        launch()
        self.before.append(self.capsys.readouterr().out.count('"variant"'))
        return 5


@pytest.mark.usefixtures("few_repeats")
def test_kernels_are_counted_after_all_times_were_reported(capsys: pytest.CaptureFixture[str]) -> None:
    device = Profiled(capsys)
    measure_kernels("squeezenet1_1", device, (1,), compile_too=False, until=1e12)
    assert device.before == [1 + 2, 0], "eager alone, then eager and fused"
    assert [cell["kernels"] for cell in results(capsys)["cells"]] == [5, 5]


def cell(variant: str, size: int, graph_ms: float | None, first_call_ms: float = 1.0) -> dict[str, Any]:
    found = {"variant": variant, "batch_size": size, "first_call_ms": first_call_ms}
    return found if graph_ms is None else {**found, "graph_ms": graph_ms}


def test_later_stages_serve_the_implementation_that_was_the_fastest_and_is_made_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cells = [
        *(cell("eager", 64, 4.0), cell("eager", 1, 1.0), cell("fused", 64, 2.0), cell("fused", 1, 0.5)),
        *(cell("partly", 64, 0.1), cell("partly", 1, None), cell("stopped", 64, 0.1)),
        *(cell("compile", 64, 1.0, 90e3), cell("compile", 1, 0.1), cell("tensorrt", 64, 0.1), cell("tensorrt", 1, 0.1)),
    ]
    assert mean_times(cells) == pytest.approx({"eager": 0.002, "fused": 0.001})
    cuda, key = torch.device("cuda:0"), ChoiceKey("m", "a GPU", "fp16")
    keep_choice("m", [], cuda, "a GPU")
    assert key.load() is None
    keep_choice("m", cells, cuda, "a GPU")
    assert key.load() == "fused"
    keep_choice("m", cells[:2], cuda, "a GPU")
    assert key.load() == "fused", "a choice that is known stays"
