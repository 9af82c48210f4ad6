"""Multi-bin batching with maximum ages of each bin: the least busy device that keeps a percentile, by simulation.

Requests are of different sizes, and a batch takes as long as its largest one, as in the multi-bin paper. The device's
power is 1 W while it is busy, so that the mean power is the fraction of the time that it is busy. For each number of
bins, load and bound:

- **greedy** launches all requests of a bin, at most B, when the device is free.
- **timeout** launches a bin's requests when there are B, or its oldest has waited tau, that of the least power.
- **maximum ages** gives each bin a table of its own, solved by `solve_ages` for the bin's arrival rate and mean batch
  times as if it were alone. Other bins occupy the device meanwhile, so all are solved for a bound that is smaller by a
  margin, the smallest that keeps the percentile. Tables are not mixed: a mix makes some requests late on purpose, which
  a margin does not change, and so leaves none of the allowed share for other bins.

The batch that was formed first is launched first. Margin and tau are chosen on arrivals and sizes that the results are
not simulated with. Loads are fractions of what one bin can serve. The record is written after each cell, and cells in
it are not measured again; delete it to start over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.harness import argument_parser, fill_record, markdown_table
from policies.percentile.ages import ResponseBounds, actions_of_ages, solve_ages
from policies.profile import Profile
from policies.queue import simulator
from policies.queue.batcher import Batcher
from policies.queue.lookup import ActionRow, lookup
from policies.queue.monitor import NoMonitor
from policies.rules.per_kind import PerKind
from policies.sizing.bins import optimised_edges
from policies.solver.model import Problem
from policies.types import Action, BatchKey, Launch, MaxAges, Policy, Request, State

BINS, LOADS, BOUNDS, SHARE = (1, 2, 3), (0.3, 0.5, 0.7, 0.85), (40.0, 60.0), 0.95  # bounds in s
LARGEST = 8  # B
_SMALLEST_SIZE, _LARGEST_SIZE = 1.0, 20.0  # s, uniform
_TUNED_OVER, _MEASURED_OVER, _RUNS = 25_000, 40_000, 3  # requests, and independent runs of the results
_SETTLING = 2_000  # requests that are not counted
_TAU_STEPS, _REFINED, _MARGIN_STEPS = 20, 4, 6
_RESERVE = 0.001  # of the share, in tuning, so that chance seldom misses it in the results
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ByBin:
    """Applies a policy of its own to each bin."""

    policies: Sequence[Policy]

    def decide(self, state: State, /) -> Action:
        """Ask the policy of the bin, of which all waiting requests are."""
        return self.policies[state.waiting[0].kind.bin].decide(state)


@dataclass(frozen=True)
class Bin:
    """A bin: its share of the requests, and a profile with the mean batch times, s."""

    share: float
    profile: Profile


def bins_of(edges: Sequence[float]) -> list[Bin]:
    """Return the bins with these edges, s, ascending."""
    sizes = _sizes(200_000, np.random.default_rng(0))
    of = np.searchsorted(edges, sizes, side="right")
    return [Bin(float(np.mean(of == i)), _profile(sizes[of == i])) for i in range(len(edges) + 1)]


def ages_of(bins: Sequence[Bin], arrival_rate: float, bound: float) -> list[MaxAges]:
    """Solve the maximum ages of each bin for a bound, s, as if it were alone; `arrival_rate` is of all bins."""
    found = [
        solve_ages(Problem(each.profile, each.share * arrival_rate), ResponseBounds(((bound, SHARE),)), mixed=False)[0]
        for each in bins
    ]
    return [solution.max_ages for solution in found]


def simulate(
    edges: Sequence[float], ages: Sequence[MaxAges], arrival_rate: float, requests: int, seed: int
) -> tuple[dict[float, float], float]:
    """Simulate maximum ages of each bin; return the share within each bound and the mean power."""
    rng = np.random.default_rng(seed)
    instants, sizes = np.cumsum(rng.exponential(1.0 / arrival_rate, requests)), _sizes(requests, rng)
    of = np.searchsorted(edges, sizes, side="right")
    waiting = [
        Request(i, at, BatchKey("m", bin_), size=size, payload=size)
        for i, (at, size, bin_) in enumerate(zip(instants.tolist(), sizes.tolist(), of.tolist(), strict=True))
    ]
    rows = [ActionRow(1.0, actions_of_ages(each, LARGEST), None, each) for each in ages]
    policy = PerKind({"m": ByBin([lookup([row], LARGEST) for row in rows])})

    def service_time(launch: Launch) -> float:
        return max(request.size for request in launch.requests)

    run = simulator.run(
        Batcher(policy, {"m": LARGEST}, NoMonitor()), waiting, service_time, lambda s: s.finish - s.start
    )
    responses = run.responses[_SETTLING:]
    assert run.mean_power is not None
    return {bound: float(np.mean(responses <= bound)) for bound in BOUNDS}, run.mean_power


def measure(bins: int, load: float, bound: float) -> dict[str, Any]:
    """Tune the policies for a number of bins, a load and a bound, s, and simulate them."""
    sizes = _sizes(20_000, np.random.default_rng(1)).tolist()
    edges = optimised_edges(sizes, bins, LARGEST)
    parts = bins_of(edges)
    rate = load * LARGEST / _profile(np.asarray(sizes)).service_times[-1]

    def tuned(ages: list[MaxAges]) -> tuple[bool, float]:
        shares, power = simulate(edges, ages, rate, _TUNED_OVER, seed=2)
        return shares[bound] >= SHARE + _RESERVE, power

    policies = {
        "greedy": [_timeout(0.0)] * bins,
        "timeout": _best_timeout(lambda tau: tuned([_timeout(tau)] * bins), bound, bins),
        "maximum ages": _least_margin(lambda margin: ages_of(parts, rate, bound - margin), tuned, bound),
    }
    found: dict[str, Any] = {}
    for name, ages in policies.items():
        if ages is None:
            continue
        runs = [simulate(edges, ages, rate, _MEASURED_OVER, seed) for seed in range(10, 10 + _RUNS)]
        powers = [power for _, power in runs]
        found[name] = {
            "share": round(float(np.mean([shares[bound] for shares, _ in runs])), 4),
            "power_w": round(float(np.mean(powers)), 4),
            "error_w": round(float(np.std(powers, ddof=1)) / _RUNS**0.5, 4),
        }
    return found


def _best_timeout(tuned: Callable[[float], tuple[bool, float]], bound: float, bins: int) -> list[MaxAges] | None:
    """The timeout of least power on a grid, refined by halves of a step; None if none keeps the percentile."""
    step = bound / _TAU_STEPS
    kept = [(power, tau) for tau in np.arange(0.0, bound, step).tolist() for keeps, power in [tuned(tau)] if keeps]
    if not kept:
        return None
    best = min(kept)
    for _ in range(_REFINED):
        step /= 2
        near = [tau for tau in (best[1] - step, best[1] + step) if tau >= 0.0]
        best = min([best, *((power, tau) for tau in near for keeps, power in [tuned(tau)] if keeps)])
    return [_timeout(best[1])] * bins


def _least_margin(
    ages: Callable[[float], list[MaxAges]], tuned: Callable[[list[MaxAges]], tuple[bool, float]], bound: float
) -> list[MaxAges] | None:
    """Bisect the margin, s; None if the largest one, 0.6 of the bound, does not keep the percentile."""
    low, high, kept = 0.0, 0.6 * bound, None
    for margin in (low, high):
        if tuned(found := ages(margin))[0]:
            kept = found
            break
    if kept is None or margin == low:
        return kept
    for _ in range(_MARGIN_STEPS):
        middle = (low + high) / 2
        if tuned(found := ages(middle))[0]:
            kept, high = found, middle
        else:
            low = middle
    return kept


def _timeout(tau: float) -> MaxAges:
    return MaxAges((0.0, *(tau,) * (LARGEST - 1), 0.0))


def _sizes(number: int, rng: np.random.Generator) -> _Floats:
    return rng.uniform(_SMALLEST_SIZE, _LARGEST_SIZE, number)


def _profile(sizes: _Floats) -> Profile:
    """The mean of the largest of b sizes, as time, s, and as energy, J."""
    times = [float(sizes[: len(sizes) // b * b].reshape(-1, b).max(axis=1).mean()) for b in range(1, LARGEST + 1)]
    ascending = tuple(np.maximum.accumulate(times).tolist())
    return Profile("bin", ascending, energies=ascending)


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = []
    for key, found in record.items():
        columns = [f"{p['power_w']:.3f} ± {p['error_w']:.3f} ({p['share']:.3f})" for p in found.values()]
        named = dict(zip(found, columns, strict=True))
        rows.append((*key.split(), *(named.get(name, "not kept") for name in ("greedy", "timeout", "maximum ages"))))
    head = ("load", "bound, s", "bins", "greedy, W (share)", "timeout, W (share)", "maximum ages, W (share)")
    return markdown_table(head, rows)


def main() -> None:
    """Measure the cells that the record lacks and print them."""
    argument_parser(__doc__).parse_args()
    cells: dict[str, Callable[[], Any]] = {
        f"{load:g} {bound:g} {bins}": partial(measure, bins, load, bound)
        for load, bound, bins in product(LOADS, BOUNDS, BINS)
    }
    print(table(fill_record("bin_ages", cells)))


if __name__ == "__main__":
    main()
