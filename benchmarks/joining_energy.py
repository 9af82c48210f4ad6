"""Continuous batching with a weight of power against joining at once, simulated with intervals.

The device is an assumed one: a decode step takes 20 ms + 0.4 ms a request, a prefill 10 ms + 4 ms a request that joins,
and it draws 180 W + 6 W a request while it works, above its idle power. Lengths are geometric, as the model has them,
or Azure's recorded numbers of generated tokens, which are not. Loads are fractions of what full batches can serve. Both
policies see the same arrivals and lengths; intervals are of the differences by run. The settings below were fixed
before the first run.

The record is written after each cell, and cells in it are not measured again; delete it to start over.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.smdp_bins import RUNS, interval
from benchmarks.support.harness import TRACE, argument_parser, fill_record, markdown_table, require_trace
from loadgen.simulated import SimulatedDeviceOfLengths
from policies.catalog import Chosen, choose, combine
from policies.profile import Profile
from policies.queue import simulator
from policies.queue.arrivals import trace_column
from policies.queue.batcher import Batcher
from policies.rules.continuous_batching import decode_problem
from policies.types import Request

NAME = "joining_energy"
REQUESTS, SETTLING = 6_000, 300
LARGEST, MEAN_LENGTH = 16, 60
LOADS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
WEIGHTS = (5.0, 20.0)  # w2, ms/W
LENGTHS = ("geometric", "trace")
_Floats = NDArray[np.float64]


def device() -> Profile:
    """The assumed device."""
    sizes = range(1, LARGEST + 1)
    step, prefill = [0.020 + 0.0004 * b for b in sizes], [0.010 + 0.004 * b for b in sizes]
    rows = tuple((p + s, p + 200 * s) for p, s in zip(prefill, step, strict=True))
    times = tuple(p + MEAN_LENGTH * s for p, s in zip(prefill, step, strict=True))
    energies = tuple((180.0 + 6.0 * b) * t for b, t in zip(sizes, times, strict=True))
    return Profile("assumed", times, energies=energies, lengths=(1, 200), length_service_times=rows)


def lengths_of(name: str, number: int, seed: int) -> _Floats:
    """Numbers of generated tokens."""
    rng = np.random.default_rng([seed, 7])
    if name == "geometric":
        return rng.geometric(1.0 / MEAN_LENGTH, number).astype(float)
    recorded = trace_column(str(TRACE), "GeneratedTokens")
    scaled = rng.choice(recorded, number) * MEAN_LENGTH / np.mean(recorded)
    return np.asarray(np.maximum(1.0, np.round(scaled)))


def simulate(chosen: Chosen, rate: float, lengths: str, seed: int) -> tuple[float, float]:
    """Mean response time, ms, and energy of a request, J, of one run."""
    drawn = lengths_of(lengths, REQUESTS, seed)
    instants = np.cumsum(np.random.default_rng([seed, 8]).exponential(1.0 / rate, REQUESTS))
    profile = chosen.profile
    requests = []
    for i, (at, length) in enumerate(zip(instants.tolist(), drawn.tolist(), strict=True)):
        alone = profile.service_time(1, length)
        requests.append(Request(i, at, chosen.kind("m", alone), size=alone, stages=int(length), payload=length))
    policy, monitor = combine({"m": chosen})
    batcher = Batcher(policy, {"m": LARGEST}, deepcopy(monitor), ("m",))
    model = SimulatedDeviceOfLengths(profile)
    run = simulator.run(batcher, requests, model.service_time, model.energy)
    return 1e3 * float(np.mean(run.responses[SETTLING:])), (run.mean_power or 0.0) * run.elapsed / REQUESTS


def measure(lengths: str, load: float, w2: float) -> dict[str, Any]:
    """Both policies in one setting."""
    profile = device()
    sizes = [profile.service_time(1, length) for length in lengths_of(lengths, 5_000, 1000).tolist()]
    rate = load * decode_problem(sizes, profile, 0.0).capacity
    plain = choose(f"joining:{LARGEST}", profile, max_wait=inf)
    solved = choose(f"joining:{LARGEST},w2={w2:g}", profile, max_wait=inf).with_sizes(sizes)
    runs = {
        name: np.array([simulate(each, rate, lengths, seed) for seed in range(RUNS)])
        for name, each in (("joining", plain), ("with w2", solved))
    }
    costs = {name: found[:, 0] + w2 * rate * found[:, 1] for name, found in runs.items()}
    return {
        "rate": rate,
        "joining": runs["joining"].mean(axis=0).tolist(),
        "with_w2": runs["with w2"].mean(axis=0).tolist(),
        "energy_change": interval(runs["with w2"][:, 1] / runs["joining"][:, 1] - 1.0),
        "time_change": interval(runs["with w2"][:, 0] / runs["joining"][:, 0] - 1.0),
        "cost_change": interval(costs["with w2"] / costs["joining"] - 1.0),
    }


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = []
    for key, found in record.items():
        changes = [f"{100 * mean:+.1f}% ± {100 * half:.1f}" for mean, half in _changes(found)]
        rows.append((*key.split(), f"{found['joining'][0]:.0f}", f"{found['joining'][1]:.1f}", *changes))
    head = ("lengths", "load", "w2, ms/W", "ms", "J a request", "energy with w2", "time with w2", "cost with w2")
    return markdown_table(head, rows)


def _changes(found: dict[str, Any]) -> list[list[float]]:
    return [found["energy_change"], found["time_change"], found["cost_change"]]


def main() -> None:
    """Measure the cells that the record lacks and print them."""
    argument_parser(__doc__).parse_args()
    require_trace(TRACE)
    cells: dict[str, Callable[[], Any]] = {
        f"{lengths} {load:g} {w2:g}": partial(measure, lengths, load, w2)
        for lengths, w2, load in product(LENGTHS, WEIGHTS, LOADS)
    }
    print(table(fill_record(NAME, cells)))


if __name__ == "__main__":
    main()
