"""The chart of actions by queue length and load: the journal's (arXiv 2501.02181) figures 3 and 11.

It is drawn on given Axes. Actions are printed in the cells if there is room; otherwise only the colour shows them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.solver.solver import Solution

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

_WAITING, _LAUNCHING = "#e9e9e9", ("#d6e6f4", "#5ba3cf", "#08306b")
_LIMIT_FRAME, _VIOLATION, _VIOLATION_FILL = "#d55e00", "#aa3388", "#f3c6e2"
_MARGIN, _DIGIT, _HEIGHT = 3.5, 3.5, 8.0  # size of a number in a cell, points
_GRID = 80, 30  # columns and rows up to which the cells have white borders


@dataclass(frozen=True, slots=True)
class ChartRow:
    """One policy in a chart of actions.

    Attributes:
        label: tick label, usually a load.
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.
    """

    label: str
    batch_size: Sequence[int]


def control_limit_of(batch_size: Sequence[int], max_batch_size: int) -> int | None:
    """The control limit Q of an action table (equation 31): launch min(s, B_max) from s = Q on.

    None for a table without this structure.

    Args:
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.
        max_batch_size: B_max.
    """
    limit = next((length for length, action in enumerate(batch_size) if action != 0), None)
    if limit is None or batch_size[-1] != max_batch_size:
        return None
    expected = [0 if length < limit else min(length, max_batch_size) for length in range(len(batch_size))]
    return limit if list(batch_size) == expected else None


def chart_rows(solutions: Sequence[Solution]) -> list[ChartRow]:
    """Return a row for each solution, labelled by its load; for a mix, both tables with their probabilities."""
    rows = []
    for solution in solutions:
        load, mix = f"{solution.load:.3g}", solution.mix
        if mix is None:
            rows.append(ChartRow(load, solution.batch_size))
        else:
            rows.append(ChartRow(f"{load} ({1.0 - mix.probability:.0%})", solution.batch_size))
            rows.append(ChartRow(f"{load} ({mix.probability:.0%})", mix.batch_size))
    return rows


def policy_chart(axes: "Axes", rows: Sequence[ChartRow], max_batch_size: int) -> "QuadMesh":
    """Draw actions by queue length (horizontal) and load (vertical, in the order given), with numbers if there is room.

    Waits are grey and launches blue, darker for larger batches. The first launch of a control-limit policy is framed.
    Cells that violate the control-limit structure are framed in another colour, and filled or dotted.

    Returns:
        The coloured cells, for a colour bar.
    """
    shown = _columns(rows, max_batch_size)
    cells = np.array([[row.batch_size[min(n, len(row.batch_size) - 1)] for n in range(shown)] for row in rows])
    mesh = _colour(axes, cells, max_batch_size)
    violations = np.zeros(cells.shape, dtype=bool)
    for y, line in enumerate(cells):
        violations[y, list(control_limit_violations(line.tolist(), max_batch_size))] = True
    numbers = _numbers_fit(axes, cells)
    _mark(axes, violations, numbers)
    _frame_limits(axes, rows, max_batch_size)
    if numbers:
        _number(axes, cells, np.where(violations, 0, cells) > 0.55 * max(max_batch_size, 2))
    _label(axes, rows, shown)
    return mesh


def legend_handles() -> "list[Artist]":
    """Return the legend handles of a policy chart."""
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=_WAITING, edgecolor="#bbbbbb", label="waits"),
        Patch(facecolor=_LAUNCHING[1], label="launches (darker: larger batch)"),
        Patch(facecolor="none", edgecolor=_LIMIT_FRAME, linewidth=2, label="control limit"),
        Patch(facecolor=_VIOLATION_FILL, edgecolor=_VIOLATION, linewidth=1.5, hatch="..", label="no control limit"),
    ]


def control_limit_violations(batch_size: Sequence[int], max_batch_size: int) -> Iterator[int]:
    """Yield the queue lengths at which a policy deviates from the control limit of its first launch."""
    limit = next((n for n, action in enumerate(batch_size) if action), len(batch_size))
    yield from (n for n, action in enumerate(batch_size) if n >= limit and action != min(n, max_batch_size))


def _columns(rows: Sequence[ChartRow], max_batch_size: int) -> int:
    """Return the number of columns: up to the last change of an action, but limited to fit a screen."""
    longest = max(len(row.batch_size) for row in rows)
    return min(max(longest, max_batch_size + 1) + 1, 4 * max_batch_size + 2)


def _colour(axes: "Axes", cells: NDArray[np.intp], max_batch_size: int) -> "QuadMesh":
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns = cells.shape
    blues = LinearSegmentedColormap.from_list("launch", _LAUNCHING).with_extremes(bad=_WAITING)
    style: dict[str, Any] = {"cmap": blues, "vmin": 1, "vmax": max(max_batch_size, 2)}
    if columns <= _GRID[0] and rows <= _GRID[1]:
        style |= {"edgecolors": "white", "linewidth": 0.6}
    return axes.pcolormesh(
        np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5, np.ma.masked_equal(cells, 0), **style
    )


def _numbers_fit(axes: "Axes", cells: NDArray[np.intp]) -> bool:
    """Return whether numbers are legible in the cells."""
    figure = axes.get_figure(root=True)
    assert figure is not None  # Axes that can be drawn on belong to a figure
    box = axes.get_window_extent()
    height, width = (
        72 * size / figure.dpi / count for size, count in zip((box.height, box.width), cells.shape, strict=True)
    )
    return bool(width >= _MARGIN + _DIGIT * len(str(cells.max())) and height >= _HEIGHT)


def _mark(axes: "Axes", violations: NDArray[np.bool_], filled: bool) -> None:
    """Mark the cells that violate the structure: framed, and filled, or dotted if the colour shows the action."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Rectangle

    places = np.argwhere(violations)
    for y, n in places if filled else ():
        axes.add_patch(Rectangle((n - 0.5, y - 0.5), 1, 1, facecolor=_VIOLATION_FILL, edgecolor="white", linewidth=0.6))
    if not filled:
        axes.plot(places[:, 1], places[:, 0], ".", ms=2.2, color=_VIOLATION_FILL, mec="none")
    padded = np.pad(violations, 1)
    below = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1]) - 0.5  # (y, n) of the lower left corner
    beside = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1]) - 0.5
    lines = [((n, y), (n + 1, y)) for y, n in below] + [((n, y), (n, y + 1)) for y, n in beside]
    axes.add_collection(LineCollection(lines, colors=_VIOLATION, linewidths=1.6, capstyle="round", clip_on=False))


def _frame_limits(axes: "Axes", rows: Sequence[ChartRow], max_batch_size: int) -> None:
    from matplotlib.patches import Rectangle

    for y, row in enumerate(rows):
        limit = control_limit_of(row.batch_size, max_batch_size)
        if limit is not None:
            frame = Rectangle((limit - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=_LIMIT_FRAME, linewidth=1.8)
            axes.add_patch(frame)


def _number(axes: "Axes", cells: NDArray[np.intp], dark: NDArray[np.bool_]) -> None:
    for (y, n), action in np.ndenumerate(cells):
        color = "white" if dark[y, n] else "black" if action else "#888888"
        size = 6.5 if cells.shape[1] > 24 else 8
        axes.text(n, y, str(action), ha="center", va="center", fontsize=size, color=color)


def _label(axes: "Axes", rows: Sequence[ChartRow], shown: int) -> None:
    from matplotlib.ticker import MaxNLocator

    every = -(-len(rows) // 20)
    places = range(0, len(rows), every)
    axes.set_yticks(list(places), [rows[i].label for i in places])
    axes.xaxis.set_major_locator(MaxNLocator(13, integer=True))
    axes.set_xlim(-0.5, shown - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    whole = all(len(row.batch_size) <= shown for row in rows)
    axes.set_xlabel("queue length (the last column repeats)" if whole else "queue length (truncated)")
    axes.set_ylabel("load ρ")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
