"""Policies that keep a percentile: greedy, the best count and time-out, tables of batch sizes, tables of maximum ages.

For each profile, load, bound and share, the power that each policy takes within the bound, and the lower bound of the
solver. Count and time-out are those of the least power by simulation over a grid: launch when Q requests wait, or when
the oldest has waited tau. All four are then simulated with arrivals that none of them was chosen by; powers are the
energy of a request times the arrival rate. "Reference" are the eight rows that the method was developed on. The record
is written after each cell, and cells in it are not measured again; delete it to start over.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from benchmarks.support.harness import argument_parser, fill_record, markdown_table, save_table
from policies.objectives.bounds import parse_bounds, solve_within
from policies.objectives.frontier import UnreachableError
from policies.objectives.trial import Trial
from policies.percentile.ages import AgeSolution
from policies.profile import Profile, load_profile
from policies.queue.simulator import Run, share_within
from policies.queue.table_simulator import ServiceModel, simulate_ages, simulate_table
from policies.solver.model import Problem
from policies.traits import control_limit_table
from policies.types import MaxAges


class Cell(NamedTuple):
    """A profile by its name, a load, a bound in ms, and a share."""

    profile: str
    load: float
    bound_ms: float
    share: float

    @property
    def key(self) -> str:
        """Key of the record."""
        return f"{self.profile} {self.load:g} {self.bound_ms:g} {self.share:g}"


PROFILES = ("googlenet-tesla-p4", "resnet50-v100-mixed", "googlenet-h200-prior")
LARGEST = 32  # B_max
REFERENCE = tuple(
    Cell(PROFILES[0], *rest)
    for rest in (
        *((0.1, 10, 0.95), (0.3, 6, 0.95), (0.3, 10, 0.95), (0.3, 10, 0.999)),
        *((0.5, 10, 0.95), (0.7, 10, 0.95), (0.7, 14, 0.99), (0.9, 18, 0.95)),
    )
)
LOADS, SHARES = (0.1, 0.3, 0.5, 0.7, 0.9), (0.95, 0.99, 0.999)
WIDTH = 1.3  # bound of the table, in service times of the largest batch
DRAWN_LOAD, DRAWN_SHARE, DRAWN_WIDTHS = 0.5, 0.95, (0.6, 0.8, 1.0, 1.3, 1.8, 2.5, 4.0)
_TABLE_REQUESTS = 50_000  # for each candidate of the table of batch sizes
_GRID_REQUESTS = 20_000  # for each count and time-out
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_TIMEOUTS = 12


@cache
def profile_of(name: str) -> Profile:
    """Return a profile with batches of at most `LARGEST`."""
    return load_profile(name).truncated(LARGEST)


def bound_of(name: str, width: float) -> float:
    """Return the bound in ms that is this many service times of the largest batch, with three digits."""
    return float(f"{1e3 * width * profile_of(name).service_times[-1]:.3g}")


def table_cells() -> Iterator[Cell]:
    """The cells of the large table."""
    for share, name, load in product(SHARES, PROFILES, LOADS):
        yield Cell(name, load, bound_of(name, WIDTH), share)


def drawn_cells(name: str) -> list[Cell]:
    """The cells of the figure for a profile."""
    return [Cell(name, DRAWN_LOAD, bound_of(name, width), DRAWN_SHARE) for width in DRAWN_WIDTHS]


def measure(cell: Cell, requests: int) -> dict[str, Any]:
    """Solve and simulate the four policies in one cell."""
    name, load, bound_ms, share = cell
    profile = profile_of(name)
    problem = Problem(profile, load * profile.capacity)
    trial = Trial(problem, requests, seed=7)
    limit, rows = bound_ms / 1e3, dict[str, Any]()

    def simulated(ages: MaxAges) -> Run:
        return simulate_ages(ages, ServiceModel(trial.service_time(), LARGEST, profile.energies), trial.instants)

    rows["greedy"] = _figures(_greedy(trial), problem, limit)
    for form in ("batch-size", "max-ages"):
        bound = parse_bounds([("slo_share", f"{bound_ms}:{share}")], form, _TABLE_REQUESTS)
        began = perf_counter()
        try:
            solution = solve_within(problem, bound)
        except UnreachableError:
            rows[form] = None
            continue
        rows[form] = _figures(trial.run(solution), problem, limit) | {"solve_s": round(perf_counter() - began, 3)}
        rows[form]["model_w"] = solution.mean_power
        if isinstance(solution, AgeSolution):
            rows["lower_bound_w"], rows["share_model"] = solution.power_lower_bound, solution.share_within[0]
    best = _best_timeout(problem, limit, share)
    rows["count and time-out"] = None if best is None else _figures(simulated(best[2]), problem, limit)
    if best is not None:
        rows["count and time-out"] |= {"count": best[0], "timeout_ms": 1e3 * best[1]}
    energies = profile.energies or (0.0,)
    rows["floor_w"] = min(energy / b for b, energy in enumerate(energies, 1)) * problem.arrival_rate
    return rows


def _greedy(trial: Trial) -> Run:
    profile = trial.problem.profile
    device = ServiceModel(trial.service_time(), LARGEST, profile.energies)
    return simulate_table(control_limit_table(1, LARGEST), device, trial.instants)


def _best_timeout(problem: Problem, limit: float, share: float) -> tuple[int, float, MaxAges] | None:
    """Return count, time-out (s) and table of the least power within the bound, by simulation over a grid."""
    profile, trial = problem.profile, Trial(problem, _GRID_REQUESTS, seed=1)
    found: tuple[float, int, float, MaxAges] | None = None
    for count in _COUNTS:
        for timeout in np.linspace(0.0, 1.5 * limit, _TIMEOUTS).tolist() if count > 1 else [0.0]:
            ages = MaxAges((0.0, *(timeout,) * (count - 1), 0.0))
            run = simulate_ages(ages, ServiceModel(trial.service_time(), LARGEST, profile.energies), trial.instants)
            power = _power(run, problem)
            if np.mean(run.responses <= limit) >= share and (found is None or power < found[0]):
                found = power, count, timeout, ages
    return None if found is None else found[1:]


def _power(run: Run, problem: Problem) -> float:
    assert run.energies is not None
    return float(run.energies.sum()) / run.scheduled * problem.arrival_rate


def _figures(run: Run, problem: Problem, limit: float) -> dict[str, float]:
    within = share_within(run.responses, limit)
    return {"w": _power(run, problem), "share": within.value, "standard_error": within.standard_error}


def table(record: Mapping[str, Any]) -> str:
    """The record as Markdown; a policy that misses the share by more than 3 per cent of what may be late is marked."""
    head = (
        "profile",
        "load",
        "bound",
        *("greedy", "count and time-out", "table of batch sizes", "table of maximum ages"),
    )
    rows = []
    for name, cell in record.items():
        profile, load, bound, share = name.split()
        shown = [_cell(cell[each], float(share)) for each in ("greedy", "count and time-out", "batch-size", "max-ages")]
        ages = cell["max-ages"]
        within = "" if ages is None else f"{ages['share']:.5f} ± {ages['standard_error']:.5f}"
        lowest = "" if ages is None else f"{cell['lower_bound_w']:.3f}"
        asked = f"{100 * float(share):g}% within {bound} ms"
        rows.append((profile, load, asked, *shown, within, lowest, f"{cell['floor_w']:.3f}"))
    return markdown_table((*head, "its share", "lower bound", "full batches"), rows) + "\n"


def _cell(figures: Mapping[str, float] | None, share: float) -> str:
    if figures is None:
        return "not kept"
    late, allowed = 1.0 - figures["share"], 1.0 - share
    missed = late > 1.03 * allowed + 2.0 * figures["standard_error"]
    return f"{figures['w']:.3f}" + (f" (share {figures['share']:.4f})" if missed else "")


def main() -> None:
    """Measure what the record lacks, print and record."""
    parser = argument_parser(__doc__)
    parser.add_argument("--simulate", type=int, default=500_000, help="requests for each policy")
    parser.add_argument("--reference", action="store_true", help="only the eight reference rows")
    options = parser.parse_args()
    drawn = (cell for name in PROFILES for cell in drawn_cells(name))
    chosen = REFERENCE if options.reference else (*REFERENCE, *drawn, *table_cells())
    work: dict[str, Callable[[], Any]] = {cell.key: partial(measure, cell, options.simulate) for cell in chosen}
    record = fill_record("percentile_policies", work)
    save_table("percentile_policies", "Power of policies that keep a percentile, W", table(record))


if __name__ == "__main__":
    main()
