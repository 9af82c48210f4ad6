"""Bins: which request belongs to which bin; batches are of one bin, of full size, and in order of formation."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import ModelPolicy, choose, combine
from policies.profile import Profile
from policies.queue.arrivals import poisson
from policies.queue.batcher import Batcher
from policies.queue.simulator import Service, simulate
from policies.rules.multi_bin import Bins, mispredicted
from policies.types import BatchKey, Launch, Request

LENGTHS = Profile("lengths", (1.0, 1.0, 1.0, 1.0), lengths=(0, 1), length_service_times=((0.0, 1.0),) * 4)


def halves(sizes: Sequence[float]) -> Sequence[float]:
    return (sum(sizes) / len(sizes),)


def test_a_size_on_an_edge_belongs_to_the_bin_above() -> None:
    bins = Bins(2, halves).with_edges_of([1.0, 3.0])
    assert [bins.kind("m", size).bin for size in (0.5, 1.9, 2.0, 99.0)] == [0, 0, 1, 1]


def test_all_requests_share_one_bin_until_enough_sizes_are_known_and_then_edges_follow_them() -> None:
    bins = Bins(2, halves)
    for i in range(31):
        bins.learn(float(i % 2))
    assert {bins.kind("m", size).bin for size in (0.0, 1.0)} == {0}
    bins.learn(1.0)
    assert [bins.kind("m", size).bin for size in (0.2, 0.8)] == [0, 1]
    for _ in range(8000):
        bins.learn(50.0)
    assert list(bins.edges) == [50.0], "the old sizes are forgotten"


def test_edges_are_recomputed_seldom() -> None:
    calls = []

    def cut(sizes: Sequence[float]) -> Sequence[float]:
        calls.append(len(sizes))
        return ()

    bins = Bins(2, cut)
    for i in range(10_000):
        bins.learn(float(i))
    assert calls == [32, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096]


def test_bins_with_given_sizes_learn_from_no_others() -> None:
    bins = Bins(2, halves).with_edges_of([1.0, 3.0])
    for _ in range(100):
        bins.learn(50.0)
    assert list(bins.edges) == [2.0]


def test_reading_a_kind_does_not_change_the_bins() -> None:
    chosen = choose("multi-bin:2", LENGTHS)
    assert chosen.bins is not None
    for i in range(100):
        chosen.kind("m", float(i))
    assert list(chosen.bins.edges) == []
    kinds = [chosen.arriving("m", float(i)) for i in range(32)]
    assert len(chosen.bins.edges) == 1
    assert [kind.bin for kind in kinds] == [0] * 31 + [1]


@pytest.mark.parametrize(
    ("true", "expected"), [(0, {0: 0.8, 1: 0.2}), (1, {0: 0.2, 1: 0.6, 2: 0.2}), (3, {2: 0.2, 3: 0.8})]
)
def test_an_error_is_one_of_the_neighbouring_bins(true: int, expected: dict[int, float]) -> None:
    rng = np.random.default_rng(1)
    counts = Counter(mispredicted(BatchKey("m", true), 4, 0.2, rng).bin for _ in range(10_000))
    # five standard errors of a share of 10,000
    assert {each: counts[each] / 10_000 for each in counts} == pytest.approx(expected, abs=0.025)


def test_without_errors_every_kind_is_the_true_one() -> None:
    rng = np.random.default_rng(1)
    assert all(mispredicted(BatchKey("m", 1), 3, 0.0, rng) == BatchKey("m", 1) for _ in range(100))


def knowing(spec: str, sizes: Sequence[float]) -> ModelPolicy:
    chosen = choose(spec, LENGTHS)
    assert chosen.bins is not None
    return replace(chosen, bins=chosen.bins.with_edges_of(sizes))


def requests(chosen: ModelPolicy, gaps: Sequence[float], sizes: Sequence[float]) -> list[Request]:
    instants = np.cumsum(gaps).tolist()
    return [
        Request(i, at, chosen.kind("m", size), size=size, payload=size)
        for i, (at, size) in enumerate(zip(instants, sizes, strict=False))
    ]


def serve(chosen: ModelPolicy, here: Sequence[Request]) -> list[Service]:
    policy, monitor = combine({"m": chosen})
    batcher = Batcher(policy, {"m": 4}, monitor)
    return list(simulate(batcher, here, longest))


def longest(launch: Launch) -> float:
    return max(r.size for r in launch.requests)


SIZES = st.lists(st.integers(1, 9).map(float), min_size=40, max_size=40)
GAPS = st.lists(st.sampled_from([0.0, 0.25, 1.0, 30.0]), min_size=1, max_size=40)


@settings(max_examples=60)
@given(
    spec=st.sampled_from(
        [
            "multi-bin:3,max_wait_ms=inf",
            "multi-bin:2,batch_size=3,max_wait_ms=2500",
            "multi-bin:4,inner=greedy",
            "multi-bin:3,inner=timeout:1500,edges=equal",
            "multi-bin:3,batch_size=2,inner=greedy",
        ]
    ),
    gaps=GAPS,
    sizes=SIZES,
)
def test_every_request_is_served_once_with_requests_of_its_bin_only(
    spec: str, gaps: list[float], sizes: list[float]
) -> None:
    chosen = knowing(spec, sizes)
    here = requests(chosen, gaps, sizes)
    services = serve(chosen, here)
    assert sorted(r.id for s in services for r in s.finished) == [r.id for r in here]
    for service in services:
        assert len({r.kind for r in service.launch.requests}) == 1
        assert len(service.launch.requests) <= int(chosen.parameters.get("batch_size", 4))


@settings(max_examples=60)
@given(gaps=GAPS, sizes=SIZES)
def test_as_printed_batches_are_of_exactly_b_and_served_in_order_of_formation(
    gaps: list[float], sizes: list[float]
) -> None:
    chosen = knowing("multi-bin:3,batch_size=4,max_wait_ms=inf", sizes)
    services = serve(chosen, requests(chosen, gaps, sizes))
    whole = [s for s in services if s.launch.reason != "drain"]
    assert all(len(s.launch.requests) == 4 for s in whole)
    assert whole == services[: len(whole)], "only the drained rest is smaller"
    formed = [s.launch.requests[-1].id for s in whole]
    assert formed == sorted(formed)
    for service in services:
        ids = [r.id for r in service.launch.requests]
        assert ids == sorted(ids), "within a bin in order of arrival"


def waits(spec: str, horizon: float, **rates: float) -> dict[float, float]:
    """The longest waiting time, s, by size, of Poisson arrivals until the horizon; rates are of sizes, s5=1.0."""
    rng, arrivals = np.random.default_rng(1), []
    for name, rate in rates.items():
        arrivals += [(at, float(name[1:])) for at in poisson(rate, horizon, rng).tolist()]
    arrivals.sort()
    profile = Profile("lengths", (1.0,) * 8, lengths=(0, 1), length_service_times=((0.0, 1.0),) * 8)
    chosen = choose(spec, profile)
    assert chosen.bins is not None
    sizes = [size for _, size in arrivals]
    chosen = replace(chosen, bins=chosen.bins.with_edges_of(sizes))
    here = requests(chosen, np.diff([at for at, _ in arrivals], prepend=0.0).tolist(), sizes)
    policy, monitor = combine({"m": chosen})
    list(simulate(Batcher(policy, {"m": 8}, monitor), here, longest))
    return {size: max(r.started - r.arrival for r in here if r.size == size) for size in set(sizes)}


@pytest.mark.parametrize("inner", ["greedy", "static:8", "timeout:500"])
def test_behind_a_backlog_a_bin_waits_no_longer_than_the_backlog_does(inner: str) -> None:
    waited = waits(f"multi-bin:2,batch_size=8,inner={inner}", 600.0, s20=0.6, s1=0.05)
    assert waited[1.0] <= waited[20.0] + 20.0, "one batch is in service when the first of its own arrives"


@pytest.mark.parametrize("inner", ["greedy", "static:8", "timeout:500"])
def test_bins_within_the_capacity_of_the_device_do_not_starve_each_other(inner: str) -> None:
    # full batches load it to 0.51; were batches at their maximum wait always first, short ones would wait for an hour
    waited = waits(f"multi-bin:2,batch_size=8,inner={inner}", 6000.0, s20=0.08, s5=0.5)
    assert max(waited.values()) < 100.0


@pytest.mark.parametrize(
    ("spec", "bins", "throughput"), [("multi-bin:1", 1, 6.45), ("multi-bin:3", 3, 9.40), ("multi-bin:5", 5, 10.35)]
)
def test_uniform_sizes_have_the_throughput_of_equation_4(spec: str, bins: int, throughput: float) -> None:
    rng = np.random.default_rng(5)
    number, rate = 20_000, 1.2 * throughput
    sizes = rng.uniform(1.0, 20.0, number).tolist()
    profile = Profile("longest", (1.0,) * 128, lengths=(0, 1), length_service_times=((0.0, 1.0),) * 128)
    chosen = choose(f"{spec},batch_size=128,max_wait_ms=inf", profile)
    assert chosen.bins is not None
    chosen = replace(chosen, bins=chosen.bins.with_edges_of(sizes))
    policy, monitor = combine({"m": chosen})
    batcher = Batcher(policy, {"m": 128}, monitor)
    here = requests(chosen, rng.exponential(1.0 / rate, number).tolist(), sizes)
    whole = [s for s in simulate(batcher, here, longest) if s.launch.reason != "drain"]
    served, elapsed = sum(len(s.finished) for s in whole), whole[-1].finish - whole[0].start
    assert served / elapsed == pytest.approx(throughput, rel=0.01)


def kinds_after(change: Callable[[Request], BatchKey]) -> list[BatchKey]:
    chosen = knowing("multi-bin:2", [1.0, 9.0])
    policy, monitor = combine({"m": chosen})
    batcher = Batcher(policy, {"m": 4}, monitor)
    for request in requests(chosen, [0.0, 0.1, 0.1], [1.0, 9.0, 5.0]):
        batcher.arrive(request)
    batcher.set_kinds(change)
    return [r.kind for r in batcher.state(1.0).waiting]


def test_a_swap_recomputes_the_kinds_of_waiting_requests() -> None:
    assert kinds_after(lambda r: r.kind) == [BatchKey("m", 0), BatchKey("m", 1), BatchKey("m", 0)]
    other = knowing("multi-bin:3", [1.0, 5.0, 9.0])
    assert kinds_after(lambda r: other.kind("m", r.size)) == [BatchKey("m", 0), BatchKey("m", 2), BatchKey("m", 1)]
    plain = choose("greedy", LENGTHS)
    assert set(kinds_after(lambda r: plain.kind("m", r.size))) == {BatchKey("m")}


def test_a_request_at_its_maximum_wait_is_launched_before_a_full_batch() -> None:
    chosen = knowing("multi-bin:2,batch_size=2,max_wait_ms=2000", [1.0, 9.0])
    here = requests(chosen, [0.0, 1.5, 0.1, 0.1, 0.1, 0.1], [9.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    services = serve(chosen, here)
    assert [[r.id for r in s.launch.requests] for s in services[:3]] == [[1, 2], [0], [3, 4]]
    assert [s.start for s in services[:2]] == pytest.approx([1.6, 2.6])
