"""Beyond the papers: policies that keep a percentile, from the record of research/percentile_policies.py.

`python -m research.papers.percentiles` writes this section of research/papers.md alone.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.support.harness import argument_parser, finish_axes, load_record, new_figure
from policies.charts.averages import PALETTE
from research.papers.setting import Section, replace_section, save_named, table
from research.percentile_policies import (
    DRAWN_LOAD,
    DRAWN_SHARE,
    LARGEST,
    PROFILES,
    Cell,
    drawn_cells,
    profile_of,
    table_cells,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {
    "greedy": "greedy",
    "count and time-out": "count and time-out, by grid search",
    "batch-size": "table of batch sizes",
    "max-ages": "table of maximum ages",
}
_MISSED = 1.03  # of what may be late


def beyond_the_papers() -> Section:
    """The derivation, the table and the figure."""
    record = load_record("percentile_policies")
    text = f"""{_DERIVATION}

{_results(record)}

{_table(record)}

{save_named(_figure(record), "percentile-power", "Power against the bound")}

Load {DRAWN_LOAD:g}, {DRAWN_SHARE:.0%} within the bound. A policy is drawn where it keeps the bound.
"""
    return Section("Beyond the papers: the least power for a percentile", text)


_DERIVATION = """\
The papers bound no percentile. Their tables decide by the queue length, which says little about how old the oldest
request is. This section is this project's own (policies/percentile/ages.py and age_model.py have the details).

**Policy.** With n requests waiting at an idle device, launch all of them, at most B_max, once the oldest is τ(n) old.
Greedy (τ = 0), control limits (τ = 0 or infinite) and timeouts (τ constant below B_max) are special cases.

**State.** (n, x), where x is the age of the oldest request. The ages of the other n - 1 requests are uniform on (0, x):
they are the Poisson arrivals of that time. For a limit t and a service time G_n, a launch makes late, in the mean,

    late(n, x) = S_n(t - x) + (n - 1)/x ∫ S_n(t - a) da, a from 0 to x,        S_n(z) = P(G_n > z)

**Cost.** A late request has the price μ ≥ 0. A launch costs c(n, x) = ζ(n) + μ late(n, x), and with a bound on the
mean each request has a holding cost per second. With the gain g and the relative values U(b) at the start of a batch of
b that leaves no request waiting, l(b) = E[G_b], and D_b(x) = E[exp(-λ (G_b - x)); G_b > x],

    V(n, x) = min{ c(n, x) + U(n),  -g dx + (1 - λ dx) V(n, x + dx) + λ dx V(n + 1, x + dx) }

    U(b) = -g l(b) + Σ_k ∫ V(k, x) λ Poisson(k - 1; λ x) D_b(x) dx + P(no arrival) (V(1, 0) - g/λ),        U(1) = 0

Policy iteration carries V as coefficients of U(1..B_max), of g and of the costs through one backward sweep in x, solves
one linear system, and takes the minimum in a second sweep. It settles in about four steps. Above B_max waiting the
oldest B_max are launched, and the leftover requests with the age of the oldest are states of their own, which no policy
changes, so they are eliminated once.

**Price.** A linear program mixes the tables found so far to the least power within the bounds, and its dual variables
are the next prices, until both agree. The result is one table, or two mixed with the probability that meets the bound.

**Lower bound.** By weak duality no policy of the class takes less power than

    max over μ of  g(μ) - μ λ (1 - share)

The class: policies that decide by the queue length and the age of the oldest request, launch all requests that wait, at
most B_max, and launch at the latest when the oldest is twice the largest bound old. A policy that decides by more, such
as the ages of all requests, or that launches a part of the queue, may be below it."""


def _results(record: Mapping[str, Any]) -> str:
    """Return the sentences about the numbers."""
    cells = [record[cell.key] for cell in table_cells() if cell.key in record]
    kept = [cell for cell in cells if cell["max-ages"] is not None and cell["lower_bound_w"] < float("inf")]
    gaps = [cell["max-ages"]["model_w"] / cell["lower_bound_w"] - 1.0 for cell in kept]
    savings = [1.0 - cell["max-ages"]["w"] / cell["batch-size"]["w"] for cell in kept if cell["batch-size"]]
    others = [1.0 - c["max-ages"]["w"] / c["count and time-out"]["w"] for c in kept if c["count and time-out"]]
    return f"""\
**Results.** Batches of 1 to {LARGEST}, deterministic service times, three profiles: {", ".join(PROFILES)}. Mean power
in W, simulated with half a million requests with which no policy was chosen. In the model the table of maximum ages
is at most {max(gaps):.2%} above the lower bound. It takes up to {max(savings):.1%} less power than the table of batch
sizes (in the mean {sum(savings) / len(savings):.1%}, at least {min(savings):.1%}), and up to {max(others):.1%}
less than the best count and time-out of a grid. "-" keeps the bound with none of its tables. A * misses the share by
more than 3 per cent of what may be late."""


def _table(record: Mapping[str, Any]) -> str:
    heads = ["profile", "ρ", "bound, ms", "share", "greedy", "count, time-out", "batch sizes", "maximum ages"]
    rows = [
        [cell.profile, f"{cell.load:g}", f"{cell.bound_ms:g}", f"{cell.share:g}", *_powers(cell, record[cell.key])]
        for cell in table_cells()
        if cell.key in record
    ]
    return table([*heads, "lower bound", "full batches"], rows)


def _powers(cell: Cell, found: Mapping[str, Any]) -> Sequence[str]:
    """Return the powers of the policies, the lower bound and the floor."""
    powers = []
    for name in _NAMES:
        figures = found[name]
        powers.append("-" if figures is None else f"{figures['w']:.4g}{'' if _keeps(figures, cell.share) else '*'}")
    lowest = "-" if found["max-ages"] is None else f"{found['lower_bound_w']:.4g}"
    return [*powers, lowest, f"{found['floor_w']:.4g}"]


def _keeps(figures: Mapping[str, float], share: float) -> bool:
    return 1.0 - figures["share"] <= _MISSED * (1.0 - share) + 2.0 * figures["standard_error"]


def _figure(record: Mapping[str, Any]) -> "Figure":
    figure = new_figure(15, 4.6)
    panels = figure.subplots(1, len(PROFILES))
    for axes, name in zip(panels, PROFILES, strict=True):
        cells = [cell for cell in drawn_cells(name) if cell.key in record]
        for color, (policy, label) in zip(PALETTE, _NAMES.items(), strict=False):
            kept = [(cell.bound_ms, record[cell.key][policy]) for cell in cells if record[cell.key][policy] is not None]
            points = [(bound, figures["w"]) for bound, figures in kept if _keeps(figures, DRAWN_SHARE)]
            axes.plot(*zip(*points, strict=True), "o-", color=color, ms=4, lw=1.4, label=label) if points else None
        bounds = [(cell.bound_ms, record[cell.key]) for cell in cells if record[cell.key]["max-ages"] is not None]
        lowest = [(bound, found["lower_bound_w"]) for bound, found in bounds]
        axes.plot(*zip(*lowest, strict=True), "k--", lw=1.2, label="lower bound") if lowest else None
        axes.axhline(record[cells[0].key]["floor_w"], color="0.6", lw=1, ls=":", label="full batches")
        axes.set(title=f"{name}, l({LARGEST}) = {1e3 * profile_of(name).service_times[-1]:.3g} ms", xscale="log")
        axes.set(xlabel="bound, ms", ylabel="mean power, W")
        finish_axes(axes, {"fontsize": 8} if axes is panels[0] else None)
    return figure


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    replace_section(beyond_the_papers())
