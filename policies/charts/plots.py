"""Chart files of policies and profiles. matplotlib is imported lazily, because the import takes a second.

The parts are drawn by averages.py and action_chart.py, on Axes that can be combined in other ways.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from policies.charts.action_chart import ChartRow, chart_rows, legend_handles, policy_chart
from policies.charts.averages import BLUE, VERMILLION, distribution_chart, frontier_chart, tradeoff
from policies.charts.figure_file import save_figure
from policies.profile import Profile, fit_affine, fit_isotonic
from policies.solver.model import Problem
from policies.solver.solver import Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MEASURED, _AFFINE, _ISOTONIC = "#1f4e79", "#d1495b", "#66a182"


def plot_profile(profile: Profile, path: Path) -> None:
    """Plot service time and energy by batch size with both fits; the file suffix determines the format.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix is no format that matplotlib writes.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    energies = _energies(profile)
    panels = 1 + len(energies)
    figure = Figure(figsize=(6.4 * panels, 4.4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    figure.suptitle(" · ".join(filter(None, (profile.name, profile.device, profile.source))))
    _draw(axes[0], profile.service_times, "ms", profile.cvs)
    axes[0].set_ylabel("service time l(b), ms")
    for panel, (label, values) in zip(axes[1:], energies.items(), strict=True):
        _draw(panel, values, "mJ", None)
        panel.set_ylabel(label)
    save_figure(figure, path, dpi=150)


def plot_policy(
    problem: Problem,
    solution: Solution,
    responses: NDArray[np.float64] | None,
    path: Path,
    limit: float | None = None,
) -> None:
    """Plot a policy at one load: its actions, its position relative to the frontier, and its response times.

    Args:
        problem: the system that it was solved or evaluated for.
        solution: the policy.
        responses: simulated response times, s; None omits their distribution.
        path: output file; the suffix determines the format.
        limit: a response time to mark, s.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix is no format that matplotlib writes.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    columns = ("frontier",) if responses is None else ("frontier", "responses")
    figure = Figure(figsize=(10.5, 6.8), layout="constrained")
    axes = figure.subplot_mosaic([[*columns], ["actions"] * len(columns)], height_ratios=(3, 1))
    figure.suptitle(f"{problem.profile.name} · load {solution.load:.3g} · {_weights(solution, problem.profile)}")
    frontier_chart(axes["frontier"], tradeoff(problem), solution)
    axes["frontier"].set_ylabel(_of_resource(problem.profile))
    axes["frontier"].legend(frameon=False)
    if responses is not None:
        distribution_chart(axes["responses"], {"": responses}, limit)
    largest = problem.max_batch_size or problem.profile.max_batch_size
    _draw_actions(figure, axes["actions"], chart_rows([solution]), largest)
    save_figure(figure, path, dpi=150)


def plot_table(solutions: Sequence[Solution], profile: Profile, path: Path, bound: str = "") -> None:
    """Plot policies solved for several loads: actions by queue length and load; mean response time and power by load.

    Args:
        solutions: at least one, ascending in load.
        profile: their profile.
        path: output file; the suffix determines the format.
        bound: the bound that chose the weights, for the title; empty if all weights are equal.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix is no format that matplotlib writes.
    """
    from matplotlib.figure import Figure

    powers = [solution.mean_power for solution in solutions]
    figure = Figure(figsize=(12.5, 6.4), layout="constrained")
    axes = figure.subplot_mosaic([["actions", "time"], ["actions", "power"]], width_ratios=(2.4, 1))
    within = f"within {bound}" if bound else _weights(solutions[0], profile)
    figure.suptitle(f"solved for loads {solutions[0].load:.3g} to {solutions[-1].load:.3g} · {within}")
    _draw_actions(figure, axes["actions"], chart_rows(solutions), max(max(s.batch_size) for s in solutions))
    loads = [solution.load for solution in solutions]
    _by_load(axes["time"], loads, [1e3 * s.mean_response_time for s in solutions], "mean response time, ms")
    _by_load(axes["power"], loads, powers, _of_resource(profile))
    save_figure(figure, path, dpi=150)


def _weights(solution: Solution, profile: Profile) -> str:
    return (
        f"{solution.w1:g} × mean response time in ms + {solution.w2:.4g} × {_of_resource(profile).replace(',', ' in')}"
    )


def _of_resource(profile: Profile) -> str:
    """What the profile saves, with its unit."""
    names = {
        "energy": f"mean power, {profile.rate_unit}",
        "cpu_time": "CPU time, cores",
        "busy_time": "busy time, share",
    }
    return names[profile.saved]


def _draw_actions(figure: "Figure", axes: "Axes", rows: Sequence[ChartRow], max_batch_size: int) -> None:
    """Draw the chart of actions with its legend, and a colour bar if the cells have no numbers."""
    cells = policy_chart(axes, rows, max_batch_size)
    if not axes.texts:
        figure.colorbar(cells, ax=axes, label="action: batch size", pad=0.01)
    figure.legend(handles=legend_handles(), loc="outside lower center", ncols=4, frameon=False)


def _by_load(axes: "Axes", loads: Sequence[float], values: Sequence[float], label: str) -> None:
    color = BLUE if "time" in label else VERMILLION
    axes.plot(loads, values, "o-", ms=3, lw=1.2, color=color)
    axes.set_xlabel("load ρ")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _energies(profile: Profile) -> dict[str, Sequence[float]]:
    """Return the energies charged to a batch and, if they differ, the total energies, by label."""
    label, total = "energy ζ(b), mJ per batch", profile.total_energies
    if profile.energies is None:
        return {}
    if total is None or total == profile.energies:
        return {label: profile.energies}
    return {label.replace("ζ(b)", "ζ(b) above idle"): profile.energies, label.replace("ζ(b)", "in total"): total}


def _draw(axes: "Axes", values: Sequence[float], unit: str, cvs: Sequence[float] | None) -> None:
    """Draw points with one standard deviation, and the two fits; values in SI units, drawn in thousandths."""
    sizes = np.arange(1, len(values) + 1)
    y = 1e3 * np.asarray(values)
    errors = None if cvs is None else y * np.asarray(cvs)
    label = "profile" + (" ± 1 sd" if cvs else "")
    axes.errorbar(sizes, y, errors, fmt="o", ms=4, color=_MEASURED, elinewidth=1, label=label)
    if y.min() > 0:  # the fits minimise relative errors
        _draw_fits(axes, y, unit)
    axes.set_xlabel("batch size b")
    axes.set_xlim(0, len(values) + 1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_fits(axes: "Axes", y: NDArray[np.float64], unit: str) -> None:
    sizes = list(range(1, len(y) + 1))
    affine, isotonic = fit_affine(sizes, y.tolist()), fit_isotonic(y.tolist())
    line = f"{affine.slope:.4g} b {'+-'[affine.intercept < 0]} {abs(affine.intercept):.4g} {unit}"
    label = f"affine: {line}, within {affine.max_relative_error:.1%}"
    axes.plot(sizes, [affine.at(b) for b in sizes], color=_AFFINE, label=label)
    within = f"isotonic, within {isotonic.max_relative_error:.1%}"
    axes.plot(sizes, isotonic.values, "--", color=_ISOTONIC, label=within)
