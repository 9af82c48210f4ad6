"""The first profile: the cached one, or a quick measurement when there is none, so that a server can start at once."""

import asyncio
import logging
from time import monotonic

import numpy as np

from policies.profile import Profile
from policies.types import SpecError
from profiler import cache
from profiler.energy_plan import quick_energy_plan
from profiler.lengths import rungs, with_lengths
from profiler.measure import Plan, Subject, measure, quick_plan
from profiler.stages import with_stages
from profiler.sweep import is_sensor, rig_of, with_energy
from server.backends.executor import Executor, ThreadExecutor
from server.config import Settings
from server.energy.meters import EnergyMeter
from server.errors import OutOfMemoryError
from server.models.model import ServedModel
from server.models.text_model_spec import identity

_PASSES = 5  # through all stages
_log = logging.getLogger("batchwright.profiler")


def first_profile(
    subject: Subject, max_batch_size: int, key: cache.Key, tunes_by_size: bool, stages: int | None = None
) -> Profile:
    """The profile kept under `key`, else one measured now and kept.

    Args:
        subject: what is measured; nothing else uses its executor meanwhile.
        max_batch_size: up to which size.
        key: where the profile is kept.
        tunes_by_size: whether the device's first batch of any size is slow (cuDNN).
        stages: into how many the model is cut; None: it is not, and no stage is measured.
    """
    kept = cache.load(key)
    if kept is None:
        with cache.exclusive(key.device):
            kept = cache.load(key)  # another process may have measured it while this one waited
            if kept is None:
                return _measured_and_kept(subject, key, quick_plan(max_batch_size, tunes_by_size), stages)
    _log.info("%s: profile from %s", subject.model, key.path)
    return kept


def _measured_and_kept(subject: Subject, key: cache.Key, plan: Plan, stages: int | None) -> Profile:
    model, began = subject.model, monotonic()
    _log.info("%s: measuring a quick profile up to %d on %s", model, key.max_batch_size, key.device)
    profile = _measured(subject, plan, key)
    if stages is not None:
        staged = profile.in_stages(stages)
        profile = asyncio.run(with_stages(staged, subject, plan.sizes, _PASSES, _Progress(f"{model}, by stage")))
    if subject.texts is not None:
        steps = rungs(key.max_batch_size)
        profile = asyncio.run(with_lengths(profile, subject, steps, 1, _Progress(f"{model}, by length")))
    cache.store(key, profile)
    _log.info("%s: profiled in %.1f s, kept in %s", model, monotonic() - began, key.path)
    return profile


class FirstProfiles:
    """What a server asks of the profiler."""

    def kept(self, settings: Settings, model: str, largest: int) -> Profile | None:
        """The profile kept of a model on a real device, for batches of up to `largest`; None: there is none."""
        return cache.load(_key(settings, model, largest))

    def first(self, settings: Settings, model: ServedModel, executor: ThreadExecutor, meter: EnergyMeter) -> Profile:
        """The kept one, else one measured now on the executor's device, which nothing else uses meanwhile.

        Raises:
            SpecError: the largest batch does not fit its memory.
        """
        from server.backends import torch_images

        place, _ = torch_images.resolve_device(settings.device)
        key, tunes = _key(settings, model.name, model.max_batch_size), torch_images.autotunes(place, model)
        try:
            return first_profile(subject_of(executor, model, meter), key.max_batch_size, key, tunes, settings.stages)
        except OutOfMemoryError as error:
            raise SpecError(
                f"{key.model}: a batch of {key.max_batch_size} does not fit the memory that is free on {key.device}; "
                "give a smaller --max-batch-size"
            ) from error


def _key(settings: Settings, model: str, largest: int) -> cache.Key:
    """What a measured profile depends on, beside the model's name and the device's."""
    from server.backends import torch_images  # torch takes seconds to import, which an emulated device should not cost

    place, device_name = torch_images.resolve_device(settings.device)
    about = ", ".join(
        filter(None, (torch_images.settings(place, stages=settings.stages), identity(model, settings.specs[model])))
    )
    return cache.Key(model, device_name, largest, about)


def subject_of(executor: Executor, model: ServedModel, meter: EnergyMeter) -> Subject:
    """A served model, with samples made up for it, on a device with this meter."""
    samples = model.codec.synthetic_samples(16, np.random.default_rng(1))
    return Subject(executor, model.name, samples, meter, model.codec if model.codec.lengths else None)


def _measured(subject: Subject, plan: Plan, key: cache.Key) -> Profile:
    """Quickly, with the energy of four sizes, five seconds more, where there is a sensor."""
    rng, progress = np.random.default_rng(0), _Progress(subject.model)
    measurement = asyncio.run(measure(subject, plan, rng, progress))
    about = ", ".join([key.settings, *(f"{name} {number}" for name, number in cache.versions().items())])
    profile = measurement.profile(f"{subject.model}-{cache.slug(key.device)}", subject.model, key.device, about)
    if is_sensor(subject.meter):
        _log.info("%s: measuring the energy of a few batch sizes by %s", subject.model, subject.meter.about)
    return with_energy(profile, rig_of(subject, rng), quick_energy_plan, lambda share: None)[0]


class _Progress:
    """A log line at every quarter: a start-up has no terminal to draw a bar on."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._next = 0.25

    def __call__(self, share: float) -> None:
        if share >= self._next:
            _log.info("%s: profile %d per cent done", self._model, round(100 * share))
            self._next = share + 0.25
