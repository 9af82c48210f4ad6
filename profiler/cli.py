"""The profile-model command: measure a model on a device and write its profile."""

import asyncio
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from policies.charts.plots import plot_profile
from policies.command_line.common import VersionFlag, check_files, examples, run, writing
from policies.cpus import SWITCH_INTERVAL
from policies.files import write_atomically
from policies.profile import Profile, load_profile
from policies.sample_file import SAMPLE_USAGE
from policies.types import SpecError
from profiler import cache
from profiler.conditions import conditions_of
from profiler.energy_plan import EnergyPlan, full_energy_plan, quick_energy_plan
from profiler.energy_sweep import EnergySweep, make_rig, with_energy
from profiler.first_profile import make_subject
from profiler.lengths import power_of_two_sizes, with_lengths
from profiler.measure import (
    MeasurementPlan,
    OnProgress,
    Subject,
    full_plan,
    is_quick,
    measure_service_times,
    quick_plan,
)
from profiler.preflight import preflight
from profiler.report import profile_table, summary
from profiler.stages import QUICK_REPEATS, with_stages
from server.backends.buckets import LARGEST, bucket_sizes, padded, pads_to_buckets
from server.backends.emulated import EmulatedDevice
from server.backends.executor import Batch, ThreadExecutor
from server.backends.model_devices import ModelDevices
from server.backends.real_device import Optimise, autotunes, device_settings, find_device, open_meter
from server.backends.upstream_device import UpstreamDevice, UpstreamExecutor
from server.backends.worker_device import WorkerDevice
from server.energy.meters import METER_USAGE, METERS, CountingMeter
from server.models.model import ServedModel
from server.models.sources import ModelSource, UpstreamSource, source_of
from server.models.tensors.python_source import SAMPLE_HINT, one_line_errors
from server.models.upstream_spec import upstreams_of
from server.models.weights import check_weights
from server.workers.worker import end_idle

_DEFAULT_MAX_BATCH_SIZE = 32
_STAGE_REPEATS = 20
_LENGTH_REPEATS = 3
_log = logging.getLogger("batchwright.profiler")

app = typer.Typer()

GROUPS = {
    "Model and device": ("device", "meter", "max_batch_size", "weights", "sample", "stages", "optimise", "threads"),
    "Measurement": ("quick", "energy_time"),
    "Output": ("output", "plot", "as_json"),
}
_EXAMPLES = examples(
    "profile-model googlenet",
    "profile-model mine=model.py:Mine --device cuda:0 --output mine.json --plot mine.png",
    "profile-model resnet50 --quick --energy-time 0",
)


@dataclass(frozen=True)
class _ProfilingJob:
    """The model under measurement and the metadata of its profile; the profile is cached if `key` is given."""

    executor: ThreadExecutor
    subject: Subject
    name: str
    device: str
    about: str
    max_batch_size: int
    autotunes: bool = False
    pads: bool = False  # to buckets, which alone are measured
    key: cache.CacheKey | None = None
    stages: int | None = None

    def quick_plan(self) -> MeasurementPlan:
        return quick_plan(self.max_batch_size, self.autotunes, self._buckets)

    def full_plan(self) -> MeasurementPlan:
        return full_plan(self.max_batch_size, self._buckets)

    @property
    def _buckets(self) -> tuple[int, ...]:
        return bucket_sizes(self.max_batch_size) if self.pads else ()


@dataclass(frozen=True)
class _Plans:
    """Measurement plans for the flags; `energy_time` is in s."""

    quick: bool
    energy_time: float | None

    @property
    def name(self) -> str:
        return "quick" if self.quick else "full"

    def service_times(self, job: _ProfilingJob) -> MeasurementPlan:
        return job.quick_plan() if self.quick else job.full_plan()

    def energies(self, service_times: Sequence[float]) -> EnergyPlan:
        plan = (quick_energy_plan if self.quick else full_energy_plan)(service_times)
        return plan if self.energy_time is None else plan.within(self.energy_time)


@app.command(epilog=_EXAMPLES)
def profile_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A torchvision classification model, NAME=SOURCE as for serve-model, or any name on an emulated "
            "device.",
        ),
    ],
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda:N or emulated:PROFILE.")] = "auto",
    meter: Annotated[
        str, typer.Option(help=f"Energy meter of another server (oip:URL) on this machine: {METER_USAGE}.")
    ] = "none",
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Largest batch size to measure (default: 32, 128 on CUDA, or the emulated profile's largest).",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="Weights: pretrained, auto (pretrained, else random), random, or the FILE of a state dict. A profile "
            "does not depend on their values, so that auto is the default."
        ),
    ] = "auto",
    sample: Annotated[
        Path | None,
        typer.Option(help=f"Measure with this sample in place of synthetic ones, for a NAME=SOURCE: {SAMPLE_USAGE}."),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Split the network into this many stages and measure each as well."),
    ] = None,
    optimise: Annotated[
        Optimise,
        typer.Option(
            help="Networks of images on CUDA: auto (captured graphs of the fastest of several implementations), "
            "eager (captured graphs of the network as it is) or none."
        ),
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=9999, help="Threads of the model on the CPU (default: as serve-model chooses)."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Measure about a dozen batch sizes, in seconds, and interpolate the others."),
    ] = False,
    energy_time: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Time for measuring energy on a device with a sensor, s, about 60 at least; 0 skips it (default: "
            "about 300).",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the profile as JSON to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the profile into this file (.png, .pdf or .svg).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON and nothing else.")] = False,
    version: VersionFlag = False,
) -> None:
    """Measure a model's service time and energy by batch size."""
    logging.basicConfig(format="profile-model: %(message)s")
    check_files(output, plot)
    job = _make_job(model, device, weights, max_batch_size, stages, sample, meter, optimise, threads)
    sys.setswitchinterval(SWITCH_INTERVAL)  # as the server that the profile is for
    with closing(job.executor), nullcontext() if job.key is None else cache.device_lock(job.device):
        profile, sweep = _measure(job, _Plans(quick, energy_time))
        cached = job.key is not None and _store(job.key, profile)  # before another process may measure and store
    if as_json:
        print(profile.to_json(), end="")
    else:
        console = Console()
        console.print(profile_table(profile, job.quick_plan().sizes, sweep))
        console.print("\n".join(summary(profile, sweep)), highlight=False)
    _write(profile, output, plot)
    if not as_json:
        _print_paths(output, job.key if cached else None)


def _store(key: cache.CacheKey, profile: Profile) -> bool:
    """Cache a profile and return True; return False if it is quick and the cached one is of a full measurement."""
    before = cache.load_cached_profile(key) if is_quick(profile) else None
    if before is not None and not is_quick(before):
        _log.warning("%s is of a full measurement and is kept; to replace it, delete it or omit --quick", key.path)
        return False
    return cache.store_profile(key, profile)


def _make_job(
    model: str,
    device: str,
    weights: str,
    max_batch_size: int | None,
    stages: int | None,
    sample: Path | None,
    meter: str,
    optimise: Optimise,
    threads: int | None,
) -> _ProfilingJob:
    check_weights(weights)
    model, _, spec = model.partition("=")
    source = source_of(spec or model)
    if meter != "none" and not isinstance(source, UpstreamSource):
        raise SpecError(
            f"--meter {meter} is for a model of another server, oip:URL; leave it out, the device has its own"
        )
    if sample is not None:
        source.read_sample(sample)  # fails before the model is loaded
    if device.startswith("emulated:"):
        profile = load_profile(device.removeprefix("emulated:")).truncated(max_batch_size)
        known = profile.stages if profile.stage_service_times else None
        job = _emulated_job(model, source, profile if stages in (None, known) else profile.in_stages(stages), sample)
    elif isinstance(source, UpstreamSource):
        if device != "auto":
            raise SpecError(f"{model} runs on another server, not on --device {device}; leave it out")
        source.check(model, weights, stages)
        job = _upstream_job(model, source, max_batch_size or _DEFAULT_MAX_BATCH_SIZE, sample, meter)
    else:
        with Console(stderr=True).status(f"loading {model}"):
            job = _torch_job(model, source, device, weights, max_batch_size, stages, sample, optimise, threads)
    return replace(job, stages=stages)


def _emulated_job(model: str, source: ModelSource, profile: Profile, sample: Path | None) -> _ProfilingJob:
    meter, served = CountingMeter(), _with_sample(source, source.emulate(model, profile.max_batch_size), sample)
    profile = profile.truncated(served.max_batch_size)
    executor = ThreadExecutor(EmulatedDevice({model: profile}, meter, {model: served.codec}))
    subject = replace(make_subject(executor, served, meter), by_length=None)  # its times are those of the profile
    name, device = f"{model}-emulated-{profile.name}", f"emulated:{profile.name}"
    return _ProfilingJob(executor, subject, name, device, _versions(), profile.max_batch_size)


def _upstream_job(
    model: str, source: UpstreamSource, max_batch_size: int, sample: Path | None, meter: str
) -> _ProfilingJob:
    if re.fullmatch(METERS, meter) is None:
        raise SpecError(f"no meter {meter!r}; give {METER_USAGE}")
    max_batch_size = min(max_batch_size, source.max_batch_size or max_batch_size)
    served, _ = source.load(model, "", max_batch_size, 1)
    (upstream,) = upstreams_of(source.spec)
    served = _with_sample(source, served, sample)
    executor = UpstreamExecutor(ModelDevices({model: UpstreamDevice(served)}), upstream.device)
    about = ", ".join(filter(None, (source.settings(model), cache.sample_settings(sample))))
    key = cache.CacheKey(model, upstream.device, max_batch_size, about, source.packages)
    subject = make_subject(executor, served, open_meter(meter))
    name = f"{model}-{cache.slug(upstream.device)}"
    return _ProfilingJob(executor, subject, name, upstream.device, f"{about}; {_versions()}", max_batch_size, key=key)


def _torch_job(
    model: str,
    source: ModelSource,
    device: str,
    weights: str,
    max_batch_size: int | None,
    stages: int | None,
    sample: Path | None,
    optimise: Optimise,
    threads: int | None,
) -> _ProfilingJob:
    place = find_device(device)
    found = preflight(place)
    source.check(model, weights, stages)
    pads = pads_to_buckets(device, source, stages, optimise)
    max_batch_size = max_batch_size or (LARGEST if pads else _DEFAULT_MAX_BATCH_SIZE)
    max_batch_size = min(max_batch_size, source.max_batch_size or max_batch_size)
    served, worker = source.load(model, weights, max_batch_size, stages or 1)
    served = _with_sample(source, served, sample)
    worker_device = WorkerDevice(model, worker, place.place, optimise)
    models = ModelDevices({model: worker_device})
    executor = ThreadExecutor(models)
    executor.call(models.load).result()
    end_idle()
    lengths = served.codec.lengths
    (first,) = served.codec.synthetic_samples(1, np.random.default_rng(0), lengths[-1] if lengths else None)
    with one_line_errors(f"{model}: a batch of 1", SAMPLE_HINT):
        executor.call(partial(worker_device.choose_threads, Batch(model, [first]), threads)).result()
    settings = device_settings(place, stages=stages, optimise=optimise, threads=threads), source.settings(model)
    setting = ", ".join(filter(None, (*settings, cache.sample_settings(sample))))
    for warning in found.warnings:
        _log.warning("%s", warning)
    about = f"{setting}, weights {served.weights}, {_versions()}; {found.note}"
    key = cache.CacheKey(model, place.name, max_batch_size, setting, source.packages)
    subject = replace(make_subject(executor, served, open_meter(device)), conditions=conditions_of(place))
    name = f"{model}-{cache.slug(place.name)}"
    tunes = autotunes(place, served)
    return _ProfilingJob(executor, subject, name, place.name, about, max_batch_size, tunes, pads, key)


def _with_sample(source: ModelSource, model: ServedModel[Any], sample: Path | None) -> ServedModel[Any]:
    return model if sample is None else source.with_sample(model, sample)


def _versions() -> str:
    return ", ".join(f"{name} {number}" for name, number in cache.package_versions().items())


def _measure(job: _ProfilingJob, plans: _Plans) -> tuple[Profile, EnergySweep | None]:
    rng, subject = np.random.default_rng(0), job.subject
    with _progress_bar() as phase:
        profile = _service_times(job, plans, rng, phase("service times"))
        if job.stages is not None:
            repeats = QUICK_REPEATS if plans.quick else _STAGE_REPEATS
            staged = profile.in_stages(job.stages)
            profile = asyncio.run(with_stages(staged, subject, job.quick_plan().sizes, repeats, phase("stages")))
        if subject.by_length is not None:
            sizes, repeats = power_of_two_sizes(job.max_batch_size), 1 if plans.quick else _LENGTH_REPEATS
            profile = asyncio.run(with_lengths(profile, subject, sizes, repeats, phase("lengths")))
        sweep = None
        if plans.energy_time != 0:
            profile, sweep = with_energy(profile, make_rig(subject, rng), plans.energies, phase("energy"))
        if job.key is not None:
            cache.remove(cache.unfinished(job.key, plans.name))
        return (padded(profile) if job.pads else profile), sweep


def _service_times(job: _ProfilingJob, plans: _Plans, rng: np.random.Generator, on_progress: OnProgress) -> Profile:
    """Measure the service times, or return those of a measurement that was interrupted later."""
    key = None if job.key is None else cache.unfinished(job.key, plans.name)
    if key is not None and (found := cache.load_unfinished(key)) is not None:
        note = f"resumed: the service times of {key.path} are used; delete it to measure them"
        Console(stderr=True).print(note, markup=False, soft_wrap=True)
        return found
    measurement = asyncio.run(measure_service_times(job.subject, plans.service_times(job), rng, on_progress))
    profile = measurement.profile(job.name, job.subject.model, job.device, job.about)
    if key is not None:
        cache.store_profile(key, profile)
    return profile


@contextmanager
def _progress_bar() -> Iterator[Callable[[str], OnProgress]]:
    """A progress bar on a terminal; a phase appears with its first progress report."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    console = Console(stderr=True)
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:

        def phase(name: str) -> OnProgress:
            task = bar.add_task(name, total=1.0, visible=False)
            return lambda share: bar.update(task, completed=share, visible=True)

        yield phase


def _write(profile: Profile, output: Path | None, plot: Path | None) -> None:
    if output is not None:
        with writing("--output", output):
            write_atomically(output, profile.to_json())
    if plot is not None:
        with writing("--plot", plot):
            plot_profile(profile, plot)


def _print_paths(output: Path | None, key: cache.CacheKey | None) -> None:
    for path in filter(None, (output, key and key.path)):
        print(f"written to {path}")


def main() -> None:
    """The console entry point."""
    run(app, "profile-model", GROUPS)


if __name__ == "__main__":
    main()
