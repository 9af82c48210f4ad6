"""Stage A of benchmarks/gpu.py on the CPU, in place of CUDA."""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support import gpu_kernels
from benchmarks.support.gpu_kernels import Cuda, Rehearsal, Step, measure_kernels, measure_uploads


def results(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::result ")]
    return dict(json.loads(line.removeprefix("::result ")) for line in lines)


class Stubborn(Rehearsal):
    """Captures no graph."""

    def capture(self, step: Step) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


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

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def capture(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        log.append(f"begin on {stream}, {capture_error_mode}")
        yield
        log.append("end")

    @contextmanager
    def use(stream: str) -> Iterator[None]:
        log.append(f"with {stream}")
        yield

    real = inspect.signature(torch.cuda.graph.__init__).parameters
    assert {"stream", "capture_error_mode"} <= set(real), "the fake takes what the real one does"
    for name, fake in {
        "Stream": lambda place: "side",
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
