"""Assembly of a server from its plan: models, devices, dispatchers and the application."""

import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from math import ceil
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp

from policies.catalog import Chosen
from policies.planning.reachability import objective_warnings
from policies.profile import Profile
from policies.smdp.choice import SHARE
from policies.types import SpecError
from server.api.inference import Inference
from server.app.application import create_app
from server.app.plan import DevicePlan, ServerPlan
from server.backends.emulated import EmulatedDevice
from server.backends.executor import ThreadExecutor
from server.config import Settings, by_model
from server.energy.meters import CountingMeter, EnergyMeter, LastReading, meter_for
from server.models.model import ServedModel
from server.models.sources import source_of
from server.scheduling.admission import Limits
from server.scheduling.controller import Controller
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.auth import Keys, load_keys
from server.transport.memory_budget import MemoryBudget
from server.transport.middleware import RequestMiddleware

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright")


class ProfileSource(Protocol):
    """Source of the profiles of real devices."""

    def cached(self, settings: Settings, model: str, largest: int, /) -> Profile | None:
        """The cached profile of a model for batches up to `largest`; None without one."""
        ...

    def cached_or_measured(
        self, settings: Settings, model: ServedModel, executor: ThreadExecutor, meter: EnergyMeter, /
    ) -> Profile:
        """The cached profile, else one measured now on the executor's device, which must be idle.

        Raises:
            SpecError: the largest batch does not fit the device's memory.
        """
        ...


@dataclass(frozen=True)
class AssembledServer:
    """A server that is ready to run.

    Attributes:
        app: the HTTP application; its lifespan runs the dispatchers.
        fleet: the devices, each with its dispatcher.
        metrics: of the whole server.
        keys: API keys; None if calls need none.
    """

    app: ASGIApp
    fleet: Fleet
    metrics: Metrics
    keys: Keys | None = None


def assemble(plan: ServerPlan, profile_source: ProfileSource, tracing: "Tracing | None" = None) -> AssembledServer:
    """Load the models, measure missing profiles, solve the policies, and build the application."""
    settings, metrics = plan.settings, Metrics()
    backends = _backends(plan, profile_source)
    dispatchers = [
        _dispatcher(device, backend, metrics, tracing) for device, backend in zip(plan.devices, backends, strict=True)
    ]
    fleet = Fleet(dispatchers, settings.queue_capacity)
    budget = MemoryBudget(settings.queue_bytes, lambda: max(1, ceil(fleet.backlog())))
    served = {name: model for backend in reversed(backends) for name, model in backend.served.items()}
    served = {name: served[name] for name in settings.specs}
    inference = Inference(served, fleet, metrics, ThreadPoolExecutor(), settings.queue_capacity, budget)
    for model in served:
        readings = (fleet.queue_length, fleet.arrival_rate, fleet.capacity)
        metrics.watch(model, *(partial(read, model) for read in readings))
        metrics.weights(model, served[model].weights == "random")
    metrics.watch_backlog(fleet.backlog)
    app, keys = create_app(inference, version("batchwright")), keys_of(settings)
    front = RequestMiddleware(
        app, keys, tracing, settings.host, metrics.access_denied, shutting_down=partial(getattr, fleet, "shutting_down")
    )
    return AssembledServer(front, fleet, metrics, keys)


def _dispatcher(device: DevicePlan, backend: "_Backend", metrics: Metrics, tracing: "Tracing | None") -> Dispatcher:
    """Create the dispatcher of one device, with the controller that adapts its policies."""
    settings, name = device.settings, backend.executor.name
    limits = Limits(settings.queue_capacity, settings.hung_after_s)
    by_shape = [model.name for model in backend.served.values() if model.codec.varies_in_shape]
    dispatcher = Dispatcher(backend.executor, _choose(device, backend.profiles), metrics, monotonic, limits, by_shape)
    controller = Controller(dispatcher, metrics, backend.meter, ThreadPoolExecutor(2, "controller"))
    dispatcher.on_served, dispatcher.on_unprofiled_work = controller.served, controller.unprofiled_work
    dispatcher.on_batch_size_reduced = controller.batch_size_reduced
    dispatcher.tracing = tracing
    for model, choice in dispatcher.chosen.items():
        metrics.policy(model, name, choice.name, choice.spec)
        metrics.objective(model, choice.objective, SHARE)
    metrics.watch_device(name, lambda: not dispatcher.broken.is_set())
    metrics.watch_meter(name, backend.meter.source, LastReading(backend.meter))
    return dispatcher


def keys_of(settings: Settings) -> Keys | None:
    """The API keys of the settings; None without --api-key-file.

    Raises:
        SpecError: the file cannot be read or has errors.
    """
    return None if settings.api_key_file is None else load_keys(settings.api_key_file)


@dataclass(frozen=True)
class _Backend:
    """One device and its models.

    Attributes:
        served: the models by name.
        executor: runs batches on the device.
        meter: energy meter of the device.
        profiles: by model; the largest batch is the profile's.
    """

    served: Mapping[str, ServedModel]
    executor: ThreadExecutor
    meter: EnergyMeter
    profiles: Mapping[str, Profile]


def _backends(plan: ServerPlan, profile_source: ProfileSource) -> list[_Backend]:
    """The backend of each device; equal device names get a number."""
    backends: list[_Backend] = []
    names = Counter[str]()
    for device in plan.devices:
        if device.emulated is None:
            backend = _real_backend(device, profile_source)
        else:
            backend = _emulated_backend(device, device.emulated)
        executor = backend.executor
        names[executor.name] += 1
        if names[executor.name] > 1:
            executor.name += f" #{names[executor.name]}"
        backends.append(backend)
    return backends


def _emulated_backend(plan: DevicePlan, profile: Profile) -> _Backend:
    settings, meter = plan.settings, CountingMeter()
    emulated = {name: source_of(spec).emulate(name, plan.max_batch_size(name)) for name, spec in settings.specs.items()}
    served = {name: _labelled(model, settings) for name, model in emulated.items()}
    codecs = {name: model.codec for name, model in served.items()}
    device = EmulatedDevice(dict.fromkeys(settings.specs, profile), meter, codecs)
    return _Backend(served, ThreadExecutor(device, settings.device), meter, plan.profiles)


def _real_backend(plan: DevicePlan, profile_source: ProfileSource) -> _Backend:
    # imported late, since torch takes seconds to import and an emulated device does not need it
    from server.backends import loading, torch_device

    settings = plan.settings
    device, device_name = torch_device.resolve_device(settings.device)
    largest = {model: plan.max_batch_size(model) for model in settings.specs}
    weights = {model: settings.of(model).weights for model in settings.specs}
    loaded = loading.load_models(settings.specs, weights, largest, settings.stages or 1)
    for name, file in by_model(settings.sample, settings.specs).items():
        sampled = source_of(settings.specs[name]).with_sample
        loaded = [(sampled(m, Path(file)) if m.name == name else m, runnable) for m, runnable in loaded]
    models = loading.make_device(loaded, device)
    executor = ThreadExecutor(models, device_name)
    executor.call(models.load).result()
    meter, profiles = meter_for(str(device)), dict(plan.profiles)
    served: dict[str, ServedModel] = {}
    for model, _ in loaded:
        autotunes = torch_device.autotunes(device, model)
        if model.name not in profiles:
            profiles[model.name] = profile_source.cached_or_measured(settings, model, executor, meter)
        warmed = torch_device.warm_up_and_fit(executor, model, profiles[model.name], autotunes)
        profiles[model.name] = profile = model.codec.complete_profile(warmed)
        predictor = model.codec.make_size_predictor(profile, settings.guess)
        served[model.name] = replace(_labelled(model, settings), size_predictor=predictor)
    return _Backend(served, executor, meter, profiles)


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


def _choose(plan: DevicePlan, profiles: Mapping[str, Profile]) -> dict[str, Chosen]:
    chosen = {model: plan.choose(model, profile) for model, profile in profiles.items()}
    for model, choice in chosen.items():
        flags = "".join(f", {key}={value}" for key, value in choice.defaults.items() if key in choice.parameters)
        _log.info("%s: policy %s%s on profile %s", model, choice.spec, flags, choice.profile.name)
        _warn(model, choice)
    return chosen


def _warn(model: str, choice: Chosen) -> None:
    """Log configurations that are valid but probably not intended."""
    profile = choice.profile
    if choice.name == "file" and choice.table is not None and choice.table.profile != profile.name:
        _log.warning(
            "%s: the policy file was solved for profile %s and is used with %s; solve it for this profile",
            model,
            choice.table.profile,
            profile.name,
        )
    if profile.energies is None and any(key in choice.parameters for key in ("slo_mean_ms", "slo_p95_ms")):
        _log.warning(
            "%s: the profile has no energies, so the fastest policy is used for any bound; give one with energies",
            model,
        )
    for warning in objective_warnings(choice):
        _log.warning("%s: %s", model, warning)
