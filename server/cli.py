"""serve-model: the composition root of the server."""

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from prometheus_client import disable_created_metrics

from policies.catalog import Chosen, choose
from policies.command import run
from policies.profile import Profile, load_profile
from profiler import cache
from profiler.first import first_profile
from server.config import Settings, by_model, load_settings
from server.controller import Controller
from server.dispatcher import Dispatcher
from server.emulated import EmulatedDevice
from server.energy import CountingMeter, EnergyMeter, meter_for
from server.executor import ThreadExecutor
from server.gateway import create_app
from server.inference import Inference
from server.lifecycle import bind, serve
from server.metrics import Metrics
from server.models import ServedModel, emulated_model

_log = logging.getLogger("batchwright")
_MEASURED_UP_TO = 32  # largest batch where neither a flag nor a profile says

app = typer.Typer(add_completion=False)


@app.command()
def serve_model(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL...", help="torchvision models")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="[MODEL=]SPEC; auto if left out")] = None,
    profile: Annotated[list[str] | None, typer.Option(help="[MODEL=]PROFILE, a shipped name or a file")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda:N or emulated:PROFILE[,...]")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="largest batch")] = None,
    weights: Annotated[str | None, typer.Option(help="auto, random or a FILE")] = None,
    w2: Annotated[float | None, typer.Option(help="weight of power in the objective")] = None,
    slo_p95_ms: Annotated[float | None, typer.Option(help="95th percentile of the response time to keep")] = None,
    queue_capacity: Annotated[int | None, typer.Option(help="requests that may wait")] = None,
    host: Annotated[str | None, typer.Option(help="address to bind")] = None,
    port: Annotated[int | None, typer.Option(help="port to bind; 0 takes a free one")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings")] = None,
) -> None:
    """Serve models over HTTP, batching by policy."""
    flags = {name: value for name, value in locals().items() if name != "config" and value not in (None, [])}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = load_settings(flags, config)
    with bind(settings.host, settings.port) as bound:
        began = monotonic()
        backend = _backend(settings)
        chosen = _choose(settings, backend.profiles)
        metrics = Metrics({model: profile.energy_source for model, profile in backend.profiles.items()})
        dispatcher = Dispatcher(backend.executor, chosen, metrics, monotonic, settings.queue_capacity)
        inference = Inference(backend.served, dispatcher, metrics, ThreadPoolExecutor(), settings.queue_capacity)
        _watch(metrics, dispatcher, backend)
        controller = Controller(dispatcher, metrics, backend.meter, ThreadPoolExecutor(2, "controller"))
        dispatcher.on_served = controller.served
        _log.info("loaded, profiled and solved in %.1f s", monotonic() - began)
        serve(create_app(inference, cache.versions()["batchwright"]), dispatcher, bound)


@dataclass(frozen=True)
class _Backend:
    """What runs the models.

    Attributes:
        served: the models by name.
        executor: in front of their device.
        meter: of the device.
        profiles: by model; its largest size is the largest batch.
    """

    served: Mapping[str, ServedModel]
    executor: ThreadExecutor
    meter: EnergyMeter
    profiles: Mapping[str, Profile]


def _backend(settings: Settings) -> _Backend:
    given = {model: load_profile(name) for model, name in by_model(settings.profile, settings.models).items()}
    return (_emulated if settings.device.startswith("emulated:") else _real)(settings, given)


def _emulated(settings: Settings, given: Mapping[str, Profile]) -> _Backend:
    played = load_profile(settings.device.removeprefix("emulated:")).truncated(settings.max_batch_size)
    meter = CountingMeter()
    device = EmulatedDevice(dict.fromkeys(settings.models, played), meter)
    served = {model: emulated_model(model, played.max_batch_size) for model in settings.models}
    profiles = {model: _fitting(given.get(model, played), played.max_batch_size) for model in settings.models}
    return _Backend(served, ThreadExecutor(device, settings.device), meter, profiles)


def _real(settings: Settings, given: Mapping[str, Profile]) -> _Backend:
    # torch takes seconds to import, which an emulated device should not cost
    from server import torch_device, torch_models

    place, device_name = torch_device.resolve_device(settings.device)
    largest = {model: _largest(settings, given.get(model)) for model in settings.models}
    loaded = [torch_models.load(model, settings.weights, largest[model]) for model in settings.models]
    executor = ThreadExecutor(torch_device.torch_device(loaded, place), device_name)
    meter, tunes = meter_for(str(place)), place.type == "cuda"
    profiles = {}
    for model, _ in loaded:
        if model.name in given:
            profiles[model.name] = _fitting(given[model.name], model.max_batch_size)
        else:
            key = cache.Key(model.name, device_name, model.max_batch_size, torch_device.settings(place))
            profiles[model.name] = first_profile(executor, model, meter, key, tunes)
        sizes = range(1, model.max_batch_size + 1) if tunes else (1, 2, model.max_batch_size)
        asyncio.run(torch_device.warm_up(executor, model, sizes))
    return _Backend({model.name: model for model, _ in loaded}, executor, meter, profiles)


def _largest(settings: Settings, given: Profile | None) -> int:
    if given is not None:
        return given.truncated(settings.max_batch_size).max_batch_size
    return settings.max_batch_size or _MEASURED_UP_TO


def _fitting(profile: Profile, max_batch_size: int) -> Profile:
    """The profile for batches up to that size, the largest that the device takes."""
    return profile.truncated(min(max_batch_size, profile.max_batch_size))


def _choose(settings: Settings, profiles: Mapping[str, Profile]) -> dict[str, Chosen]:
    specs = by_model(settings.policy, settings.models)
    flags = {"w2": settings.w2, "slo_p95_ms": settings.slo_p95_ms}
    defaults = {key: repr(value) for key, value in flags.items() if value is not None}
    chosen = {model: choose(specs.get(model, "auto"), profile, defaults) for model, profile in profiles.items()}
    for model, choice in chosen.items():
        _log.info("%s: policy %s on profile %s", model, choice.spec, choice.profile.name)
    return chosen


def _watch(metrics: Metrics, dispatcher: Dispatcher, backend: _Backend) -> None:
    for model, choice in dispatcher.chosen.items():
        metrics.policy(model, choice.name, choice.spec)
        metrics.watch(model, partial(dispatcher.queue_length, model), partial(dispatcher.arrival_rate, model))
    metrics.watch_meter(backend.executor.name, backend.meter)


def main() -> None:
    """The console entry point."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    run(app, "serve-model")


if __name__ == "__main__":
    main()
