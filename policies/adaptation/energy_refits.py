"""Refits of a profile's energies from energy windows, and the tests whether they have drifted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy

from policies.profile import Profile

Quantity = Literal["service times", "energies", "CPU times"]

EFFECT = 0.05  # relative error of a prediction up to which it is not corrected
_GAIN = 4.0  # factor by which an affine fit, or a later fit, must reduce the sum of squares
_MISFIT = 0.005  # root mean square error of a scaling, relative to the energy, up to which it is kept
_REFITTED = " (refitted)"


@dataclass(frozen=True, slots=True)
class EnergyWindow:
    """The energy between two readings of an energy counter.

    Attributes:
        batches: number of completed batches by size.
        elapsed: time between the readings, s.
        energy: J.
    """

    batches: Mapping[int, int]
    elapsed: float
    energy: float


@dataclass(frozen=True, slots=True)
class Drift:
    """A deviation of observations from a profile.

    Attributes:
        quantity: the quantity that deviates.
        ratio: observed over predicted.
        batches: number of batches observed.
        of_one_size: whether `ratio` is that of the batch size that deviates most, instead of all batches together.
    """

    quantity: Quantity
    ratio: float
    batches: int
    of_one_size: bool = False

    def __str__(self) -> str:
        """Return the text for a log line."""
        if self.of_one_size:
            change = 100.0 * abs(self.ratio - 1.0)
            return f"{self.quantity} of single batch sizes up to {change:.0f} % different over {self.batches} batches"
        return f"{self.quantity} {self.ratio:.2f} times the profile's over {self.batches} batches"


@dataclass(frozen=True, slots=True)
class Refit:
    """A refitted profile, and the drifts that it corrects."""

    profile: Profile
    drifts: tuple[Drift, ...]


def energy_drift(profile: Profile, windows: Sequence[EnergyWindow], idle_power: float = 0.0) -> Drift | None:
    """Return the drift of the energies; None unless above 5 per cent and the energy of one batch at the edges."""
    predicted = sum(idle_power * window.elapsed + batch_energy(profile, window) for window in windows)
    ratio, batches = sum(window.energy for window in windows) / predicted, _batches(windows)
    return Drift("energies", ratio, batches) if abs(ratio - 1.0) > max(EFFECT, 1.0 / batches) else None


def batch_energy(profile: Profile, window: EnergyWindow) -> float:
    """Return the predicted energy of the batches of a window, J; 0 if the profile has no energies."""
    energies = profile.energies
    return 0.0 if energies is None else sum(count * energies[size - 1] for size, count in window.batches.items())


def refit_energies(profile: Profile, windows: Sequence[EnergyWindow], idle_power: float = 0.0) -> tuple[Profile, float]:
    """Refit the energies to these windows; return the profile and the idle power, W.

    All energies are scaled by one factor, fitted to the energy above idle power. An affine model, zeta_0 + beta b plus
    the idle power if the counter includes it, is fitted by non-negative least squares on batches, requests and time. It
    replaces the scaling only if the sum of squares of the scaling is above four times that of the affine model, and
    above 0.5 per cent of the energy (root mean square). The affine model also requires two windows more than columns,
    and zeta(1) and zeta(B_max) known to 5 per cent. Under a constant load the windows are alike and determine the scale
    only.

    Args:
        profile: a profile with energies.
        windows: at least one, all after the change point.
        idle_power: idle power included in the counter, W; 0 if it counts batches only.
    """
    joules = np.array([window.energy for window in windows])
    predicted = np.array([batch_energy(profile, window) for window in windows])
    beyond_idle = joules - idle_power * np.array([window.elapsed for window in windows])
    scale = max(0.0, float(predicted @ beyond_idle / (predicted @ predicted)))
    residual = float(np.sum((beyond_idle - scale * predicted) ** 2))
    affine = _affine(windows, profile.max_batch_size, idle_power > 0.0)
    if affine is not None and residual > max(_GAIN * affine.residual, _MISFIT**2 * float(joules @ joules)):
        energies, idle_power = affine.energies, affine.idle_power
    else:
        energies = tuple(scale * energy for energy in profile.energies or ())
    total = profile.total_energies
    if total is not None and profile.energies is not None:  # the idle energy per batch is unchanged
        total = tuple(t - old + new for t, old, new in zip(total, profile.energies, energies, strict=True))
    fitted = replace(profile, energies=energies, total_energies=total)
    return labelled(fitted, "energies", _batches(windows)), idle_power


def better_energies(
    profile: Profile, windows: Sequence[EnergyWindow], idle_power: float = 0.0
) -> tuple[Profile, float, Drift] | None:
    """Refit the energies if the fit is significantly better; return the profile, the idle power, W, and the drift.

    It is better if the energy of some batch size changes by more than 5 per cent, and if the sum of squares of the
    present energies is above four times that of the new ones, the factor that `refit_energies` uses too.

    Args:
        profile: a profile with energies.
        windows: at least one, all after the change point.
        idle_power: idle power included in the counter, W; 0 if it counts batches only.
    """
    fitted, fitted_idle_power = refit_energies(profile, windows, idle_power)
    ratios = [new / old for old, new in zip(profile.energies or (), fitted.energies or (), strict=True)]
    ratio = max(ratios, key=lambda each: abs(each - 1.0), default=1.0)
    present, after = _squares(profile, windows, idle_power), _squares(fitted, windows, fitted_idle_power)
    if abs(ratio - 1.0) <= EFFECT or present <= _GAIN * after:
        return None
    return fitted, fitted_idle_power, Drift("energies", ratio, _batches(windows), of_one_size=True)


def _squares(profile: Profile, windows: Sequence[EnergyWindow], idle_power: float) -> float:
    """Return the sum of squared errors of the predicted energies, J^2."""
    return sum((w.energy - idle_power * w.elapsed - batch_energy(profile, w)) ** 2 for w in windows)


def _batches(windows: Sequence[EnergyWindow]) -> int:
    return sum(sum(window.batches.values()) for window in windows)


@dataclass(frozen=True, slots=True)
class _Affine:
    energies: tuple[float, ...]
    idle_power: float
    residual: float  # sum of squares, J^2


def _affine(windows: Sequence[EnergyWindow], largest: int, counts_idle_power: bool) -> _Affine | None:
    """Fit zeta_0 + beta b, and the idle power if it is counted; None if the windows do not determine them."""
    rows = [
        (sum(w.batches.values()), sum(size * count for size, count in w.batches.items()), w.elapsed) for w in windows
    ]
    design = np.array(rows, dtype=np.float64)[:, : 3 if counts_idle_power else 2]
    columns, norms = design.shape[1], np.linalg.norm(design, axis=0)
    design /= norms  # otherwise rank and inverse would depend on the units of the columns
    if len(windows) < columns + 2 or np.linalg.matrix_rank(design) < columns:
        return None
    found, residual = scipy.optimize.nnls(design, np.array([window.energy for window in windows]))
    ends = np.zeros((2, columns))
    ends[:, :2] = (1, 1), (1, largest)
    ends /= norms
    covariance = residual**2 / (len(windows) - columns) * np.linalg.inv(design.T @ design)
    errors = np.sqrt(np.diag(ends @ covariance @ ends.T))
    if np.any(errors > EFFECT * (ends @ found)):
        return None
    found /= norms
    energies = found[0] + found[1] * np.arange(1, largest + 1)
    return _Affine(tuple(energies.tolist()), float(found[2]) if counts_idle_power else 0.0, float(residual**2))


def labelled(profile: Profile, quantity: Quantity, batches: int) -> Profile:
    """Record the refit in name and note of the profile, once for each quantity."""
    kept = [part for part in profile.note.split("; ") if part and not part.startswith(f"{quantity} refitted")]
    note = "; ".join([*kept, f"{quantity} refitted from {batches} batches"])
    return replace(profile, name=profile.name.removesuffix(_REFITTED) + _REFITTED, note=note)
