"""The order of CUDA calls, recorded without a GPU."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from server.backends.cuda.runtime import CudaRuntime


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    current = ["default"]

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = f"stream {sum(call.startswith('make') for call in made)}"
            made.append(f"make {self.name} on {device}")

        def record_event(self, _: object) -> None:
            made.append(f"record on {self.name}")

        def wait_event(self, _: object) -> None:
            made.append(f"{self.name} waits")

    class Event:
        def __init__(self, blocking: bool = False) -> None:
            assert blocking, "a spinning wait would occupy a processor"

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            made.append(f"begin on {current[-1]}, {pool}, {capture_error_mode}")

        def capture_end(self) -> None:
            made.append("end")

        def replay(self) -> None:
            made.append("replay")

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        current.append(entered.name)
        yield
        current.pop()

    fakes = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "stream": stream}
    others = {"graph_pool_handle": lambda: "the pool", "empty_cache": lambda: None}
    for name, fake in {**fakes, **others}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return made


def test_copies_and_graphs_have_streams_of_their_own_and_all_graphs_one_pool(calls: list[str]) -> None:
    runtime, target = CudaRuntime(torch.device("cuda", 1)), torch.zeros(2)
    copied = runtime.upload([(target, torch.ones(2))])
    runtime.wait_for(copied)
    replay = runtime.capture(lambda: calls.append("run"))
    replay()
    runtime.record()
    assert target.tolist() == [1.0, 1.0]
    assert calls == [
        "make stream 0 on cuda:1",
        "make stream 1 on cuda:1",
        "record on stream 1",
        "stream 0 waits",
        "begin on stream 0, the pool, thread_local",
        "run",
        "end",
        "replay",
        "record on stream 0",
    ]


def test_a_capture_that_fails_is_ended(calls: list[str]) -> None:
    def fail() -> None:
        raise ValueError("not permitted")

    with pytest.raises(ValueError, match="not permitted"):
        CudaRuntime(torch.device("cuda", 0)).capture(fail)
    assert calls[-1] == "end"


def test_a_capture_is_not_interrupted_by_the_garbage_collector_and_needs_no_empty_cache(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    seen: list[bool] = []
    CudaRuntime(torch.device("cuda", 0)).capture(lambda: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()
