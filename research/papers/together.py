"""Beyond the papers: bins and models decided together with the SMDP, from the records of the simulations.

`python -m research.papers.together` writes this section of research/papers.md alone.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from benchmarks.support.harness import argument_parser, finish_axes, load_record, new_figure
from policies.charts.averages import PALETTE
from research import bins_live, co_located, smdp_bins
from research.papers.setting import Section, replace_section, save_named, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RULES = {"greedy": "by weight, `greedy`", "smdp": "by weight, `smdp`", "valued": "by values of slowed devices"}
_TEXT = """\
The papers treat bins, and models that share a device, apart from the SMDP. The table has the lowest and the highest
change over all settings, in per cent; each setting is in [studies.md](studies.md), the simulated ones with
intervals.

{table}

**Bins, one decision** (`smdp-bins:2` and `smdp-bins:3`, [bins](../docs/policies.md#one-decision-for-all-bins)). The
state is the number of waiting requests in each bin, and a batch may mix bins. Policy iteration is exact up to the
length at which queues are cut and the grid of service times. More than three bins are not offered.

**Models that share a device** ([several models](../docs/operation.md#several-models-on-a-device)). The model with the
largest product of queue, service rate and waiting time is launched instead of the batch that was formed first. Tables
of `smdp` are those of a device that the other models slow down, instead of a device of the model's own. A launch
chosen by the value functions of the slowed devices costs more at a load of 0.9 in every setting; the server does not
have it.

{figure}

Changes of the response time without a weight of power, w2 = 0."""


def decided_together() -> Section:
    """The section, and its figure."""
    bins, models = (load_record(each.NAME) for each in (smdp_bins, co_located))
    live = load_record(bins_live.NAME)
    formed = {"to_first_formed": "`greedy`, first formed", "to_best": "the better of `greedy` and `smdp`, first formed"}
    rules = (("greedy", "to_first_formed"), ("smdp", "to_best"), ("valued", "to_best"))
    rows = [
        *(
            (f"{number} bins, one decision" if measure == "time" else "", compared, measure, *_ends(values))
            for spec, number in (("smdp-bins:2", "two"), ("smdp-bins:3", "three"))
            for measure, compared in (("time", "best policy bin by bin, w2 = 0"), ("cost", "the same, w2 > 0"))
            if (values := _bins(bins, spec, measure))
        ),
        *(
            (f"{number} bins, live", "greedy, two greedy bins", "time", *_ends(bins_live.changes(live, spec).values()))
            for spec, number in (("smdp-bins:2", "two"), ("smdp-bins:3", "three"))
        ),
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
    ]
    save_named(_figure_of_bins(bins), "smdp-bins", "Change of the mean response time by load")
    save_named(_figure_of_models(models), "several-models", "Change of cost by load")
    text = _TEXT.format(
        table=table(("decision", "compared with", "change of the", "lowest, %", "highest, %"), rows),
        figure=save_named(_figure(bins, models), "decided-together", "Change of the response time by load"),
    )
    return Section("Beyond the papers: bins and models decided together", text)


def _models(record: dict[str, Any], change: str, kind: str, measure: str) -> list[float]:
    """Changes by a rule for models that share a device: of the time without a weight of power, of the cost with one."""
    return [found[change][kind][0] for key, found in record.items() if key.endswith("; 0") == (measure == "time")]


def _ends(values: Iterable[float]) -> tuple[str, str]:
    found = list(values)
    return f"{min(found):+.1f}", f"{max(found):+.1f}"


def _bins(record: dict[str, Any], spec: str, measure: str) -> list[float]:
    """Changes by deciding about bins together: of the time without a weight of power, of the cost with one."""
    keys = [key for key, found in record.items() if spec in found["policies"]]
    return [_bins_change(record[key], spec)[0] for key in keys if key.endswith(" 0") == (measure == "time")]


def _bins_change(found: dict[str, Any], spec: str) -> tuple[float, float]:
    """Change of the cost and half the width of its interval, per cent of the cost of the best policy bin by bin."""
    best = found["policies"][found["best_existing"]]["cost"][0]
    mean, half = found["policies"][spec]["to_best_existing"]
    return 100 * mean / best, 100 * half / best


def _draw_models(axes: Any, record: dict[str, Any], w2: float) -> None:
    for color, name in zip(PALETTE, co_located.SYSTEMS, strict=False):
        found = [record[f"{name}; {load:g}; {w2:g}"]["to_best"]["smdp"] for load in co_located.LOADS]
        means, halves = zip(*found, strict=True)
        axes.errorbar(co_located.LOADS, means, halves, fmt="o-", color=color, ms=4, lw=1.4, capsize=3, label=name)


def _figure_of_models(record: dict[str, Any]) -> "Figure":
    figure = new_figure(15, 4.2)
    for axes, w2 in zip(figure.subplots(1, len(co_located.WEIGHTS)), co_located.WEIGHTS, strict=True):
        _draw_models(axes, record, w2)
        axes.set(title=f"smdp, w2 = {w2:g} ms/W", xlabel="load", ylabel="change of the cost, %")
        _finish(axes)
    return figure


def _draw_bins(axes: Any, record: dict[str, Any], spec: str) -> None:
    for color, (sizes, largest) in zip(PALETTE, smdp_bins.SETTINGS, strict=False):
        cells = [record[f"{sizes} {largest} {load:g} 0"] for load in smdp_bins.LOADS]
        if spec not in cells[0]["policies"]:
            continue
        means, halves = zip(*(_bins_change(found, spec) for found in cells), strict=True)
        label = f"{sizes} sizes, B = {largest}"
        axes.errorbar(smdp_bins.LOADS, means, halves, fmt="o-", color=color, ms=4, lw=1.4, capsize=3, label=label)
    axes.set(title=spec, xlabel="load", ylabel="change of the response time, %")


def _figure_of_bins(record: dict[str, Any]) -> "Figure":
    figure = new_figure(11, 4.2)
    for axes, spec in zip(figure.subplots(1, 2, sharey=True), smdp_bins.TOGETHER, strict=True):
        _draw_bins(axes, record, spec)
        _finish(axes)
    return figure


def _figure(bins: dict[str, Any], models: dict[str, Any]) -> "Figure":
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    _draw_bins(left, bins, "smdp-bins:2")
    _draw_models(right, models, 0.0)
    right.set(title="models that share a device, smdp", xlabel="load", ylabel="change of the response time, %")
    for axes in (left, right):
        _finish(axes)
    return figure


def _finish(axes: Any) -> None:
    axes.axhline(0.0, color="0.6", lw=1, ls=":")
    finish_axes(axes, {"fontsize": 8})


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    replace_section(decided_together())
