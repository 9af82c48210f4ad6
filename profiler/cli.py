"""profile-model: measure a model on a device, and write its profile."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from policies.command import check_files, run
from policies.plots import plot_profile
from policies.profile import Profile, fit_affine, fit_isotonic, load_profile
from policies.types import SpecError
from profiler import cache
from profiler.measure import Measurement, Plan, Subject, full_plan, measure, quick_plan
from server.emulated import EmulatedDevice
from server.energy import CountingMeter, NoMeter
from server.executor import ThreadExecutor
from server.models import smooth_pictures

_DEFAULT_MAX_BATCH_SIZE = 32

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class _Bench:
    """What is measured, and what its profile says about it; no key: not worth keeping."""

    executor: ThreadExecutor
    subject: Subject
    name: str
    device: str
    about: str
    max_batch_size: int
    tunes_by_size: bool = False
    key: cache.Key | None = None

    def quick_plan(self) -> Plan:
        """A few sizes, seldom repeated."""
        return quick_plan(self.max_batch_size, self.tunes_by_size)


@app.command()
def profile_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a torchvision classification model; any name on an emulated device")
    ],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:N or emulated:PROFILE")] = "auto",
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, max=4096, help="largest batch; 32, or the emulated profile's largest")
    ] = None,
    weights: Annotated[str, typer.Option(help="auto, random, or a state dict's FILE")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="a dozen sizes in seconds, the others between them")] = False,
    output: Annotated[Path | None, typer.Option(help="write the profile to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw it into this file (.png, .pdf, .svg)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the profile's JSON and nothing else")] = False,
) -> None:
    """Measure a model's service time (and energy) by batch size."""
    logging.basicConfig(format="profile-model: %(message)s")
    check_files(output, plot)
    bench = _bench(model, device, weights, max_batch_size)
    if quick and bench.key is not None and cache.load(bench.key) is not None:
        bench = replace(bench, key=None)  # what is kept may be a full profile: a quick one must not take its place
    plan = bench.quick_plan() if quick else full_plan(bench.max_batch_size)
    measurement = _measure(bench, plan)
    profile = measurement.profile(bench.name, model, bench.device, bench.about)
    _write(bench, profile, output, plot)
    if as_json:
        print(profile.to_json(), end="")
    else:
        _report(profile, bench.quick_plan().sizes)
        _say_where(output, bench.key)


def _bench(model: str, device: str, weights: str, max_batch_size: int | None) -> _Bench:
    if device.startswith("emulated:"):
        return _emulated(model, load_profile(device.removeprefix("emulated:")).truncated(max_batch_size))
    with Console(stderr=True).status(f"loading {model}"):
        return _real(model, device, weights, max_batch_size or _DEFAULT_MAX_BATCH_SIZE)


def _emulated(model: str, played: Profile) -> _Bench:
    meter = CountingMeter()
    executor = ThreadExecutor(EmulatedDevice({model: played}, meter))
    subject = Subject(executor, model, [np.zeros(8, np.uint8)], meter)
    name, device = f"{model}-emulated-{played.name}", f"emulated:{played.name}"
    return _Bench(executor, subject, name, device, _versions(), played.max_batch_size)


def _real(model: str, device: str, weights: str, max_batch_size: int) -> _Bench:
    # torch takes seconds to import, which an emulated device should not cost
    from server.torch_device import resolve_device, settings, torch_device
    from server.torch_models import load

    place, device_name = resolve_device(device)
    served, net = load(model, weights, max_batch_size)
    executor = ThreadExecutor(torch_device([(served, net)], place))
    samples = list(smooth_pictures(served.codec, 16, np.random.default_rng(1)))
    about = f"{settings(place)}, weights {served.weights}, {_versions()}"
    key = cache.Key(model, device_name, max_batch_size, settings(place))
    name = f"{model}-{cache.slug(device_name)}"
    subject = Subject(executor, model, samples, NoMeter())
    return _Bench(executor, subject, name, device_name, about, max_batch_size, place.type == "cuda", key)


def _versions() -> str:
    return ", ".join(f"{name} {number}" for name, number in cache.versions().items())


def _measure(bench: _Bench, plan: Plan) -> Measurement:
    columns = TextColumn("measuring"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn()
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with _closing(bench.executor), bar as progress:
        task = progress.add_task("", total=1.0)
        rng = np.random.default_rng(0)
        return asyncio.run(measure(bench.subject, plan, rng, lambda share: progress.update(task, completed=share)))


@contextmanager
def _closing(executor: ThreadExecutor) -> Iterator[None]:
    try:
        yield
    finally:
        executor.close()


def _write(bench: _Bench, profile: Profile, output: Path | None, plot: Path | None) -> None:
    if bench.key is not None:
        cache.store(bench.key, profile)
    try:
        if output is not None:
            cache.write_atomically(output, profile.to_json())
        if plot is not None:
            plot_profile(profile, plot)
    except OSError as error:
        raise SpecError(f"cannot write {error.filename!r}: {error.strerror}; give another file") from error


def _report(profile: Profile, shown: Sequence[int]) -> None:
    columns = ["b", "l(b), ms", "requests/s", "cv"] + ["ζ(b), mJ"] * (profile.energies is not None)
    table = Table(*columns, title=f"{profile.model} on {profile.device}")
    for column in table.columns:
        column.justify = "right"
    for b in shown:
        seconds, joules = profile.service_time(b), profile.energy(b)
        cv = "" if profile.cvs is None else f"{profile.cvs[b - 1]:.1%}"
        energy = [] if joules is None else [f"{1e3 * joules:.4g}"]
        table.add_row(str(b), f"{1e3 * seconds:.4g}", f"{b / seconds:.4g}", cv, *energy)
    console = Console()
    console.print(table)
    console.print("\n".join(_fits(profile)), highlight=False)


def _say_where(output: Path | None, key: cache.Key | None) -> None:
    for path in filter(None, (output, key and key.path)):
        print(f"written to {path}")


def _fits(profile: Profile) -> Iterator[str]:
    milliseconds = [1e3 * seconds for seconds in profile.service_times]
    affine = fit_affine(range(1, len(milliseconds) + 1), milliseconds)
    sign, intercept = "+-"[affine.intercept < 0], abs(affine.intercept)
    yield f"affine    l(b) = {affine.slope:.4g} b {sign} {intercept:.4g} ms, within {affine.max_relative_error:.1%}"
    yield f"isotonic  within {fit_isotonic(milliseconds).max_relative_error:.1%}"


def main() -> None:
    """The console entry point."""
    run(app, "profile-model")


if __name__ == "__main__":
    main()
