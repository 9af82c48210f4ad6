"""Assembly of the server: from a plan to the application, its backends, dispatchers and controllers."""

import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp

from policies.catalog import Chosen
from policies.profile import Profile
from server.api.inference import Inference
from server.app.application import create_app
from server.app.plan import DevicePlan, Plan
from server.backends.emulated import EmulatedDevice
from server.backends.executor import ThreadExecutor
from server.config import Settings
from server.energy.meters import CountingMeter, EnergyMeter, LastReading, meter_for
from server.models.images import emulated_model
from server.models.model import ServedModel
from server.scheduling.admission import Limits
from server.scheduling.controller import Controller
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.auth import Keys, load_keys
from server.transport.memory_budget import MemoryBudget
from server.transport.middleware import Front

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright")


class Profiling(Protocol):
    """Source of the profiles of real devices."""

    def kept(self, settings: Settings, model: str, largest: int, /) -> Profile | None:
        """Return the cached profile of a model, for batches of up to `largest`; None where there is none."""
        ...

    def first(self, settings: Settings, model: ServedModel, executor: ThreadExecutor, meter: EnergyMeter, /) -> Profile:
        """Return the cached profile, or measure one now; nothing else may use the executor meanwhile.

        Raises:
            SpecError: the largest batch does not fit the device's memory.
        """
        ...


@dataclass(frozen=True)
class Assembled:
    """A server that is ready to run.

    Attributes:
        app: the ASGI application; its lifespan runs the dispatchers.
        fleet: the devices, each with its dispatcher.
        metrics: the server's metrics.
        keys: accepted API keys; None where none are required.
    """

    app: ASGIApp
    fleet: Fleet
    metrics: Metrics
    keys: Keys | None = None


def assemble(plan: Plan, profiling: Profiling, tracing: "Tracing | None" = None) -> Assembled:
    """Load the models, profile those without a profile, solve their policies, and assemble the server."""
    settings, metrics = plan.settings, Metrics()
    backends = _backends(plan, profiling)
    dispatchers = [
        _dispatcher(device, backend, metrics, tracing) for device, backend in zip(plan.devices, backends, strict=True)
    ]
    fleet = Fleet(dispatchers, settings.queue_capacity)
    budget = MemoryBudget(settings.queue_bytes, lambda: max(1, ceil(fleet.backlog())))
    served = backends[0].served  # all devices serve the same models
    inference = Inference(served, fleet, metrics, ThreadPoolExecutor(), settings.queue_capacity, budget)
    for model in served:
        readings = (fleet.queue_length, fleet.arrival_rate, fleet.capacity)
        metrics.watch(model, *(partial(read, model) for read in readings))
    metrics.watch_backlog(fleet.backlog)
    gateway, keys = create_app(inference, version("batchwright")), keys_of(settings)
    return Assembled(Front(gateway, keys, tracing, settings.host, metrics.refused), fleet, metrics, keys)


def _dispatcher(device: DevicePlan, backend: "_Backend", metrics: Metrics, tracing: "Tracing | None") -> Dispatcher:
    """Create the dispatcher of one device, with the controller that adapts its policies."""
    settings, name = device.settings, backend.executor.name
    limits = Limits(settings.queue_capacity, settings.hung_after_s)
    dispatcher = Dispatcher(backend.executor, _choose(device, backend.profiles), metrics, monotonic, limits)
    controller = Controller(dispatcher, metrics, backend.meter, ThreadPoolExecutor(2, "controller"))
    delivery, dispatcher.on_batch_size_reduced = dispatcher.delivery, controller.batch_size_reduced
    delivery.on_served, delivery.on_disturbed, delivery.tracing = controller.served, controller.disturbed, tracing
    for model, choice in dispatcher.chosen.items():
        metrics.policy(model, name, choice.name, choice.spec)
    metrics.watch_device(name, lambda: not dispatcher.broken.is_set())
    metrics.watch_meter(name, backend.meter.source, LastReading(backend.meter))
    return dispatcher


def keys_of(settings: Settings) -> Keys | None:
    """Load the API keys; None where none are required.

    Raises:
        SpecError: the key file cannot be used.
    """
    return None if settings.api_key_file is None else load_keys(settings.api_key_file)


@dataclass(frozen=True)
class _Backend:
    """One device with its models.

    Attributes:
        served: the models by name.
        executor: runs batches on the device.
        meter: energy meter of the device.
        profiles: profile of each model; its largest size is the maximum batch size.
    """

    served: Mapping[str, ServedModel]
    executor: ThreadExecutor
    meter: EnergyMeter
    profiles: Mapping[str, Profile]


def _backends(plan: Plan, profiling: Profiling) -> list[_Backend]:
    """Create the backend of each device, with different names."""
    backends: list[_Backend] = []
    names = Counter[str]()
    for device in plan.devices:
        backend = _real(device, profiling) if device.played is None else _emulated(device, device.played)
        executor = backend.executor
        names[executor.name] += 1
        if names[executor.name] > 1:
            executor.name += f" #{names[executor.name]}"
        backends.append(backend)
    return backends


def _emulated(plan: DevicePlan, played: Profile) -> _Backend:
    settings, meter = plan.settings, CountingMeter()
    device = EmulatedDevice(dict.fromkeys(settings.specs, played), meter)
    served = {model: emulated_model(model, played.max_batch_size) for model in settings.specs}
    return _Backend(served, ThreadExecutor(device, settings.device), meter, plan.profiles)


def _real(plan: DevicePlan, profiling: Profiling) -> _Backend:
    # importing torch takes seconds, and an emulated device does not need it
    from server.backends import loading, torch_images

    settings = plan.settings
    place, device_name = torch_images.resolve_device(settings.device)
    largest = {model: plan.largest(model) for model in settings.specs}
    loaded = loading.load(settings.specs, settings.weights, largest, settings.stages or 1)
    executor = ThreadExecutor(loading.device_of(loaded, place), device_name)
    meter, profiles = meter_for(str(place)), dict(plan.profiles)
    served: dict[str, ServedModel] = {}
    for model, _ in loaded:
        tunes = torch_images.tunes(place, model)
        if model.name not in profiles:
            profiles[model.name] = profiling.first(settings, model, executor, meter)
        warmed = torch_images.warmed_up(executor, model, profiles[model.name], tunes)
        profiles[model.name] = profile = model.codec.complete(warmed)
        served[model.name] = replace(model, sizes=model.codec.size_predictor(profile, settings.guess))
    return _Backend(served, executor, meter, profiles)


def _choose(plan: DevicePlan, profiles: Mapping[str, Profile]) -> dict[str, Chosen]:
    chosen = {model: plan.choose(model, profile) for model, profile in profiles.items()}
    for model, choice in chosen.items():
        flags = "".join(f", {key}={value}" for key, value in choice.defaults.items() if key in choice.parameters)
        _log.info("%s: policy %s%s on profile %s", model, choice.spec, flags, choice.profile.name)
        _warn(model, choice)
    return chosen


def _warn(model: str, choice: Chosen) -> None:
    """Log a warning for a policy that can be used, but probably not with the intended effect."""
    profile = choice.profile
    if choice.name == "file" and choice.table is not None and choice.table.profile != profile.name:
        _log.warning(
            "%s: the policy file was solved for profile %s and is used with profile %s",
            model,
            choice.table.profile,
            profile.name,
        )
    if profile.energies is None and any(key in choice.parameters for key in ("slo_mean_ms", "slo_p95_ms")):
        _log.warning(
            "%s: profile %s has no energies, so its policy minimises the response time only", model, profile.name
        )
