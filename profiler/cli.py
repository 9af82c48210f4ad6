"""profile-model: measure a model on a device, and write its profile."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from policies import files
from policies.charts.plots import plot_profile
from policies.command import check_files, run
from policies.profile import Profile, load_profile
from policies.types import SpecError
from profiler import cache
from profiler.energy_plan import EnergyPlan, full_energy_plan, quick_energy_plan
from profiler.first import subject_of
from profiler.lengths import rungs, with_lengths
from profiler.measure import OnProgress, Plan, Subject, full_plan, measure, quick_plan
from profiler.preflight import preflight
from profiler.report import profile_table, summary
from profiler.stages import with_stages
from profiler.sweep import Sweep, rig_of, with_energy
from server.backends.emulated import EmulatedDevice
from server.backends.executor import ThreadExecutor
from server.energy.meters import CountingMeter, meter_for
from server.models.text_model_spec import check_text, identity

_DEFAULT_MAX_BATCH_SIZE = 32
_PASSES, _QUICK_PASSES = 20, 5  # through all stages of the sizes that a quick plan measures
_LENGTH_REPEATS = 3
_log = logging.getLogger("batchwright.profiler")

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
    stages: int | None = None

    def quick_plan(self) -> Plan:
        """A few sizes, seldom repeated."""
        return quick_plan(self.max_batch_size, self.tunes_by_size)


@dataclass(frozen=True)
class _Plans:
    """What the flags ask for; `energy_time` is in s."""

    quick: bool
    energy_time: float | None

    def times(self, bench: _Bench) -> Plan:
        return bench.quick_plan() if self.quick else full_plan(bench.max_batch_size)

    def energies(self, service_times: Sequence[float]) -> EnergyPlan:
        plan = (quick_energy_plan if self.quick else full_energy_plan)(service_times)
        return plan if self.energy_time is None else plan.within(self.energy_time)


@app.command()
def profile_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="a torchvision classification model, NAME=SPEC as for serve-model, or any name on an emulated device",
        ),
    ],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:N or emulated:PROFILE")] = "auto",
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, max=4096, help="largest batch; 32, or the emulated profile's largest")
    ] = None,
    weights: Annotated[str, typer.Option(help="auto, random, or a state dict's FILE")] = "auto",
    stages: Annotated[
        int | None, typer.Option(min=1, max=64, help="cut the network into so many stages and measure each as well")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a dozen sizes in seconds, the others between them")] = False,
    energy_time: Annotated[
        float | None, typer.Option(min=0, help="s for the energy, where there is a sensor: five minutes; 0 for none")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="write the profile to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw it into this file (.png, .pdf, .svg)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the profile's JSON and nothing else")] = False,
) -> None:
    """Measure a model's service time (and energy) by batch size."""
    logging.basicConfig(format="profile-model: %(message)s")
    check_files(output, plot)
    bench = _bench(model, device, weights, (max_batch_size, stages))
    if quick and bench.key is not None and cache.load(bench.key) is not None:
        bench = replace(bench, key=None)  # what is kept may be a full profile: a quick one must not take its place
    profile, sweep = _measure(bench, _Plans(quick, energy_time))
    _write(bench, profile, output, plot)
    if as_json:
        print(profile.to_json(), end="")
    else:
        console = Console()
        console.print(profile_table(profile, bench.quick_plan().sizes, sweep))
        console.print("\n".join(summary(profile, sweep)), highlight=False)
        _say_where(output, bench.key)


def _bench(model: str, device: str, weights: str, shape: tuple[int | None, int | None]) -> _Bench:
    """`shape`: the largest batch, and into how many stages."""
    max_batch_size, stages = shape
    if device.startswith("emulated:"):
        played = load_profile(device.removeprefix("emulated:")).truncated(max_batch_size)
        known = played.stages if played.stage_service_times else None
        bench = _emulated(model, played if stages in (None, known) else played.in_stages(stages))
    else:
        with Console(stderr=True).status(f"loading {model}"):
            bench = _real(model, device, weights, (max_batch_size or _DEFAULT_MAX_BATCH_SIZE, stages))
    return replace(bench, stages=stages)


def _emulated(model: str, played: Profile) -> _Bench:
    meter = CountingMeter()
    executor = ThreadExecutor(EmulatedDevice({model: played}, meter))
    subject = Subject(executor, model, [np.zeros(8, np.uint8)], meter)
    name, device = f"{model}-emulated-{played.name}", f"emulated:{played.name}"
    return _Bench(executor, subject, name, device, _versions(), played.max_batch_size)


def _real(model: str, device: str, weights: str, shape: tuple[int, int | None]) -> _Bench:
    # torch takes seconds to import, which an emulated device should not cost
    from server.backends.loading import load_models, make_device
    from server.backends.torch_images import autotunes, resolve_device, settings

    place, device_name = resolve_device(device)
    found = preflight(str(place))
    max_batch_size, stages = shape
    model, _, spec = model.partition("=")
    spec = spec or model
    check_text(model, spec, weights, stages)
    ((served, net),) = load_models({model: spec}, weights, {model: max_batch_size}, stages or 1)
    executor = ThreadExecutor(make_device([(served, net)], place))
    setting = ", ".join(filter(None, (settings(place, stages=stages), identity(model, spec))))
    for warning in found.warnings:
        _log.warning("%s", warning)
    about = f"{setting}, weights {served.weights}, {_versions()}; {found.note}"
    key = cache.Key(model, device_name, max_batch_size, setting)
    subject = subject_of(executor, served, meter_for(str(place)))
    name = f"{model}-{cache.slug(device_name)}"
    return _Bench(executor, subject, name, device_name, about, max_batch_size, autotunes(place, served), key)


def _versions() -> str:
    return ", ".join(f"{name} {number}" for name, number in cache.versions().items())


def _measure(bench: _Bench, plans: _Plans) -> tuple[Profile, Sweep | None]:
    rng = np.random.default_rng(0)
    alone = nullcontext() if bench.key is None else cache.exclusive(bench.device)
    with _closing(bench.executor), alone, _bar() as phase:
        measurement = asyncio.run(measure(bench.subject, plans.times(bench), rng, phase("service times")))
        profile = measurement.profile(bench.name, bench.subject.model, bench.device, bench.about)
        if bench.stages is not None:
            passes = _QUICK_PASSES if plans.quick else _PASSES
            staged = profile.in_stages(bench.stages)
            profile = asyncio.run(with_stages(staged, bench.subject, bench.quick_plan().sizes, passes, phase("stages")))
        if bench.subject.texts is not None:
            steps = (rungs(bench.max_batch_size), 1 if plans.quick else _LENGTH_REPEATS)
            profile = asyncio.run(with_lengths(profile, bench.subject, *steps, phase("lengths")))
        if plans.energy_time == 0:
            return profile, None
        return with_energy(profile, rig_of(bench.subject, rng), plans.energies, phase("energy"))


@contextmanager
def _bar() -> Iterator[Callable[[str], OnProgress]]:
    """A progress bar on a terminal; it shows a phase once that has told how far it is."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    console = Console(stderr=True)
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:

        def phase(name: str) -> OnProgress:
            task = bar.add_task(name, total=1.0, visible=False)
            return lambda share: bar.update(task, completed=share, visible=True)

        yield phase


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
            files.write_atomically(output, profile.to_json())
        if plot is not None:
            plot_profile(profile, plot)
    except OSError as error:
        raise SpecError(f"cannot write {error.filename!r}: {error.strerror}; give another file") from error


def _say_where(output: Path | None, key: cache.Key | None) -> None:
    for path in filter(None, (output, key and key.path)):
        print(f"written to {path}")


def main() -> None:
    """The console entry point."""
    run(app, "profile-model")


if __name__ == "__main__":
    main()
