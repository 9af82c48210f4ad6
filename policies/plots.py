"""Every picture of policies, profiles and runs. matplotlib is imported inside: it takes a second, and few want it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from policies.profile import Profile, fit_affine, fit_isotonic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEASURED, _AFFINE, _ISOTONIC = "#1f4e79", "#d1495b", "#66a182"


def plot_profile(profile: Profile, path: Path) -> None:
    """Service time, and energy where there is one, by batch size with both fits; the file's suffix is its format.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix is no format that matplotlib writes.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    panels = 1 if profile.energies is None else 2
    figure = Figure(figsize=(6.4 * panels, 4.4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    figure.suptitle(" · ".join(filter(None, (profile.name, profile.device, profile.source))))
    _draw(axes[0], profile.service_times, "ms", profile.cvs)
    axes[0].set_ylabel("service time l(b), ms")
    if profile.energies is not None:
        _draw(axes[1], profile.energies, "mJ", None)
        axes[1].set_ylabel("energy ζ(b), mJ per batch")
    figure.savefig(path, dpi=150)


def _draw(axes: "Axes", values: Sequence[float], unit: str, cvs: Sequence[float] | None) -> None:
    """Points with one standard deviation either way, and the two fits; values in SI units, drawn in thousandths."""
    sizes = np.arange(1, len(values) + 1)
    y = 1e3 * np.asarray(values)
    errors = None if cvs is None else y * np.asarray(cvs)
    affine, isotonic = fit_affine(sizes.tolist(), y.tolist()), fit_isotonic(y.tolist())
    line = f"{affine.slope:.4g} b {'+-'[affine.intercept < 0]} {abs(affine.intercept):.4g} {unit}"
    axes.errorbar(
        sizes, y, errors, fmt="o", ms=4, color=_MEASURED, elinewidth=1, label="profile" + (" ± 1 sd" if cvs else "")
    )
    axes.plot(
        sizes,
        [affine.at(b) for b in sizes.tolist()],
        color=_AFFINE,
        label=f"affine: {line}, within {affine.max_relative_error:.1%}",
    )
    axes.plot(
        sizes,
        isotonic.values,
        "--",
        color=_ISOTONIC,
        label=f"isotonic, within {isotonic.max_relative_error:.1%}",
    )
    axes.set_xlabel("batch size b")
    axes.set_xlim(0, len(values) + 1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
