"""Beyond the papers: bins, models and decode steps decided together with the SMDP, from the records of the simulations.

`python -m benchmarks.paper.together` writes this section of docs/paper.md alone.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from benchmarks import bins_live, co_located, joining_energy, smdp_bins
from benchmarks.paper.setting import Section, replace_section, save_named, table
from benchmarks.support.harness import argument_parser, finish_axes, load_record, new_figure
from policies.charts.averages import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RULES = {
    "greedy, longest": "longest queue first, greedy",
    "own, longest": "longest queue first, own tables",
    "slowed": "longest queue first, slowed tables",
    "valued": "by values of slowed devices",
}
_TEXT = """\
The papers treat bins, models that share a device, and continuous batching apart from the SMDP. The table has the lowest
and the highest change over all settings, in per cent; each setting is in [benchmarks](benchmarks.md), the simulated
ones with intervals.

{table}

**Two bins, one decision** (`smdp-bins:2`, [bins](bins.md#one-decision-for-all-bins)). The state is the number of
waiting requests in each bin, and a batch may mix bins. Policy iteration is exact up to the length at which queues are
cut. Three bins are not offered: their tables take minutes to solve.

**Models that share a device.** The server launches the batch that was formed first, and each model's table decides as
if the device were its own. To launch the model with the longest queue relative to its largest batch makes greedy faster
in every setting where energy has no weight. With a weight own tables cost less than greedy at loads of 0.3 and 0.6, in
either order. With the longest queue first, tables of devices that are slowed by the other models are as good as greedy
without a weight, and about as good as own tables with one. A launch chosen by the value functions of the slowed devices
costs more at a load of 0.9 in every setting. The server has none of these rules yet.

**Energy in continuous batching** (`joining:B,w2=X`, [texts](texts.md)). The state is the number of active and of
waiting requests, and a table says how many join before a decode step. The device is assumed.

{figure}

Left and middle: w2 = 0. Right: each setting of the record."""


def decided_together() -> Section:
    """The section, and its figure."""
    bins, models, steps = (load_record(each.NAME) for each in (smdp_bins, co_located, joining_energy))
    gains = {key: _bins_change(found) for key, found in bins.items()}
    unweighted = {key: gain for key, gain in gains.items() if key.endswith(" 0")}
    live = bins_live.changes(load_record(bins_live.NAME)).values()
    served = "first formed: the better of greedy and own tables"
    rows = [
        ("two bins, one decision", "best policy bin by bin, w2 = 0", "time", *_ends(unweighted.values())),
        ("", "the same, w2 > 0", "cost", *_ends(gain for key, gain in gains.items() if key not in unweighted)),
        ("", "live: greedy, two greedy bins", "time", *_ends(live)),
        *(
            (name if measure == "time" else "", compared, measure, *_ends(_models(models, kind, measure == "time")))
            for kind, name in _RULES.items()
            for measure, compared in (("time", f"{served}, w2 = 0"), ("cost", "the same, w2 > 0"))
        ),
        *(
            ("`joining` with w2" if part == "energy" else "", "`joining`", part, *_ends(_steps(steps, part)))
            for part in ("energy", "time", "cost")
        ),
    ]
    text = _TEXT.format(
        table=table(("decision", "compared with", "change of the", "lowest, %", "highest, %"), rows),
        figure=save_named(_figure(unweighted, models, steps), "decided-together", "Change of cost"),
    )
    return Section("Beyond the papers: bins, models and decode steps decided together", text)


def _models(record: dict[str, Any], kind: str, unweighted: bool) -> list[float]:
    """Changes by a rule for models that share a device, in the settings without or with a weight of power."""
    return [found["to_best"][kind][0] for key, found in record.items() if key.endswith("; 0") == unweighted]


def _steps(record: dict[str, Any], part: str) -> list[float]:
    return [100 * found[f"{part}_change"][0] for found in record.values()]


def _ends(values: Iterable[float]) -> tuple[str, str]:
    found = list(values)
    return f"{min(found):+.1f}", f"{max(found):+.1f}"


def _bins_change(found: dict[str, Any]) -> float:
    """Change of the cost by deciding about bins together, per cent of that of the best existing policy."""
    best = found["policies"][found["best_existing"]]["cost"][0]
    return float(100 * found["policies"]["smdp-bins:2"]["to_best_existing"][0] / best)


def _figure(bins: dict[str, float], models: dict[str, Any], steps: dict[str, Any]) -> "Figure":
    figure = new_figure(15, 4.2)
    left, middle, right = figure.subplots(1, 3)
    for color, (sizes, largest) in zip(PALETTE, smdp_bins.SETTINGS, strict=False):
        gains = [bins[f"{sizes} {largest} {load:g} 0"] for load in smdp_bins.LOADS]
        left.plot(smdp_bins.LOADS, gains, "o-", color=color, ms=4, lw=1.4, label=f"{sizes} sizes, B = {largest}")
    left.set(title="two bins, one decision", xlabel="load", ylabel="change of the cost, %")
    for color, name in zip(PALETTE, co_located.SYSTEMS, strict=False):
        changes = [models[f"{name}; {load:g}; 0"]["to_best"]["greedy, longest"][0] for load in co_located.LOADS]
        middle.plot(co_located.LOADS, changes, "o-", color=color, ms=4, lw=1.4, label=name)
    middle.set(title="models that share a device, longest queue first", xlabel="load", ylabel="change of the cost, %")
    for color, w2 in zip(PALETTE, joining_energy.WEIGHTS, strict=False):
        found = [each for key, each in steps.items() if key.endswith(f" {w2:g}")]
        times, joules = ([100 * each[f"{part}_change"][0] for each in found] for part in ("time", "energy"))
        right.plot(times, joules, "o", color=color, ms=4, label=f"w2 = {w2:g} ms/W")
    right.set(title="continuous batching", xlabel="change of the response time, %", ylabel="change of the energy, %")
    for axes in (left, middle, right):
        axes.axhline(0.0, color="0.6", lw=1, ls=":")
        finish_axes(axes, {"fontsize": 8})
    return figure


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    replace_section(decided_together())
