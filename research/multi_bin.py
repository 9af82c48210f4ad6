"""Multi-bin batching in simulation: the paper's figures 3, 4, 6, 8 and 9, and recorded lengths, beside the theory.

About four minutes on one core. Runs are of the central queue (policies/queue/central.py), each with its own seed;
recorded are their mean, least and greatest values. "batcher" values are of the server's own queue and policies on a
virtual clock, as in generate-load --simulate. Uniform sizes on [1, 20] s and batches of 128 are the paper's setting. In
place of its answers to GSM8K, which are not published, lengths are those of Azure's trace of conversations (2023), at
20 ms a token.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.harness import TRACE, measure_parts, require_trace
from policies.catalog import choose
from policies.planning.simulation import RequestSizes, Simulation
from policies.queue.arrivals import trace_column
from policies.queue.central import CentralRun, serve
from policies.sizing.bins import batch_time, equal_edges, least_response_time, optimised_edges
from policies.sizing.size_distributions import longest_request_profile
from research import multi_bin_figures
from research.papers.multi_bin_theory import Exponential, Uniform

SEEDS, REQUESTS, LARGE = 10, 128_000, 128
UNIFORM = Uniform(1.0, 20.0)
BINS = (1, 2, 3, 4, 5)
RATES = (0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14)  # 1/s
EXPONENTIAL, EXPONENTIAL_BATCH, EXPONENTIAL_REQUESTS = Exponential(10.0), 200, 200_000
EXPONENTIAL_BINS, EXPONENTIAL_RATES = (1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)  # figure 9
SMALL, SERVERS, TOKEN = 8, 8, 0.02  # batch size and servers of figure 6; s a token
LENGTH_BINS = (1, 2, 4, 8, 16, 32)
SERVED_RATES = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20)  # 1/s, by eight servers
COMPARED = (  # on one server, with a token as the unit of time
    "greedy",
    "static:8,max_wait_ms=inf",
    "multi-bin:4,batch_size=8,max_wait_ms=inf",
    "multi-bin:4,batch_size=8,inner=greedy",
    "multi-bin:2,batch_size=8,inner=greedy",
)
COMPARED_RATES, COMPARED_SEEDS, COMPARED_REQUESTS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03), 3, 6000
ERRORS = (0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
ERROR_BINS = (2, 4, 8)
OVERLOAD = 1.1  # arrival rate over the expected throughput: the queue is never empty, and grows slowly
_Floats = NDArray[np.float64]


def spread(values: Iterable[float], digits: int = 4) -> list[float]:
    """Mean, least and greatest."""
    found = list(values)
    return [round(x, digits) for x in (float(np.mean(found)), min(found), max(found))]


def arrivals(rate: float, number: int, rng: np.random.Generator) -> _Floats:
    """`number` Poisson arrivals, s."""
    return np.cumsum(rng.exponential(1.0 / rate, number))


def binned(edges: Sequence[float], sizes: _Floats) -> NDArray[np.int64]:
    """The bin of each size."""
    return np.searchsorted(edges, sizes, side="right").astype(np.int64)


def batcher(spec: str, sizes: _Floats, instants: _Floats) -> float:
    """Throughput of the server's own queue under a policy, 1/s."""
    profile = longest_request_profile(sizes, LARGE if "=128" in spec else SMALL)
    run = Simulation(profile, spec, sizes=RequestSizes(sizes)).run(instants)
    return len(run.responses) / run.elapsed


def uniform() -> dict[str, Any]:
    """Uniform sizes: throughput under overload, and throughput and response time by arrival rate (figures 3 and 4)."""
    overloaded = {}
    for bins in BINS:
        runs = [_uniform_run(bins, 20.0, seed) for seed in range(SEEDS)]
        expected = UNIFORM.throughput(bins, LARGE)
        rng = np.random.default_rng([bins, 99])
        own = batcher(
            f"multi-bin:{bins},batch_size={LARGE},max_wait_ms=inf",
            rng.uniform(UNIFORM.low, UNIFORM.high, REQUESTS),
            arrivals(OVERLOAD * expected, REQUESTS, rng),
        )
        overloaded[str(bins)] = {
            "equation_4": round(expected, 4),
            "simulated": spread(run.throughput for run in runs),
            "batcher": round(own, 4),
        }
        print(bins, overloaded[str(bins)], flush=True)
    by_rate = {
        str(bins): [
            _by_rate([_uniform_run(bins, rate, seed) for seed in range(SEEDS)], rate, bins, LARGE) for rate in RATES
        ]
        for bins in BINS
    }
    return {
        "limit": round(UNIFORM.capacity(LARGE), 4),
        "requests": REQUESTS,
        "seeds": SEEDS,
        "overloaded": overloaded,
        "by_rate": by_rate,
    }


def _uniform_run(bins: int, rate: float, seed: int) -> CentralRun:
    rng = np.random.default_rng([seed, bins])
    sizes = rng.uniform(UNIFORM.low, UNIFORM.high, REQUESTS)
    return serve(arrivals(rate, REQUESTS, rng), sizes, binned(UNIFORM.edges(bins), sizes), LARGE)


def _by_rate(runs: Sequence[CentralRun], rate: float, bins: int, batch_size: int) -> dict[str, Any]:
    return {
        "rate": rate,
        "throughput": spread(run.throughput for run in runs),
        "mean_s": spread(float(run.responses.mean()) for run in runs),
        "equation_7_s": round(UNIFORM.response_time(bins, batch_size, rate), 4),
    }


def exponential() -> dict[str, Any]:
    """Exponential sizes (appendix A.4): throughput by the bound, by its edges, by the best edges, and simulated."""
    cells = {}
    for bins in BINS:
        edges = EXPONENTIAL.edges(bins, EXPONENTIAL_BATCH)
        seen = np.random.default_rng(bins).exponential(EXPONENTIAL.mean, EXPONENTIAL_REQUESTS)
        best = optimised_edges(seen, bins, EXPONENTIAL_BATCH)
        cells[str(bins)] = {
            "edges": [round(edge, 3) for edge in edges],
            "bound": round(EXPONENTIAL.throughput_bound(bins, EXPONENTIAL_BATCH), 4),
            "exact": round(EXPONENTIAL_BATCH / EXPONENTIAL.batch_time(edges, EXPONENTIAL_BATCH), 4),
            "optimised": round(EXPONENTIAL_BATCH / EXPONENTIAL.batch_time(best, EXPONENTIAL_BATCH), 4),
            "simulated": spread(_exponential_run(edges, seed).throughput for seed in range(SEEDS)),
        }
        print(bins, cells[str(bins)], flush=True)
    return {"mean_s": EXPONENTIAL.mean, "batch_size": EXPONENTIAL_BATCH, "seeds": SEEDS, "cells": cells}


def _exponential_run(edges: Sequence[float], seed: int, rate: float = 40.0) -> CentralRun:
    rng = np.random.default_rng([seed, len(edges), 1])
    sizes = rng.exponential(EXPONENTIAL.mean, EXPONENTIAL_REQUESTS)
    return serve(arrivals(rate, len(sizes), rng), sizes, binned(edges, sizes), EXPONENTIAL_BATCH)


def exponential_by_rate() -> dict[str, Any]:
    """Exponential sizes: throughput and mean response time by arrival rate (figure 9)."""
    by_rate: dict[str, list[dict[str, Any]]] = {}
    for bins in EXPONENTIAL_BINS:
        edges = EXPONENTIAL.edges(bins, EXPONENTIAL_BATCH)
        expected = EXPONENTIAL.batch_time(edges, EXPONENTIAL_BATCH)
        cells: list[dict[str, Any]] = []
        for rate in EXPONENTIAL_RATES:
            runs = [_exponential_run(edges, seed, rate) for seed in range(SEEDS)]
            mean = spread(float(run.responses.mean()) for run in runs)
            least = round(least_response_time(expected, bins, EXPONENTIAL_BATCH, rate), 4)
            throughput = spread(run.throughput for run in runs)
            cells.append({"rate": rate, "throughput": throughput, "mean_s": mean, "equation_7_s": least})
        by_rate[str(bins)] = cells
        print(bins, [cell["mean_s"][0] for cell in cells], flush=True)
    return {"requests": EXPONENTIAL_REQUESTS, "seeds": SEEDS, "by_rate": by_rate}


def lengths() -> dict[str, Any]:
    """Recorded lengths (figure 6): gain over one bin, and throughput and response time of eight servers by rate."""
    tokens = _tokens()
    one, base = batch_time(tokens, (), SMALL), _backlog(tokens, np.zeros(len(tokens), dtype=np.int64))
    gains = {}
    for bins in LENGTH_BINS[1:]:
        optimised, equal = optimised_edges(tokens, bins, SMALL), equal_edges(tokens, bins)
        gains[str(bins)] = {
            "theory_equal": round(one / batch_time(tokens, equal, SMALL), 4),
            "theory_optimised": round(one / batch_time(tokens, optimised, SMALL), 4),
            "file_order": round(_backlog(tokens, binned(optimised, tokens)) / base, 4),
            "file_order_equal": round(_backlog(tokens, binned(equal, tokens)) / base, 4),
            "learned": round(_backlog(tokens, _learned(bins, tokens)) / base, 4),
            "shuffled": spread(_shuffled_gain(tokens, optimised, seed) for seed in range(SEEDS)),
            "batcher": round(_own_gain(tokens, bins), 4),
        }
        print(bins, gains[str(bins)], flush=True)
    return {
        "requests": len(tokens),
        "batch_size": SMALL,
        "limit": round(one / float(tokens.mean()), 4),
        "gains": gains,
        "servers": SERVERS,
        "token_s": TOKEN,
        "by_rate": {str(bins): _by_served_rate(tokens, bins) for bins in LENGTH_BINS},
    }


def _tokens() -> _Floats:
    require_trace(TRACE)
    return trace_column(str(TRACE), "GeneratedTokens")


def _backlog(tokens: _Floats, bins: NDArray[np.int64]) -> float:
    """Throughput of a backlog in this order, 1/token."""
    return serve(np.zeros(len(tokens)), tokens, bins, SMALL).throughput


def _learned(bins: int, tokens: _Floats) -> NDArray[np.int64]:
    """Bins by edges that are learned from the earlier requests."""
    chosen = choose(f"multi-bin:{bins},batch_size={SMALL}", longest_request_profile(tokens, SMALL))
    return np.array([chosen.arriving("", size).bin for size in tokens.tolist()])


def _shuffled_gain(tokens: _Floats, edges: Sequence[float], seed: int) -> float:
    order = np.random.default_rng(seed).permutation(tokens)
    return _backlog(order, binned(edges, order)) / _backlog(order, np.zeros(len(order), dtype=np.int64))


def _own_gain(tokens: _Floats, bins: int) -> float:
    """Gain over one bin in the server's own queue, in file order, at arrival rates 10 per cent over the capacity."""

    def throughput(bins: int) -> float:
        rate = OVERLOAD * SMALL / batch_time(tokens, optimised_edges(tokens, bins, SMALL), SMALL)
        return batcher(f"multi-bin:{bins},batch_size={SMALL},max_wait_ms=inf", tokens, np.arange(len(tokens)) / rate)

    return throughput(bins) / throughput(1)


def _by_served_rate(tokens: _Floats, bins: int) -> list[dict[str, Any]]:
    edges = equal_edges(tokens, bins)  # as the paper's figure 6 has them
    cells = []
    for rate in SERVED_RATES:
        runs = []
        for seed in range(SEEDS):
            rng = np.random.default_rng([seed, rate])
            order = rng.permutation(tokens)
            instants = arrivals(rate, len(order), rng)
            runs.append(serve(instants, TOKEN * order, binned(edges, order), SMALL, SERVERS))
        mean = spread(float(run.responses.mean()) for run in runs)
        cells.append({"rate": rate, "throughput": spread(run.throughput for run in runs), "mean_s": mean})
    return cells


def compared() -> dict[str, Any]:
    """Other policies in the server's own queue: mean response time, tokens, by arrival rate, requests a token."""
    tokens = _tokens()
    device = longest_request_profile(tokens, SMALL)
    cells: dict[str, list[list[float]]] = {spec: [] for spec in COMPARED}
    for rate in COMPARED_RATES:
        for spec in COMPARED:
            means = []
            for seed in range(COMPARED_SEEDS):
                rng = np.random.default_rng([seed, 7])
                order = rng.permutation(tokens)[:COMPARED_REQUESTS]
                instants = arrivals(rate, len(order), rng)
                means.append(float(Simulation(device, spec, sizes=RequestSizes(order)).run(instants).responses.mean()))
            cells[spec].append(spread(means, 1))
            print(rate, spec, cells[spec][-1], flush=True)
    return {"rates": COMPARED_RATES, "seeds": COMPARED_SEEDS, "requests": COMPARED_REQUESTS, "mean_tokens": cells}


def errors() -> dict[str, Any]:
    """Wrong predictions (figure 8): throughput by the probability of each neighbouring bin, in both settings."""
    tokens = _tokens()
    settings: dict[str, tuple[int, Callable[[int], Sequence[float]], Callable[[np.random.Generator], _Floats]]] = {
        "uniform": (LARGE, UNIFORM.edges, lambda rng: rng.uniform(UNIFORM.low, UNIFORM.high, REQUESTS)),
        "lengths": (SMALL, lambda bins: optimised_edges(tokens, bins, SMALL), lambda rng: rng.permutation(tokens)),
    }
    found: dict[str, Any] = {"seeds": SEEDS, "errors": ERRORS}
    for name, (batch_size, edges, draw) in settings.items():
        found[name] = {"batch_size": batch_size, "cells": {}}
        for bins in (1, *ERROR_BINS):
            cells = [
                spread((_mistaken_run((bins, error, seed), edges(bins), draw, batch_size) for seed in range(SEEDS)), 6)
                for error in (ERRORS if bins > 1 else (0.0,))
            ]
            found[name]["cells"][str(bins)] = cells
            print(name, bins, [mean for mean, _, _ in cells], flush=True)
    return found


def _mistaken_run(
    key: tuple[int, float, int],
    edges: Sequence[float],
    draw: Callable[[np.random.Generator], _Floats],
    batch_size: int,
) -> float:
    """Throughput of a backlog, 1/s (1/token for lengths), with section 6.2's errors; `key`: K, p_e, seed."""
    bins, error, seed = key
    rng = np.random.default_rng([seed, bins, round(1000 * error)])
    sizes = draw(rng)
    draws, true = rng.random(len(sizes)), binned(edges, sizes)
    predicted = true + np.where(draws < error, -1, np.where(draws >= 1.0 - error, 1, 0))
    predicted = np.where((predicted < 0) | (predicted >= bins), true, predicted)
    return serve(np.zeros(len(sizes)), sizes, predicted, batch_size).throughput


def main() -> None:
    """Simulate the chosen parts, record and draw."""
    parts = (uniform, exponential, exponential_by_rate, lengths, compared, errors)
    multi_bin_figures.draw(measure_parts("multi_bin", __doc__, {part.__name__: part for part in parts}))


if __name__ == "__main__":
    main()
