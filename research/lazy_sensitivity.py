"""LazyBatching's section VI-C in simulation, and throughput beyond the capacity (figure 13).

About 4 minutes on one core. The setting is that of research/lazy.py: ResNet, Poisson arrivals, an SLO of 100 ms.

batch_sizes: maximum batches of 16, 32 and 64. The paper gives the average by which graph batching takes longer, without
  saying over what: ours is over the time-windows 5, 25 and 95 ms and the arrival rates 16, 500, 1000 and 2000 a second.
co_located: four models on one device, each with a quarter of the arrivals; requests of two models share no batch. The
  paper does not name its four: ours are four copies of ResNet.
saturated: arrivals faster than any policy can serve, so that the throughput is the policy's own.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from benchmarks.support import harness
from policies.catalog import choose, combine
from policies.planning.simulation import SimulatedDevice
from policies.profile import Profile
from policies.queue import simulator
from policies.queue.arrivals import Instants
from policies.queue.batcher import Batcher
from policies.types import BatchKey, Request
from research.lazy import POLICIES, RATES, arrivals, resnet, runner

SEEDS, REQUESTS, SLO_MS = 20, 2000, 100
BATCH_SIZES = (16, 32, 64)
GRAPH = ("GraphB(5)", "GraphB(25)", "GraphB(95)")
COMPARED = ("Serial", *GRAPH, "greedy", "lazy", "catch-up")
MODELS = ("a", "b", "c", "d")
SATURATED, SATURATED_REQUESTS = 1.2, 10_000  # times the capacity
PRINTED = {"16": (12.0, 1.3), "32": (14.0, 1.3), "64": (15.0, 1.5), "co_located": (2.4, 1.8)}  # latency, throughput


def spec_of(name: str) -> str:
    """The policy's spec at the SLO."""
    return POLICIES[name][0].format(slo=SLO_MS)


def figures(runs: list[simulator.Run]) -> dict[str, float]:
    """Means over the runs: mean response time, 99th percentile, throughput, batch size, share of late requests."""
    found = {
        "mean_ms": [1e3 * run.responses.mean() for run in runs],
        "p99_ms": [1e3 * np.quantile(run.responses, 0.99) for run in runs],
        "throughput_hz": [len(run.responses) / run.elapsed for run in runs],
        "mean_batch_size": [run.batch_sizes.mean() for run in runs],
        "late": [np.mean(run.responses > SLO_MS / 1e3) for run in runs],
    }
    return {key: round(float(np.mean(values)), 5) for key, values in found.items()}


def batch_sizes() -> dict[str, Any]:
    """By maximum batch size, policy and rate; with the average gains over graph batching."""
    return {str(largest): _with_gains(_by_rate(resnet().truncated(largest), 1)) for largest in BATCH_SIZES}


def co_located() -> dict[str, Any]:
    """Four models on one device, by policy and rate of all arrivals."""
    return _with_gains(_by_rate(resnet(), len(MODELS)))


def saturated() -> dict[str, Any]:
    """Throughput where more arrives than can be served, by maximum batch size and policy."""
    found: dict[str, Any] = {}
    for largest, name in product(BATCH_SIZES, COMPARED):
        profile = resnet().truncated(largest)
        rate = SATURATED * profile.capacity
        runs = [runner(spec_of(name), profile)(arrivals(rate, SATURATED_REQUESTS, seed)) for seed in range(SEEDS)]
        cell = found.setdefault(str(largest), {"capacity_hz": round(profile.capacity, 3), "policies": {}})
        cell["policies"][name] = figures(runs)
        print(largest, name, cell["policies"][name], flush=True)
    return found


def _by_rate(profile: Profile, models: int) -> dict[str, dict[str, dict[str, float]]]:
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for name, rate in product(COMPARED, RATES):
        runs = [shared(spec_of(name), profile, arrivals(rate, REQUESTS, seed), models) for seed in range(SEEDS)]
        cells.setdefault(name, {})[str(rate)] = figures(runs)
        print(profile.max_batch_size, models, name, rate, cells[name][str(rate)], flush=True)
    return cells


def shared(spec: str, profile: Profile, instants: Instants, models: int) -> simulator.Run:
    """Simulate some copies of a model on one device; each request is of one of them, in turns drawn at random.

    Args:
        spec: of the policy of every copy.
        profile: of one copy alone.
        instants: of the requests to all, s.
        models: number of copies, up to 4.
    """
    if models == 1:
        return runner(spec, profile)(instants)
    names = MODELS[:models]
    drawn = np.random.default_rng([len(instants), models]).integers(models, size=len(instants)).tolist()
    chosen = {name: choose(spec, profile) for name in names}
    policy, monitor = combine(chosen)
    requests = [
        Request(i, t, BatchKey(names[k]), t + SLO_MS / 1e3, size=profile.service_time(1), stages=profile.stages)
        for i, (t, k) in enumerate(zip(instants.tolist(), drawn, strict=True))
    ]
    batcher = Batcher(policy, dict.fromkeys(names, profile.max_batch_size), monitor)
    device = SimulatedDevice(profile, profile.service_time)
    return simulator.run(batcher, requests, device.service_time, device.energy)


def _with_gains(cells: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    return {
        "latency_gain": round(float(np.mean(list(_ratios(cells, "mean_ms", False)))), 4),
        "throughput_gain": round(float(np.mean(list(_ratios(cells, "throughput_hz", True)))), 4),
        "cells": cells,
    }


def _ratios(cells: Mapping[str, Mapping[str, Mapping[str, float]]], key: str, higher: bool) -> Iterator[float]:
    """LazyBatching against each configuration of graph batching at each rate; above 1 it is better."""
    for name, rate in product(GRAPH, map(str, RATES)):
        lazy, graph = cells["lazy"][rate][key], cells[name][rate][key]
        yield lazy / graph if higher else graph / lazy


def main() -> None:
    """Simulate the chosen parts, record, print the gains."""
    parts = (batch_sizes, co_located, saturated)
    record = harness.measure_parts("lazy_sensitivity", __doc__, {part.__name__: part for part in parts})
    rows = [[f"maximum batch {n}", c["latency_gain"], c["throughput_gain"]] for n, c in record["batch_sizes"].items()]
    rows.append(["four models", record["co_located"]["latency_gain"], record["co_located"]["throughput_gain"]])
    print(harness.markdown_table(("", "latency, times better", "throughput, times better"), rows))


if __name__ == "__main__":
    main()
