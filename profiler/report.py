"""Text report of a profile: a table, fits of service time and energy, and the precision of the measurement."""

from collections.abc import Iterator, Sequence
from math import isfinite

from rich.table import Table

from policies.profile import Profile, fit_affine, fit_isotonic
from profiler.energy import Mean
from profiler.energy_sweep import BatchEnergy, EnergySweep, watts


def profile_table(profile: Profile, shown: Sequence[int], sweep: EnergySweep | None = None) -> Table:
    """Table of service time and energy at the sizes `shown`, with standard errors where energy was measured."""
    table = Table("b", "l(b), ms", "requests/s", "cv", title=f"{profile.model} on {profile.device}")
    for header in _energy_headers(profile):
        table.add_column(header)
    for column in table.columns:
        column.justify = "right"
    readings = {r.batch_size: r for r in sweep.batch_energies(profile.service_times)} if sweep else {}
    for b in shown:
        seconds = profile.service_time(b)
        cv = "" if profile.cvs is None else f"{profile.cvs[b - 1]:.1%}"
        energies = _energies(profile, b, readings.get(b))
        table.add_row(str(b), f"{1e3 * seconds:.4g}", f"{b / seconds:.4g}", cv, *energies)
    return table


def _energy_headers(profile: Profile) -> list[str]:
    if profile.energies is None:
        return []
    return ["ζ(b), mJ"] if profile.total_energies is None else ["ζ(b), mJ", "total, mJ", "P(b), W"]


def _energies(profile: Profile, b: int, reading: BatchEnergy | None) -> list[str]:
    if profile.energies is None:
        return []
    if profile.total_energies is None:
        return [f"{1e3 * profile.energies[b - 1]:.4g}"]
    if reading is not None:
        return [*(_with_error(m, 1e3) for m in (reading.marginal, reading.total)), _with_error(reading.power, 1.0)]
    total = profile.total_energies[b - 1]
    return [f"{value:.4g}" for value in (1e3 * profile.energies[b - 1], 1e3 * total, total / profile.service_time(b))]


def _with_error(value: Mean, factor: float) -> str:
    known = isfinite(value.standard_error) and value.value > 0.0
    error = f" ± {value.standard_error / value.value:.1%}" if known else ""
    return f"{factor * value.value:.4g}{error}"


def summary(profile: Profile, sweep: EnergySweep | None = None) -> Iterator[str]:
    """Lines below the table: fits, stages, idle power and the duty-cycle check."""
    yield from _fits("l(b)", profile.service_times, "ms")
    if profile.stage_service_times is not None:
        over = profile.stage_overhead
        yield f"stages    {profile.stages}; sum of l_i(b) over l(b): {over[0]:.3f} at 1, {over[-1]:.3f} at {len(over)}"
    if profile.energies is not None:
        yield from _fits("ζ(b)", profile.energies, "mJ")
    if profile.energies is not None and profile.total_energies is not None:
        yield "          ζ(b) is above idle; ± is the standard error"
    if sweep is not None:
        yield f"idle      {watts(sweep.idle)} (before {watts(sweep.before)}, after {watts(sweep.after)})"
        for load, check in sweep.checks(profile.service_times):
            predicted = f"{check.predicted:.1f} W predicted from idle power and batches of {sweep.plan.checked}"
            yield f"load {load:.2f} {check.measured:.1f} W, {check.error:+.1%} from the {predicted}"


def _fits(name: str, values: Sequence[float], unit: str) -> Iterator[str]:
    if min(values) <= 0.0:  # errors of a fit are relative
        yield f"{name} is 0 at some sizes, below the sensor's resolution: not fitted"
        return
    thousandths = [1e3 * value for value in values]
    affine = fit_affine(range(1, len(values) + 1), thousandths)
    line = f"{affine.slope:.4g} b {'+-'[affine.intercept < 0]} {abs(affine.intercept):.4g} {unit}"
    yield f"affine    {name} = {line}, within {affine.max_relative_error:.1%}"
    yield f"isotonic  within {fit_isotonic(thousandths).max_relative_error:.1%}"
