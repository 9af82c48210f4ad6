"""The order of CUDA calls, recorded without a GPU."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.backends.cuda import runtime
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
        made.append(f"enter {entered.name}")
        yield
        current.pop()

    fakes = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "stream": stream}
    others = {"graph_pool_handle": lambda: "the pool", "empty_cache": lambda: None}
    for name, fake in {**fakes, **others}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return made


def test_copies_and_graphs_have_streams_of_their_own_and_all_graphs_one_pool(calls: list[str]) -> None:
    made, target = CudaRuntime(torch.device("cuda", 1)), torch.zeros(2)
    copied = made.upload([(target, torch.ones(2))])
    made.wait_for(copied)
    replay = made.capture(lambda: calls.append("run"))
    replay()
    made.record()
    assert target.tolist() == [1.0, 1.0]
    assert [call for call in calls if not call.startswith("enter")] == [
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


def test_memory_is_poisoned_and_results_are_copied_in_the_order_of_the_batches(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"max_memory_allocated": lambda _: 1000, "memory_allocated": lambda _: 400}
    for name, fake in memory.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    filled: list[Any] = []
    monkeypatch.setattr(torch, "full", lambda *shape_and_value, **_: filled.append(shape_and_value))
    monkeypatch.setattr(runtime, "empty_cache", lambda: calls.append("empty cache"))
    made, target = CudaRuntime(torch.device("cuda", 0)), torch.zeros(2)
    made.poison_free_memory()
    made.copy(target, torch.ones(2))
    assert calls[2:] == ["empty cache", "enter stream 0", "enter stream 0"]
    assert filled == [((300,), torch.nan)]
    assert target.tolist() == [1.0, 1.0]


class Pools:
    """Torch's pools of graph memory: one that had graphs and has none any more can not be captured into again."""

    def __init__(self) -> None:
        self.graphs: Counter[int] = Counter()
        self.ended: set[int] = set()
        self.handles = iter(range(1, 100))
        pools = self

        class Graph:
            """A captured graph, which counts in its pool while it exists."""

            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                if pool in pools.ended:
                    raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
                self.pool = pool
                pools.graphs[pool] += 1

            def capture_end(self) -> None:
                pass

            def replay(self) -> None:
                pass

            def __del__(self) -> None:
                pools.graphs[self.pool] -= 1
                if not pools.graphs[self.pool]:
                    pools.ended.add(self.pool)

        self.graph = Graph


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    made = Pools()
    for name, fake in {
        "Stream": lambda _: SimpleNamespace(),
        "stream": nullcontext,
        "graph_pool_handle": lambda: next(made.handles),
        "CUDAGraph": made.graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(runtime, "empty_cache", lambda: None)
    return made


def fails() -> None:
    raise ValueError("not captured")


def test_graphs_share_a_pool_and_the_graphs_of_a_second_implementation_get_another_one(pools: Pools) -> None:
    made = CudaRuntime(torch.device("cuda", 0))
    first: list[Any] = [made.capture(lambda: None) for _ in range(3)]
    assert pools.graphs == {1: 3}
    del first[:2]
    first.append(made.capture(lambda: None))
    assert pools.graphs == {1: 2}
    first.clear()
    gc.collect()
    kept = [made.capture(lambda: None), made.capture(lambda: None)]
    assert pools.graphs == {1: 0, 2: 2}
    kept.clear()


def test_a_capture_that_failed_before_any_graph_leaves_the_next_one_a_pool(pools: Pools) -> None:
    made = CudaRuntime(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="not captured"):
        made.capture(fails)
    gc.collect()
    replay = made.capture(lambda: None)
    assert pools.graphs[2] == 1
    del replay
