"""Simulation of one queue of formed batches with several servers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.queue.batcher import Batcher
from policies.queue.central import serve
from policies.queue.monitor import NoMonitor
from policies.queue.simulator import run
from policies.rules.control_limit import static
from policies.rules.per_kind import PerKind
from policies.types import BatchKey, Request


def test_the_first_formed_batch_is_served_first() -> None:
    arrivals = np.array([0.0, 1.0, 2.0, 3.0])
    run = serve(arrivals, np.array([5.0, 1.0, 1.0, 4.0]), np.array([0, 1, 1, 0]), 2)
    assert run.batch_times.tolist() == [1.0, 5.0]
    assert run.responses.tolist() == [2.0, 1.0, 8.0, 5.0]  # bin 1: 2 to 3; bin 0: 3 to 8
    assert run.elapsed == 8.0
    assert run.throughput == 0.5


def test_a_second_server_serves_the_waiting_batch() -> None:
    arrivals, times = np.array([0.0, 0.0, 0.0]), np.array([4.0, 2.0, 1.0])
    bins = np.zeros(3, dtype=np.int64)
    assert serve(arrivals, times, bins, 1).responses.tolist() == [4.0, 6.0, 7.0]
    assert serve(arrivals, times, bins, 1, servers=2).responses.tolist() == [4.0, 2.0, 3.0]


def test_incomplete_batches_are_served_after_the_last_arrival() -> None:
    run = serve(np.array([0.0, 1.0, 9.0]), np.array([2.0, 2.0, 2.0]), np.array([0, 0, 1]), 2)
    assert run.responses.tolist() == [3.0, 2.0, 2.0]


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 9.0), st.integers(0, 3)), min_size=1, max_size=60),
    st.integers(1, 7),
    st.integers(1, 4),
)
def test_each_request_is_served_once_and_not_faster_than_alone(
    drawn: list[tuple[float, float, int]], batch_size: int, servers: int
) -> None:
    gaps, times, bins = (np.array(column) for column in zip(*drawn, strict=True))
    run = serve(np.cumsum(gaps), times, bins, batch_size, servers)
    assert len(run.responses) == len(drawn)
    assert len(run.batch_times) == sum(-(-int(count) // batch_size) for count in np.unique(bins, return_counts=True)[1])
    assert np.sort(run.responses).min() >= times.min() - 1e-9
    assert run.batch_times.sum() <= servers * run.elapsed + 1e-6
    assert run.batch_times.max() == pytest.approx(times.max())


@pytest.mark.parametrize("rate", [0.2, 1.0, 3.0])
def test_one_server_agrees_with_the_batcher_under_the_printed_policy(rate: float) -> None:
    rng, batch_size, edges = np.random.default_rng(3), 4, (5.0, 12.0)
    arrivals, sizes = np.cumsum(rng.exponential(1.0 / rate, 600)), rng.uniform(1.0, 20.0, 600)
    bins = np.searchsorted(edges, sizes, side="right")
    requests = [
        Request(i, at, BatchKey("", each), size=size)
        for i, (at, size, each) in enumerate(
            zip(arrivals.tolist(), sizes.tolist(), bins.tolist(), strict=True),
        )
    ]
    batcher = Batcher(PerKind({"": static(batch_size)}), {"": batch_size}, NoMonitor())
    central = serve(arrivals, sizes, bins, batch_size).responses
    batched = run(batcher, requests, lambda launch: max(r.size for r in launch.requests), lambda _: None).responses
    formed = sum(count - count % batch_size for count in np.bincount(bins).tolist())  # the rest is drained differently
    assert central[:formed] == pytest.approx(batched[:formed])
