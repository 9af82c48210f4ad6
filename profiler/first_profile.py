"""The profile a server starts with: the cached one, else a quick measurement that is then cached."""

import asyncio
import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from policies.profile import Profile
from policies.types import SpecError
from profiler import cache
from profiler.conditions import Conditions, conditions_of, unknown_conditions
from profiler.energy_plan import quick_energy_plan
from profiler.energy_sweep import is_sensor, make_rig, with_energy
from profiler.lengths import power_of_two_sizes, with_lengths
from profiler.measure import MeasurementPlan, Subject, measure_service_times, quick_plan
from profiler.preflight import NOTHING_FOUND, Findings, preflight
from profiler.stages import QUICK_REPEATS, with_stages
from server.backends.buckets import bucket_sizes, earned_batch_size, padded, pads_to_buckets
from server.backends.executor import Batch, Executor, uploaded
from server.backends.real_device import device_settings, find_device
from server.backends.warm_up import autotunes
from server.config import Settings, by_model
from server.energy.meters import EnergyMeter, NoMeter
from server.errors import OutOfMemoryError
from server.models.model import ServedModel
from server.models.sources import source_of
from server.models.tensors.python_source import SAMPLE_HINT, one_line_errors
from server.models.upstream_spec import is_upstream

_log = logging.getLogger("batchwright.profiler")
_COLD_BYTES = 128 * 2**20  # of samples; more than the last level of cache of most servers' processors
_ESTIMATES = 2  # batches of a size
_REPEATS, _SAME = 3, 0.2  # batches of a size, and their deviation, with which a profile still holds
_MAX_COPIES = 4096  # of small samples, which stay in the cache as they do in service


def first_profile(
    subject: Subject,
    key: cache.CacheKey,
    autotunes: bool,
    found: Findings,
    stages: int | None = None,
    pads: bool = False,
) -> Profile:
    """Return the cached profile of `key`, else measure one and cache it.

    Args:
        subject: the model under measurement; nothing else uses its executor meanwhile.
        key: cache key of the profile, with the largest batch size to measure.
        autotunes: whether the device's first batch of each size is slow (cuDNN).
        found: state of the device before the measurement; its warnings are logged if a profile is measured.
        stages: number of stages the model is split into; None: it is not, and no stage is measured.
        pads: whether the device pads batches to buckets, which alone are then measured.
    """
    cached = cache.load_cached_profile(key)
    if cached is None:
        with cache.device_lock(key.device):
            cached = cache.load_cached_profile(key)  # another process may have measured it while this one waited
            if cached is None:
                for warning in found.warnings:
                    _log.warning("%s: %s", subject.model, warning)
                profile = _measure_all(subject, key, autotunes, found, stages, pads)
                if cache.store_profile(key, profile):
                    _log.info("%s: profile cached in %s", subject.model, key.path)
                return profile
    _log.info("%s: profile from %s", subject.model, key.path)
    return cached


def _measure_all(
    subject: Subject,
    key: cache.CacheKey,
    autotunes: bool,
    found: Findings,
    stages: int | None,
    pads: bool,
) -> Profile:
    plan = quick_plan(key.max_batch_size, autotunes, bucket_sizes(key.max_batch_size) if pads else ())
    model, began = subject.model, monotonic()
    _log.info("%s: measuring a quick profile up to batch size %d on %s", model, key.max_batch_size, key.device)
    profile = _measure(subject, plan, key, found)
    if stages is not None:
        staged = profile.in_stages(stages)
        progress = _Progress(f"{model}, by stage")
        profile = asyncio.run(with_stages(staged, subject, plan.sizes, QUICK_REPEATS, progress))
    if subject.by_length is not None:
        sizes = power_of_two_sizes(key.max_batch_size)
        profile = asyncio.run(with_lengths(profile, subject, sizes, 1, _Progress(f"{model}, by length")))
    _log.info("%s: profiled in %.1f s", model, monotonic() - began)
    return padded(profile) if pads else profile


class FirstProfiles:
    """The server's interface to the profiler."""

    def __init__(self) -> None:
        self._found: dict[str, Findings] = {}  # by device, before models were loaded, which is a load of its own

    def cached(self, settings: Settings, model: str, largest: int) -> Profile | None:
        """Return the cached profile of a model on a real device for batches of up to `largest`, or None."""
        key = _key(settings, model, largest)
        profile = cache.load_cached_profile(key)
        if profile is None:
            self._findings(settings)
            return None
        _log.info(
            "%s: the cached profile of %s is used, %s; delete the file, or run %s, to measure it again",
            model,
            cache.measured_at(key),
            key.path,
            _profile_model(settings, key),
        )
        return _earned(settings, profile)

    def _findings(self, settings: Settings) -> Findings:
        if settings.device not in self._found:
            self._found[settings.device] = _preflight(settings)
        return self._found[settings.device]

    def estimated(self, settings: Settings, model: ServedModel, executor: Executor) -> Profile:
        """Return a profile of a few batches, linear between their sizes and lengths.

        Raises:
            SpecError: the largest batch does not fit into the device's free memory.
        """
        key = _key(settings, model.name, model.max_batch_size)
        subject = make_subject(executor, model, NoMeter("its profile is yet to be measured"))
        with _memory_errors(key):
            return _estimate(subject, key)

    def cached_or_measured(
        self, settings: Settings, model: ServedModel, executor: Executor, meter: EnergyMeter
    ) -> Profile:
        """Return the cached profile, else measure one on the executor's device, which nothing else uses meanwhile.

        Raises:
            SpecError: the largest batch does not fit into the device's free memory.
        """
        key, tunes = _key(settings, model.name, model.max_batch_size), autotunes(settings.device, model)
        subject = replace(make_subject(executor, model, meter), conditions=_conditions(settings))
        found, pads, again = self._findings(settings), _pads(settings, model.name), _profile_model(settings, key)
        warnings = tuple(f"{each}; if the profile is wrong, measure it again: {again}" for each in found.warnings)
        found = replace(found, warnings=warnings)
        with _memory_errors(key):
            profile = first_profile(subject, key, tunes, found, settings.stages, pads)
        return _earned(settings, profile)

    def measured_while_serving(
        self, settings: Settings, model: ServedModel, executor: Executor, before: Profile
    ) -> Profile:
        """The former model's profile, if it still holds; else one of service times between other models' batches.

        Energies are estimated, and nothing is cached: a sensor measures all models together. So each batch is given the
        power that the former model took at its size; the controller corrects it by its energy readings later.

        Args:
            settings: of the device.
            model: the model.
            executor: runs its batches among those of others.
            before: profile of the model that had its name.

        Raises:
            SpecError: the largest batch does not fit into the device's free memory.
        """
        key = _key(settings, model.name, model.max_batch_size)
        tunes, pads = autotunes(settings.device, model), _pads(settings, model.name)
        subject = make_subject(executor, model, NoMeter("other models were served meanwhile"))
        with _memory_errors(key), cache.device_lock(key.device):
            if before.max_batch_size == key.max_batch_size and still_holds(before, subject):
                _log.info("%s: the new model takes the former one's service times", model.name)
                return before
            profile = _measure_all(subject, key, tunes, NOTHING_FOUND, settings.stages, pads)
        return with_power_of(before, _earned(settings, profile))

    def keep(self, settings: Settings, profile: Profile) -> None:
        """Cache a profile that was learned while serving."""
        key = _key(settings, profile.model, profile.max_batch_size)
        name = f"{profile.model}-{cache.slug(key.device)}"
        if cache.store_profile(key, replace(profile, name=name, resource=None)):
            _log.info("%s: the learned profile is cached in %s", profile.model, key.path)


def _estimate(subject: Subject, key: cache.CacheKey) -> Profile:
    """Time the sizes 1 and 2 and the largest, by length where that matters, after one batch that is not timed."""
    lengths = subject.by_length.lengths if subject.by_length is not None else ()
    sizes = sorted({1, min(2, key.max_batch_size), key.max_batch_size})
    middle = lengths[len(lengths) // 2] if lengths else None

    cpu_times = dict[int, float]()

    async def time_of(size: int, length: int | None) -> float:
        samples = subject.samples
        if length is not None and subject.by_length is not None:
            within = subject.by_length.length_within(size, length)
            samples = subject.by_length.synthetic_samples(1, np.random.default_rng(0), within)
        batch = Batch(subject.model, [samples[index % len(samples)] for index in range(size)])
        with one_line_errors(f"{subject.model}: a batch of {size}", SAMPLE_HINT):
            runs = [await subject.executor.run(batch) for _ in range(_ESTIMATES if size <= 2 else 1)]
        if length == middle and runs[0].cpu_time is not None:
            cpu_times[size] = min(run.cpu_time for run in runs if run.cpu_time is not None)
        return min(run.finished - run.started for run in runs)

    async def measure() -> dict[int | None, list[float]]:
        await time_of(1, middle)
        return {length: [await time_of(size, length) for size in sizes] for length in lengths or (None,)}

    found = asyncio.run(measure())
    every = np.arange(1, key.max_batch_size + 1)
    times = {length: np.maximum.accumulate(np.interp(every, sizes, row)).tolist() for length, row in found.items()}
    profile = Profile(
        f"{subject.model}-{cache.slug(key.device)}-estimated",
        tuple(times[middle]),
        model=subject.model,
        device=key.device,
        note=f"estimated from a few batches of the sizes {', '.join(map(str, sizes))}",
        cpu_times=tuple(np.interp(every, sizes, [cpu_times[size] for size in sizes]).tolist())
        if all(cpu_times.get(size) for size in sizes)
        else None,
    )
    if not lengths:
        return profile
    rows = tuple(zip(*(times[length] for length in lengths), strict=True))
    return replace(profile, lengths=tuple(lengths), length_service_times=rows)


def _pads(settings: Settings, model: str) -> bool:
    return pads_to_buckets(settings.device, source_of(settings.specs[model]), settings.stages, settings.optimise)


def _earned(settings: Settings, profile: Profile) -> Profile:
    """The profile up to the largest batch that is worth its time, where no setting gives the largest."""
    if settings.of(profile.model).max_batch_size is not None or not _pads(settings, profile.model):
        return profile
    return profile.truncated(earned_batch_size(profile))


def still_holds(profile: Profile, subject: Subject) -> bool:
    """Whether a few batches of the smallest and the largest size take the times of a profile."""
    sizes = tuple(sorted({1, profile.max_batch_size}))
    plan = MeasurementPlan(sizes, sizes[::-1], min_repeats=_REPEATS, max_repeats=_REPEATS, max_time=0.0)
    measured = asyncio.run(measure_service_times(subject, plan, np.random.default_rng(0), lambda share: None))
    factors = [each.mean / profile.service_time(each.batch_size) for each in measured.estimates]
    return all(abs(factor - 1.0) <= _SAME for factor in factors)


def with_power_of(before: Profile, profile: Profile) -> Profile:
    """Return `profile` with energies, J: the power of `before` at each size, or its largest, times service time."""
    if before.energies is None or before.cost_unit != "J":
        return profile
    powers = [joules / seconds for joules, seconds in zip(before.energies, before.service_times, strict=True)]
    times = enumerate(profile.service_times)
    energies = tuple(powers[min(index, len(powers) - 1)] * seconds for index, seconds in times)
    note = f"{profile.note}; energies by the power of the former model"
    return replace(profile, energies=energies, idle_power=before.idle_power, energy_source="modelled", note=note)


@contextmanager
def _memory_errors(key: cache.CacheKey) -> Iterator[None]:
    try:
        yield
    except OutOfMemoryError as error:
        raise SpecError(
            f"{key.model}: a batch of {key.max_batch_size} does not fit into the free memory of {key.device}; "
            "give a smaller --max-batch-size"
        ) from error


def _device(settings: Settings) -> tuple[str, str]:
    """The name of the device, and its settings that change service times."""
    if is_upstream(settings.device):
        return settings.device, ""
    device = find_device(settings.device)
    about = device_settings(device, stages=settings.stages, optimise=settings.optimise, threads=settings.model_threads)
    return device.name, about


def _conditions(settings: Settings) -> Callable[[], Conditions | None]:
    if is_upstream(settings.device):
        return unknown_conditions
    return conditions_of(find_device(settings.device))


def _preflight(settings: Settings) -> Findings:
    if is_upstream(settings.device):
        return NOTHING_FOUND
    return preflight(find_device(settings.device))


def _key(settings: Settings, model: str, largest: int) -> cache.CacheKey:
    device_name, device_about = _device(settings)
    source = source_of(settings.specs[model])
    model_about = source.settings(model)
    about = ", ".join(filter(None, (device_about, model_about, cache.sample_settings(_sample(settings, model)))))
    return cache.CacheKey(model, device_name, largest, about, source.packages)


def _sample(settings: Settings, model: str) -> Path | None:
    sample = by_model(settings.sample, settings.specs).get(model)
    return None if sample is None else Path(sample)


def _profile_model(settings: Settings, key: cache.CacheKey) -> str:
    """The command that measures the profile of this key again, and replaces the cached one."""
    spec, upstream = settings.specs[key.model], is_upstream(settings.device)
    flags = {  # each with its default
        "--device": (None if upstream else settings.device, "auto"),
        "--meter": (settings.of(key.model).meter if upstream else None, "none"),
        "--max-batch-size": (key.max_batch_size, None),
        "--sample": (_sample(settings, key.model), None),
        "--stages": (settings.stages, None),
        "--threads": (settings.model_threads, None),
        "--optimise": (settings.optimise, "auto"),
    }
    given = [(flag, str(value)) for flag, (value, default) in flags.items() if value not in (None, default)]
    return shlex.join(["profile-model", key.model if spec == key.model else f"{key.model}={spec}", *chain(*given)])


def make_subject(executor: Executor, model: ServedModel, meter: EnergyMeter) -> Subject:
    """A served model on a device with this meter, with its synthetic samples.

    There are so many images that batches do not find theirs in the processor's cache, as those of clients are not.
    Of a model whose inputs vary in shape only those with the shape of the first are used, since samples of different
    shapes share no batch.
    """
    codec, shape = model.codec, ""
    samples = codec.synthetic_samples(16, np.random.default_rng(1))
    if codec.varies_in_shape:
        shape = codec.shape_of(samples[0])
        samples = [sample for sample in samples if codec.shape_of(sample) == shape]
    if meter.scope != "batches":  # an emulated device does not read them
        samples = samples * cold_rounds(samples)
    samples = uploaded(executor, model.name, samples)  # a copy of each
    return Subject(executor, model.name, samples, meter, codec if codec.lengths else None, shape)


def cold_rounds(samples: Sequence[Any]) -> int:
    """How many copies of all samples are more than the processor's caches hold; 1 of samples that are not arrays."""
    if not all(isinstance(sample, np.ndarray) for sample in samples):
        return 1
    size: int = sum(sample.nbytes for sample in samples)
    rounds = max(1, -(-_COLD_BYTES // max(1, size)))
    return min(rounds, max(1, _MAX_COPIES // len(samples)))


def _measure(subject: Subject, plan: MeasurementPlan, key: cache.CacheKey, found: Findings) -> Profile:
    """Measure service times and, on a device with a sensor, the energy of four sizes, which takes about 20 s more."""
    rng, progress = np.random.default_rng(0), _Progress(subject.model)
    measurement = asyncio.run(measure_service_times(subject, plan, rng, progress))
    about = ", ".join([key.settings, *(f"{name} {number}" for name, number in cache.package_versions().items())])
    about = f"{about}; {found.note}" if found.facts else about
    profile = measurement.profile(f"{subject.model}-{cache.slug(key.device)}", subject.model, key.device, about)
    if is_sensor(subject.meter):
        _log.info("%s: measuring the energy of a few batch sizes by %s", subject.model, subject.meter.about)
    return with_energy(profile, make_rig(subject, rng), quick_energy_plan, lambda share: None)[0]


class _Progress:
    """Logs progress at every quarter, since a server's start-up has no terminal for a progress bar."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._next = 0.25

    def __call__(self, share: float) -> None:
        if share >= self._next:
            _log.info("%s: profile %d %% done", self._model, round(100 * share))
            self._next = share + 0.25
