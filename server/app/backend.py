"""The backend of one device: its executor, meter and models, and models that are loaded while others are served."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from policies.catalog import ModelPolicy
from policies.profile import Profile
from policies.types import SpecError
from server.app.start_checks import DevicePlan, limited, max_batch_tokens, meter_of, plan_model
from server.backends.buckets import pads_to_buckets
from server.backends.emulated import EmulatedDevice
from server.backends.executor import (
    LOAD_TIMEOUT,
    TIMEOUT_FACTOR,
    Batch,
    Device,
    Executor,
    LoadedDevice,
    ThreadExecutor,
    uploaded,
)
from server.backends.model_devices import LoadingExecutor, ModelDevices
from server.backends.real_device import find_device, open_meter
from server.backends.row_check import check_rows
from server.backends.upstream_device import UpstreamDevice, UpstreamExecutor
from server.backends.warm_up import autotunes, warm_up_and_fit
from server.backends.worker_device import WorkerDevice
from server.config import Settings, by_model
from server.energy.meters import CountingMeter, EnergyMeter
from server.errors import WorkerDiedError
from server.models.model import ServedModel
from server.models.sources import source_of
from server.models.tensors.python_source import SAMPLE_HINT, one_line_errors
from server.models.upstream_spec import is_upstream
from server.scheduling.policy_swap import log_policy
from server.scheduling.solver_process import choose_in_process
from server.workers.worker import ModelWorker

_log = logging.getLogger("batchwright")


class ProfileSource(Protocol):
    """Source of the profiles of real devices."""

    def cached(self, settings: Settings, model: str, largest: int, /) -> Profile | None:
        """The cached profile of a model for batches up to `largest`; None without one."""
        ...

    def estimated(self, settings: Settings, model: ServedModel, executor: Executor, /) -> Profile:
        """A profile of a few batches, to serve with, and to learn from.

        Raises:
            SpecError: the largest batch does not fit the device's memory.
        """
        ...

    def cached_or_measured(
        self, settings: Settings, model: ServedModel, executor: Executor, meter: EnergyMeter, /
    ) -> Profile:
        """The cached profile, else one measured now on the executor's device, which must be idle.

        Raises:
            SpecError: the largest batch does not fit the device's memory.
        """
        ...

    def measured_while_serving(
        self, settings: Settings, model: ServedModel, executor: Executor, before: Profile, /
    ) -> Profile:
        """A profile measured now on the executor's device, which serves other models meanwhile.

        `before` is the profile of the model that had its name. Raises as `cached_or_measured`.
        """
        ...

    def keep(self, settings: Settings, profile: Profile, /) -> None:
        """Cache a profile that was learned while serving."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model of a device.

    Attributes:
        served: the model.
        chosen: its policy and profile; the largest batch is the profile's.
    """

    served: ServedModel
    chosen: ModelPolicy


@dataclass(frozen=True)
class Backend:
    """One device and its models.

    Attributes:
        plan: the device's settings, and what is known of its models without loading them.
        executor: runs batches on the device.
        devices: runs the batches of each model.
        meter: energy meter of the device.
        loaded: by name, the models that the server starts with.
        estimated: names of those whose profile was estimated from a few batches.
    """

    plan: DevicePlan
    executor: ThreadExecutor
    devices: ModelDevices
    meter: EnergyMeter
    loaded: Mapping[str, LoadedModel]
    estimated: frozenset[str] = frozenset()


def make_backend(plan: DevicePlan, profile_source: ProfileSource) -> Backend:
    """Load the models of a device, and measure the profiles that are missing.

    Raises:
        SpecError: a model cannot be loaded or served.
    """
    name, meter = _name_and_meter(plan)
    loaded = _load(plan, meter)
    devices = ModelDevices({model.name: device for model, device in loaded})
    executor = (UpstreamExecutor if is_upstream(name) else ThreadExecutor)(devices, name)
    executor.call(devices.load).result()
    for model, device in loaded:
        with one_line_errors(f"{model.name}: a batch of 1", SAMPLE_HINT):
            executor.call(partial(_choose_threads, device, model, plan.settings)).result()

    estimated = set[str]()

    def profile_of(model: ServedModel) -> Profile:
        if not _serves_at_once(plan, model, meter):
            return profile_source.cached_or_measured(plan.settings, model, executor, meter)
        estimated.add(model.name)
        return profile_source.estimated(plan.settings, model, executor)

    ready = (_ready(plan, model, executor, profile_of) for model, _ in loaded)
    planned = {model.name: _planned(plan, model, profile) for model, profile in ready}
    return Backend(plan, executor, devices, meter, planned, frozenset(estimated))


def _choose_threads(device: Device, model: ServedModel, settings: Settings) -> None:
    """Choose the threads of a model on the CPU by a batch of one, of the greatest length, which takes most time."""
    if isinstance(device, WorkerDevice):
        sample = sample_alone(model, max(model.codec.lengths, default=None))
        device.choose_threads(Batch(model.name, sample), settings.model_threads)


def _serves_at_once(plan: DevicePlan, model: ServedModel, meter: EnergyMeter) -> bool:
    """Whether a model without a profile is served before one is measured.

    Not where a sensor measures the energy, which other batches would disturb; nor with stages, or a goal, for which an
    estimate is not good enough; nor on another server or a GPU, which is measured at the sizes of its graphs.
    """
    settings = plan.settings
    if settings.profile_first or settings.stages is not None or is_upstream(settings.device):
        return False
    return not (meter.source != "none" or find_device(settings.device).is_cuda or plan.has_goal(model.name))


def sample_alone(model: ServedModel, length: int | None) -> list[Any]:
    """One synthetic sample, of a length where samples differ in it."""
    return model.codec.synthetic_samples(1, np.random.default_rng(0), length)


def executor_between(backend: Backend, model: str, rest: float) -> LoadingExecutor:
    """Runs batches of a model in service, and then none for `rest` times their service time."""
    settings, profile = backend.plan.settings, backend.loaded[model].chosen.profile
    limit = max(settings.hung_after_s, TIMEOUT_FACTOR * profile.max_service_time(profile.max_batch_size))
    return LoadingExecutor(backend.executor, model, backend.executor.name, limit, rest)


def synthetic_batches(backend: Backend, model: str) -> Iterator[tuple[float, list[Any]]]:
    """Length of all samples, and samples, of batches of each power of two and length, from small to large."""
    codec, profile = backend.loaded[model].served.codec, backend.loaded[model].chosen.profile
    rng, largest = np.random.default_rng(0), profile.max_batch_size
    for _ in range(1 if codec.lengths else 4):  # so that there are enough to learn from, if calls are few
        for size in (*(2**n for n in range(1, largest.bit_length()) if 2**n < largest), largest):
            for length in codec.lengths or (None,):
                within = codec.length_within(size, length)
                samples = codec.synthetic_samples(1, rng, within)
                yield float(within or 0), uploaded(backend.executor, model, samples) * size


def load_again(backend: Backend, name: str, id: str, before: ModelPolicy, profile_source: ProfileSource) -> LoadedModel:
    """Load a model again beside the one that is served, and add it to the devices.

    It blocks for the time of loading, measuring and solving, hence it is called in a thread. The batches that warm the
    model up and measure it run between those of the models in service, once a first batch has run.

    Args:
        backend: the device.
        name: of the model.
        id: under which it is added.
        before: policy and profile of the model in service; the new one has the same policy, solved for its own profile.
        profile_source: returns or measures its profile.

    Raises:
        SpecError: it cannot be loaded or served; then it is removed.
    """
    plan = plan_model(backend.plan, name, profile_source.cached)
    ((served, device),) = _load(plan, backend.meter)
    if isinstance(device, LoadedDevice):
        _load_beside(served, device, plan.settings, served.max_batch_size if _pads(plan, name) else 1)
    backend.devices.add(id, name, device)
    limit = max(plan.settings.hung_after_s, TIMEOUT_FACTOR * before.profile.service_times[-1])
    executor = LoadingExecutor(backend.executor, id, backend.executor.name, limit)

    def profile_of(model: ServedModel) -> Profile:
        return profile_source.measured_while_serving(plan.settings, model, executor, before.profile)

    try:
        return _same_policy(before, *_ready(plan, served, executor, profile_of))
    except BaseException:
        backend.devices.remove(id)
        raise


def _load_beside(served: ServedModel, device: LoadedDevice, settings: Settings, size: int) -> None:
    """Load a model in its process, run a first batch of some size, and choose its threads, while no other model waits.

    Raises:
        SpecError: it fails, or does not end in time.
    """
    length = served.codec.length_within(size, served.codec.middle_length)
    (sample,) = served.codec.synthetic_samples(1, np.random.default_rng(0), length)
    first = partial(device.serve, Batch(served.name, [sample] * size))
    steps: tuple[tuple[str, str, Callable[[], object], float], ...] = (
        (f"loading {served.name}", "", device.load, LOAD_TIMEOUT),
        (f"{served.name}: a batch of {size}", SAMPLE_HINT, first, settings.hung_after_s),
        (f"{served.name}: a batch of 1", SAMPLE_HINT, partial(_choose_threads, device, served, settings), LOAD_TIMEOUT),
    )
    try:
        for what, hint, step, limit in steps:
            with one_line_errors(what, hint):
                _with_limit(what, step, limit, device.end)
    except BaseException:
        device.end()
        raise


def _with_limit(what: str, step: Callable[[], object], limit: float, end: Callable[[], object]) -> None:
    """Call a function, and another one that ends it if it takes longer than a limit, s.

    Raises:
        SpecError: it took longer; `what` begins the message.
        Exception: what it raised.
    """
    late = threading.Event()

    def on_late() -> None:
        late.set()
        end()

    timer = threading.Timer(limit, on_late)
    timer.start()
    try:
        step()
    except WorkerDiedError as error:
        if late.is_set():
            raise SpecError(f"{what} failed: it did not end within {limit:g} s") from error
        raise
    finally:
        timer.cancel()


def _name_and_meter(plan: DevicePlan) -> tuple[str, EnergyMeter]:
    """The name of a device, and its energy meter."""
    name = plan.settings.device
    if plan.emulated is not None:
        return name, CountingMeter()
    if is_upstream(name):
        return name, open_meter(meter_of(plan.settings))
    return find_device(name).name, open_meter(name)


def _load(plan: DevicePlan, meter: EnergyMeter) -> list[tuple[ServedModel, Device]]:
    """The models of a device, each with what runs it; those of workers are not loaded yet."""
    settings = plan.settings
    largest = {model: plan.max_batch_size(model) for model in settings.specs}
    if plan.emulated is not None:
        assert isinstance(meter, CountingMeter)
        emulated = (source_of(spec).emulate(name, largest[name]) for name, spec in settings.specs.items())
        return [
            (_labelled(model, settings), EmulatedDevice({model.name: plan.emulated}, meter, {model.name: model.codec}))
            for model in emulated
        ]
    sources = {name: source_of(spec) for name, spec in settings.specs.items()}
    samples = by_model(settings.sample, settings.specs)
    loaded = []
    for name, source in sources.items():
        model, worker = source.load(name, settings.of(name).weights, largest[name], settings.stages or 1)
        sampled = source.with_sample(model, Path(samples[name])) if name in samples else model
        if sampled.codec.lengths:
            sampled.codec.max_batch_tokens = max_batch_tokens(settings, name)
        loaded.append((sampled, _device_of(sampled, worker, settings)))
    return loaded


def _device_of(model: ServedModel, worker: ModelWorker, settings: Settings) -> Device:
    if is_upstream(settings.device):
        return UpstreamDevice(model)
    return WorkerDevice(model.name, worker, find_device(settings.device).place, settings.optimise)


def _ready(
    plan: DevicePlan, model: ServedModel, executor: Executor, profile_of: Callable[[ServedModel], Profile]
) -> tuple[ServedModel, Profile]:
    """Warm up a model that is loaded, and measure its profile by `profile_of` if none is known."""
    settings, profile = plan.settings, plan.profiles.get(model.name)
    if plan.emulated is not None:
        assert profile is not None
        return model, profile
    batches = check_rows(executor, model)
    every_size = autotunes(settings.device, model)
    profile = profile or profile_of(model)
    profile = warm_up_and_fit(
        executor, model, profile if batches else profile.truncated(1), every_size, _pads(plan, model.name)
    )
    return _labelled(model, settings), limited(settings, model.name, profile)


def _pads(plan: DevicePlan, model: str) -> bool:
    settings = plan.settings
    return pads_to_buckets(settings.device, source_of(settings.specs[model]), settings.stages, settings.optimise)


def _labelled(model: ServedModel, settings: Settings) -> ServedModel:
    """The model with the labels that the settings give it.

    Raises:
        SpecError: their number is not that of its classes.
    """
    labels = settings.labels(model.name)
    if not labels:
        return model
    classes = {spec.sample_shape[0] for spec in model.signature.outputs if spec.is_scores} - {-1}
    if classes != {len(labels)}:
        counts = ", ".join(map(str, sorted(classes))) or "no"
        raise SpecError(f"{model.name} has {len(labels)} labels and {counts} classes; give as many labels as classes")
    return replace(model, labels=labels)


def _planned(plan: DevicePlan, model: ServedModel, profile: Profile) -> LoadedModel:
    return _described(LoadedModel(model, plan.choose(model.name, profile)))


def _same_policy(before: ModelPolicy, model: ServedModel, profile: Profile) -> LoadedModel:
    if profile == before.profile:
        return _described(LoadedModel(model, before))
    chosen = choose_in_process(before.spec, profile, before.defaults)
    return _described(LoadedModel(model, replace(chosen, promised=before.promised)))


def _described(loaded: LoadedModel) -> LoadedModel:
    """Log the policy of a model, and return the model."""
    log_policy(loaded.served.name, loaded.chosen)
    return loaded
