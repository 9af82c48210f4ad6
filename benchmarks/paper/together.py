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

_RULES = {"greedy": "queue x service rate, `greedy`", "smdp": "the same, `smdp`", "valued": "by values, slowed devices"}
_TEXT = """\
The papers treat bins, models that share a device, and continuous batching apart from the SMDP. The table has the lowest
and the highest change over all settings, in per cent; each setting is in [benchmarks](benchmarks.md), the simulated
ones with intervals.

{table}

**Two bins, one decision** (`smdp-bins:2`, [bins](bins.md#one-decision-for-all-bins)). The state is the number of
waiting requests in each bin, and a batch may mix bins. Policy iteration is exact up to the length at which queues are
cut. Three bins are not offered: their tables take minutes to solve.

**Models that share a device** ([several models](several-models.md)). The model with the largest product of queue and
service rate is launched, MaxWeight, instead of the batch that was formed first. Tables of `smdp` are those of a device
that the other models slow down, instead of a device of the model's own. Without a weight of power both `greedy` and
`smdp` gain in every setting. With one, `smdp` gains or loses less than half a per cent. A launch chosen by the value
functions of the slowed devices costs more at a load of 0.9 in every setting; the server does not have it.

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
    formed = {"to_first_formed": "the batch formed first", "to_best": "the better of both, formed first"}
    rules = (("greedy", "to_first_formed"), ("smdp", "to_first_formed"), ("valued", "to_best"))
    rows = [
        ("two bins, one decision", "best policy bin by bin, w2 = 0", "time", *_ends(unweighted.values())),
        ("", "the same, w2 > 0", "cost", *_ends(gain for key, gain in gains.items() if key not in unweighted)),
        ("", "live: greedy, two greedy bins", "time", *_ends(live)),
        *(
            (
                _RULES[kind] if measure == "time" else "",
                compared,
                measure,
                *_ends(_models(models, change, kind, measure)),
            )
            for kind, change in rules
            for measure, compared in (("time", f"{formed[change]}, w2 = 0"), ("cost", "the same, w2 > 0"))
        ),
        *(
            ("`joining` with w2" if part == "energy" else "", "`joining`", part, *_ends(_steps(steps, part)))
            for part in ("energy", "time", "cost")
        ),
    ]
    save_named(_figure_of_models(models), "several-models", "Change of cost by load")
    text = _TEXT.format(
        table=table(("decision", "compared with", "change of the", "lowest, %", "highest, %"), rows),
        figure=save_named(_figure(unweighted, models, steps), "decided-together", "Change of cost"),
    )
    return Section("Beyond the papers: bins, models and decode steps decided together", text)


def _models(record: dict[str, Any], change: str, kind: str, measure: str) -> list[float]:
    """Changes by a rule for models that share a device: of the time without a weight of power, of the cost with one."""
    return [found[change][kind][0] for key, found in record.items() if key.endswith("; 0") == (measure == "time")]


def _steps(record: dict[str, Any], part: str) -> list[float]:
    return [100 * found[f"{part}_change"][0] for found in record.values()]


def _ends(values: Iterable[float]) -> tuple[str, str]:
    found = list(values)
    return f"{min(found):+.1f}", f"{max(found):+.1f}"


def _bins_change(found: dict[str, Any]) -> float:
    """Change of the cost by deciding about bins together, per cent of that of the best existing policy."""
    best = found["policies"][found["best_existing"]]["cost"][0]
    return float(100 * found["policies"]["smdp-bins:2"]["to_best_existing"][0] / best)


def _draw_models(axes: Any, record: dict[str, Any], w2: float) -> None:
    for color, name in zip(PALETTE, co_located.SYSTEMS, strict=False):
        found = [record[f"{name}; {load:g}; {w2:g}"]["to_first_formed"]["smdp"] for load in co_located.LOADS]
        means, halves = zip(*found, strict=True)
        axes.errorbar(co_located.LOADS, means, halves, fmt="o-", color=color, ms=4, lw=1.4, capsize=3, label=name)


def _figure_of_models(record: dict[str, Any]) -> "Figure":
    figure = new_figure(15, 4.2)
    for axes, w2 in zip(figure.subplots(1, len(co_located.WEIGHTS)), co_located.WEIGHTS, strict=True):
        _draw_models(axes, record, w2)
        axes.axhline(0.0, color="0.6", lw=1, ls=":")
        axes.set(title=f"smdp, w2 = {w2:g} ms/W", xlabel="load", ylabel="change of the cost, %")
        finish_axes(axes, {"fontsize": 8})
    return figure


def _figure(bins: dict[str, float], models: dict[str, Any], steps: dict[str, Any]) -> "Figure":
    figure = new_figure(15, 4.2)
    left, middle, right = figure.subplots(1, 3)
    for color, (sizes, largest) in zip(PALETTE, smdp_bins.SETTINGS, strict=False):
        gains = [bins[f"{sizes} {largest} {load:g} 0"] for load in smdp_bins.LOADS]
        left.plot(smdp_bins.LOADS, gains, "o-", color=color, ms=4, lw=1.4, label=f"{sizes} sizes, B = {largest}")
    left.set(title="two bins, one decision", xlabel="load", ylabel="change of the cost, %")
    _draw_models(middle, models, 0.0)
    middle.set(title="models that share a device, smdp", xlabel="load", ylabel="change of the cost, %")
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
