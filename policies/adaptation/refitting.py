"""A profile fitted again from batches and windows of energy that were observed, where it is far enough off.

Service times: by batch size, the mean ratio of observed to predicted of that size, drawn towards the mean of all by
as many batches as make its own noise as small as the 5 per cent by which sizes are taken to differ from each other;
sizes not seen get the mean of all. A ratio counts at most twice, at least half the median. Energies: see
`refit_energies`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from policies.profile import Profile

Quantity = Literal["service times", "energies"]

EFFECT = 0.05  # of the predicted value: smaller errors are let be
_BELIEF = 3.0  # standard errors
_FEWEST = 8  # batches after a change
_ROUNDING = 1e-12  # squares of ratios that differ by no more are the same
_OUTLIER = 2.0  # times the median ratio
_AFFINE_GAIN = 4.0  # by which an affine fit has to lower the sum of squares
_REFITTED = " (refitted)"


class Observation(NamedTuple):
    """One batch: its size, and its service time in s."""

    batch_size: int
    service_time: float


@dataclass(frozen=True, slots=True)
class EnergyWindow:
    """What a counter of joules counted between two readings.

    Attributes:
        batches: how many of each size ended in that time.
        elapsed: s.
        energy: J.
    """

    batches: Mapping[int, int]
    elapsed: float
    energy: float


@dataclass(frozen=True, slots=True)
class Drift:
    """A profile's quantity is off.

    Attributes:
        quantity: which one.
        ratio: observed over predicted.
        batches: how many say so.
    """

    quantity: Quantity
    ratio: float
    batches: int

    def __str__(self) -> str:
        """For a log line."""
        return f"{self.quantity} {self.ratio:.2f} times the profile's over {self.batches} batches"


@dataclass(frozen=True, slots=True)
class Refit:
    """A new profile, and why."""

    profile: Profile
    drifts: tuple[Drift, ...]


def time_drift(profile: Profile, batches: Sequence[Observation]) -> Drift | None:
    """How far these batches' mean ratio is off 1, where that is more than 5 per cent and three standard errors."""
    _, ratios = _ratios(profile, batches)
    ratio = float(ratios.mean())
    error = float(ratios.std(ddof=1)) / sqrt(len(ratios)) if len(ratios) > 1 else inf
    return Drift("service times", ratio, len(ratios)) if abs(ratio - 1.0) > max(EFFECT, _BELIEF * error) else None


def energy_drift(profile: Profile, windows: Sequence[EnergyWindow], idle_power: float = 0.0) -> Drift | None:
    """The same of energies, J over J. The error of a sum of windows is the one batch that may be at its edges."""
    predicted = sum(idle_power * window.elapsed + batch_energy(profile, window) for window in windows)
    ratio = sum(window.energy for window in windows) / predicted
    batches = sum(sum(window.batches.values()) for window in windows)
    off = abs(ratio - 1.0) > max(EFFECT, 1.0 / batches)
    return Drift("energies", ratio, batches) if off else None


def after_change(profile: Profile, batches: Sequence[Observation]) -> Sequence[Observation]:
    """The later part, where two means in a row leave less than half the squares that one leaves; else all of them.

    Noise may have set a sum in motion a few batches before the change: they would draw the refit to the past.
    """
    _, ratios = _ratios(profile, batches)
    if len(ratios) <= _FEWEST:
        return batches
    values = ratios - ratios.mean()
    n, cuts = len(values), np.arange(1, len(values) - _FEWEST + 1)
    sums, whole = np.cumsum(values)[: len(cuts)], float(values @ values)
    left = whole - sums**2 * (1.0 / cuts + 1.0 / (n - cuts))  # both parts' squares; the whole sum is 0
    best = int(np.argmin(left))
    return batches[cuts[best] :] if whole > _ROUNDING * n and left[best] < 0.5 * whole else batches


def _ratios(profile: Profile, batches: Sequence[Observation]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Index into the profile, and observed over predicted service time, outliers drawn in."""
    index = np.array([batch.batch_size for batch in batches], dtype=np.intp) - 1
    ratios = np.array([batch.service_time for batch in batches]) / np.array(profile.service_times)[index]
    middle = float(np.median(ratios))
    return index, np.clip(ratios, middle / _OUTLIER, middle * _OUTLIER)


def batch_energy(profile: Profile, window: EnergyWindow) -> float:
    """By the profile, J; 0 where it has no energies."""
    energies = profile.energies
    return 0.0 if energies is None else sum(count * energies[size - 1] for size, count in window.batches.items())


def refit_service_times(profile: Profile, batches: Sequence[Observation]) -> Profile:
    """The profile with service times as these batches have them, stages in proportion.

    Exact observations of every size, two at least of one of them, give exactly what was observed.

    Args:
        profile: what was believed.
        batches: at least one, after whatever changed.
    """
    index, ratios = _ratios(profile, batches)
    sizes = profile.max_batch_size
    counts = np.bincount(index, minlength=sizes)
    means = np.bincount(index, ratios, sizes) / np.maximum(counts, 1)
    overall = float(ratios.mean())
    spare = len(ratios) - int(np.count_nonzero(counts))
    spread = (EFFECT * overall) ** 2  # variance between sizes
    noise = float(np.sum((ratios - means[index]) ** 2)) / spare if spare else spread
    weight = counts * spread / np.maximum(counts * spread + noise, spread)  # a size not seen weighs nothing
    factors = overall + weight * (means - overall)
    stages = profile.stage_service_times
    changed = replace(
        profile,
        service_times=tuple((np.array(profile.service_times) * factors).tolist()),
        stage_service_times=stages
        and tuple(tuple((np.array(s) * f).tolist()) for s, f in zip(stages, factors, strict=True)),
    )
    return _signed(changed, "service times", len(batches))


def refit_energies(profile: Profile, windows: Sequence[EnergyWindow], idle_power: float = 0.0) -> tuple[Profile, float]:
    """The profile with energies as these windows have them, and the idle power.

    All energies are scaled alike, by what the counter says beyond the idle power. Only where that leaves at least four
    times the squares (and 1 per cent of the energy, root mean square) that zeta_0 + beta b and, if the counter has it,
    an idle power leave, fitted by non-negative least squares on batches, requests and time, are those taken: and only
    if the windows can tell them apart, that is if there are two windows more than columns, and zeta(1) and zeta(B_max)
    are known to 5 per cent. Steady load gives windows alike, which know one number: the scale.

    Args:
        profile: with energies.
        windows: at least one, after whatever changed.
        idle_power: that the counter counts beside the batches, W; 0 where it counts none.
    """
    joules = np.array([window.energy for window in windows])
    predicted = np.array([batch_energy(profile, window) for window in windows])
    beyond_idle = joules - idle_power * np.array([window.elapsed for window in windows])
    scale = max(0.0, float(predicted @ beyond_idle / (predicted @ predicted)))
    left = float(np.sum((beyond_idle - scale * predicted) ** 2))
    affine = _affine(windows, profile.max_batch_size, idle_power > 0.0)
    if affine is not None and left > max(_AFFINE_GAIN * affine.left, 1e-4 * float(joules @ joules)):
        energies, idle_power = affine.energies, affine.idle_power
    else:
        energies = tuple(scale * energy for energy in profile.energies or ())
    total = profile.total_energies
    if total is not None and profile.energies is not None:  # what idling adds to a batch is as it was
        total = tuple(t - old + new for t, old, new in zip(total, profile.energies, energies, strict=True))
    count = sum(sum(window.batches.values()) for window in windows)
    return _signed(replace(profile, energies=energies, total_energies=total), "energies", count), idle_power


@dataclass(frozen=True, slots=True)
class _Affine:
    energies: tuple[float, ...]
    idle_power: float
    left: float  # sum of squares, J^2


def _affine(windows: Sequence[EnergyWindow], largest: int, idles: bool) -> _Affine | None:
    """zeta_0 + beta b, and the idle power if that is counted; None where the windows cannot tell them apart."""
    rows = [
        (sum(w.batches.values()), sum(size * count for size, count in w.batches.items()), w.elapsed) for w in windows
    ]
    design = np.array(rows, dtype=np.float64)[:, : 3 if idles else 2]
    columns, norms = design.shape[1], np.linalg.norm(design, axis=0)
    design /= norms  # batches, requests and seconds: as they come, rank and inverse would depend on the units
    if len(windows) < columns + 2 or np.linalg.matrix_rank(design) < columns:
        return None
    found, residual = nnls(design, np.array([window.energy for window in windows]))
    ends = np.zeros((2, columns))
    ends[:, :2] = (1, 1), (1, largest)
    ends /= norms
    covariance = residual**2 / (len(windows) - columns) * np.linalg.inv(design.T @ design)
    errors = np.sqrt(np.diag(ends @ covariance @ ends.T))
    if np.any(errors > EFFECT * (ends @ found)):
        return None
    found /= norms
    energies = found[0] + found[1] * np.arange(1, largest + 1)
    return _Affine(tuple(energies.tolist()), float(found[2]) if idles else 0.0, float(residual**2))


def _signed(profile: Profile, quantity: Quantity, batches: int) -> Profile:
    """Say in name and note that the profile is refitted, and from how much; once for each quantity."""
    kept = [part for part in profile.note.split("; ") if part and not part.startswith(f"{quantity} refitted")]
    note = "; ".join([*kept, f"{quantity} refitted from {batches} batches"])
    return replace(profile, name=profile.name.removesuffix(_REFITTED) + _REFITTED, note=note)
