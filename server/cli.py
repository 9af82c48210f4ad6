"""serve-model: the composition root of the server."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from prometheus_client import disable_created_metrics

from policies.catalog import Chosen, choose
from policies.command import run
from policies.profile import Profile, load_profile
from server.config import Settings, by_model, load_settings
from server.dispatcher import Dispatcher
from server.emulated import EmulatedDevice
from server.energy import CountingMeter, EnergyMeter
from server.executor import ThreadExecutor
from server.gateway import create_app
from server.inference import Inference
from server.lifecycle import bind, serve
from server.metrics import Metrics
from server.models import ServedModel, emulated_model

_log = logging.getLogger("batchwright")
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
        served, executor, meter, profiles = _prepare(settings)
        chosen = _choose(settings, profiles)
        metrics = Metrics({model: profile.energy_source for model, profile in profiles.items()})
        dispatcher = Dispatcher(executor, chosen, metrics, monotonic, settings.queue_capacity)
        inference = Inference(served, dispatcher, metrics, ThreadPoolExecutor(), settings.queue_capacity)
        _watch(metrics, dispatcher, executor.name, meter)
        _log.info("loaded, profiled and solved in %.1f s", monotonic() - began)
        serve(create_app(inference, version("batchwright")), dispatcher, bound)


def _prepare(
    settings: Settings,
) -> tuple[dict[str, ServedModel], ThreadExecutor, EnergyMeter, dict[str, Profile]]:
    given = {model: load_profile(name) for model, name in by_model(settings.profile, settings.models).items()}
    if settings.device.startswith("emulated:"):
        return _emulated(settings, given)
    return _real(settings, given)


def _emulated(
    settings: Settings, given: Mapping[str, Profile]
) -> tuple[dict[str, ServedModel], ThreadExecutor, EnergyMeter, dict[str, Profile]]:
    played = load_profile(settings.device.removeprefix("emulated:")).truncated(settings.max_batch_size)
    meter = CountingMeter()
    device = EmulatedDevice(dict.fromkeys(settings.models, played), meter)
    served = {model: emulated_model(model, played.max_batch_size) for model in settings.models}
    profiles = {model: _fitting(given.get(model, played), played.max_batch_size) for model in settings.models}
    return served, ThreadExecutor(device, settings.device), meter, profiles


def _real(
    settings: Settings, given: Mapping[str, Profile]
) -> tuple[dict[str, ServedModel], ThreadExecutor, EnergyMeter, dict[str, Profile]]:
    raise NotImplementedError


def _fitting(profile: Profile, max_batch_size: int) -> Profile:
    """The profile for batches up to that size, the largest that the device takes."""
    return profile.truncated(min(max_batch_size, profile.max_batch_size))


def _choose(settings: Settings, profiles: Mapping[str, Profile]) -> dict[str, Chosen]:
    specs = by_model(settings.policy, settings.models)
    defaults: dict[str, str] = {} if settings.w2 is None else {"w2": f"{settings.w2:g}"}
    chosen = {model: choose(specs.get(model, "auto"), profile, defaults) for model, profile in profiles.items()}
    for model, choice in chosen.items():
        _log.info("%s: policy %s on profile %s", model, choice.spec, choice.profile.name)
    return chosen


def _watch(metrics: Metrics, dispatcher: Dispatcher, device: str, meter: EnergyMeter) -> None:
    for model, choice in dispatcher.chosen.items():
        metrics.policy(model, choice.name, choice.spec)
        metrics.watch(model, partial(dispatcher.queue_length, model), partial(dispatcher.arrival_rate, model))
    metrics.watch_meter(device, meter)


def main() -> None:
    """The console entry point."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    run(app)
