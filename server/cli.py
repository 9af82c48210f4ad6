"""serve-model: the composition root of the server."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from prometheus_client import disable_created_metrics

from policies.catalog import Chosen
from policies.command import run
from policies.profile import Profile
from policies.types import SpecError
from profiler import cache
from profiler.first import first_profile, subject_of
from profiler.measure import Subject
from server.admission import Limits
from server.config import Settings, read_settings
from server.connection import TimeLimits
from server.controller import Controller
from server.dispatcher import Dispatcher
from server.emulated import EmulatedDevice
from server.energy import CountingMeter, EnergyMeter, meter_for
from server.executor import OutOfMemoryError, ThreadExecutor
from server.front import Front
from server.gateway import create_app
from server.inference import Inference
from server.intake import Intake
from server.keys import Keys, load_keys
from server.lifecycle import Listening, exit_on_sigterm, serve
from server.logs import logging_to
from server.metrics import Metrics
from server.models import AnyModel, emulated_model
from server.plan import Plan, make_plan
from server.text import TextCodec
from server.text_sizes import sizes_of
from server.text_specs import identity
from server.tls import tls_context

if TYPE_CHECKING:
    import torch

    from server.tracing import Tracing

_log = logging.getLogger("batchwright")
app = typer.Typer(add_completion=False)


@app.command()
def serve_model(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="torchvision models; or NAME=SPEC for texts: text-classifier, translator, text-generator, a FOLDER as "
            "transformers saves it, or a configuration's FILE.json",
        ),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="[MODEL=]SPEC; auto if left out")] = None,
    profile: Annotated[list[str] | None, typer.Option(help="[MODEL=]PROFILE, a shipped name or a file")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda:N or emulated:PROFILE")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="largest batch")] = None,
    weights: Annotated[str | None, typer.Option(help="auto, random or a FILE")] = None,
    guess: Annotated[
        str | None, typer.Option(help="limit, online or learned: how long a text will be, where it is not known")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="cut each network into so many, for lazy and catch-up")] = None,
    w2: Annotated[float | None, typer.Option(help="weight of power in the objective")] = None,
    slo_p95_ms: Annotated[float | None, typer.Option(help="95th percentile of the response time to keep")] = None,
    queue_capacity: Annotated[int | None, typer.Option(help="requests that may wait")] = None,
    queue_bytes: Annotated[int | None, typer.Option(help="bytes that all calls may hold")] = None,
    hung_after_s: Annotated[float | None, typer.Option(help="s after which a batch is held for hung")] = None,
    host: Annotated[str | None, typer.Option(help="address to bind")] = None,
    port: Annotated[int | None, typer.Option(help="port to bind; 0 takes a free one")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="lines: name scope sha256-of-key, calls a second if bounded")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the certificate, with its chain")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key")] = None,
    header_timeout_s: Annotated[float | None, typer.Option(help="s for a client to send its headers")] = None,
    body_timeout_s: Annotated[float | None, typer.Option(help="s for a client to send a body")] = None,
    read_timeout_s: Annotated[float | None, typer.Option(help="s for a client to take an answer")] = None,
    drain_delay_s: Annotated[float | None, typer.Option(help="s after SIGTERM in which calls are admitted yet")] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(help="URL of a collector for traces; extra otel")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, console or json")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings")] = None,
) -> None:
    """Serve models over HTTP, batching by policy."""
    flags = {name: value for name, value in locals().items() if name != "config" and value not in (None, [])}
    began = monotonic()
    exit_on_sigterm()
    reading = read_settings(flags, config)
    with logging_to(*reading.voice):
        code = _run(make_plan(reading, _kept, _CHECKS), began)
    logging.shutdown()
    os._exit(code)  # a wedged device call or sensor would keep the interpreter from ending by itself


def _run(plan: Plan, began: float) -> int:
    """Serve as planned since `began`, s; the exit code."""
    settings = plan.settings
    if settings.api_key_file is None and not _is_loopback(settings.host):
        _log.warning("whoever reaches %s may predict and steer: give --api-key-file", settings.host)
    with plan.bound as bound, _tracing(settings) as tracing:
        backend = _backend(plan)
        chosen = _choose(plan, backend.profiles)
        metrics = Metrics({model: profile.energy_source for model, profile in backend.profiles.items()})
        limits = Limits(settings.queue_capacity, settings.hung_after_s)
        dispatcher = Dispatcher(backend.executor, chosen, metrics, monotonic, limits)
        intake = Intake(settings.queue_bytes, lambda: max(1, ceil(dispatcher.backlog())))
        inference = Inference(
            backend.served, dispatcher, metrics, ThreadPoolExecutor(), settings.queue_capacity, intake
        )
        _watch(metrics, dispatcher, backend)
        controller = Controller(dispatcher, metrics, backend.meter, ThreadPoolExecutor(2, "controller"))
        dispatcher.on_served, dispatcher.on_shrunk = controller.served, controller.shrunk
        dispatcher.on_staged = controller.staged
        dispatcher.delivery.tracing = tracing
        _log.info("loaded, profiled and solved in %.1f s", monotonic() - began)
        gateway = create_app(inference, cache.versions()["batchwright"])
        front = Front(gateway, _keys(settings), tracing, settings.host, metrics.refused)
        return serve(front, dispatcher, bound, settings.drain_delay_s, _listening(settings))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keys(settings: Settings) -> Keys | None:
    return None if settings.api_key_file is None else load_keys(settings.api_key_file)


def _listening(settings: Settings) -> Listening:
    limits = TimeLimits(settings.header_timeout_s, settings.body_timeout_s, settings.read_timeout_s)
    return Listening(limits, tls_context(settings.tls_cert, settings.tls_key))


@contextmanager
def _tracing(settings: Settings) -> "Iterator[Tracing | None]":
    """What traces; ends of spans that nobody has yet go out at the end."""
    if settings.otlp_endpoint is None:
        yield None
        return
    try:
        from server.tracing import tracing_to
    except ImportError as error:
        raise SpecError(f"--otlp-endpoint needs {error.name}; pip install 'batchwright[otel]'") from error
    tracing = tracing_to(settings.otlp_endpoint, cache.versions()["batchwright"])
    try:
        yield tracing
    finally:
        tracing.close()


def _check_tracing(settings: Settings) -> None:
    with _tracing(settings):
        pass


_CHECKS: Sequence[Callable[[Settings], object]] = (_keys, _listening, _check_tracing)  # before anything starts


@dataclass(frozen=True)
class _Backend:
    """What runs the models.

    Attributes:
        served: the models by name.
        executor: in front of their device.
        meter: of the device.
        profiles: by model; its largest size is the largest batch.
    """

    served: Mapping[str, AnyModel]
    executor: ThreadExecutor
    meter: EnergyMeter
    profiles: Mapping[str, Profile]


def _kept(settings: Settings, model: str, largest: int) -> Profile | None:
    """The cached profile of a model on a real device."""
    from server import torch_device

    place, device_name = torch_device.resolve_device(settings.device)
    return cache.load(cache.Key(model, device_name, largest, _about(settings, model, place)))


def _about(settings: Settings, model: str, place: "torch.device") -> str:
    """What a measured profile depends on, beside the model's name and the device's."""
    from server import torch_device

    about = torch_device.settings(place, stages=settings.stages)
    return ", ".join(filter(None, (about, identity(model, settings.specs[model]))))


def _backend(plan: Plan) -> _Backend:
    return _real(plan) if plan.played is None else _emulated(plan, plan.played)


def _emulated(plan: Plan, played: Profile) -> _Backend:
    settings, meter = plan.settings, CountingMeter()
    device = EmulatedDevice(dict.fromkeys(settings.specs, played), meter)
    served = {model: emulated_model(model, played.max_batch_size) for model in settings.specs}
    return _Backend(served, ThreadExecutor(device, settings.device), meter, plan.profiles)


def _real(plan: Plan) -> _Backend:
    # torch takes seconds to import, which an emulated device should not cost
    from server import loading, torch_device

    settings = plan.settings
    place, device_name = torch_device.resolve_device(settings.device)
    largest = {model: plan.largest(model) for model in settings.specs}
    loaded = loading.load(settings.specs, settings.weights, largest, settings.stages or 1)
    executor = ThreadExecutor(loading.device_of(loaded, place), device_name)
    meter, profiles = meter_for(str(place)), dict(plan.profiles)
    served: dict[str, AnyModel] = {}
    for model, _ in loaded:
        tunes = place.type == "cuda" and not isinstance(model.codec, TextCodec)
        if model.name not in profiles:
            key = cache.Key(model.name, device_name, model.max_batch_size, _about(settings, model.name, place))
            profiles[model.name] = _first(subject_of(executor, model, meter), key, tunes, settings.stages)
        profile = profiles[model.name] = torch_device.warmed_up(executor, model, profiles[model.name], tunes)
        codec = model.codec
        sizes = sizes_of(codec, profile, settings.guess) if isinstance(codec, TextCodec) else None
        served[model.name] = replace(model, sizes=sizes)
    return _Backend(served, executor, meter, profiles)


def _first(subject: Subject, key: cache.Key, tunes: bool, stages: int | None) -> Profile:
    try:
        return first_profile(subject, key.max_batch_size, key, tunes, stages)
    except OutOfMemoryError as error:
        raise SpecError(
            f"{key.model}: a batch of {key.max_batch_size} does not fit the memory that is free on {key.device}; "
            "give a smaller --max-batch-size"
        ) from error


def _choose(plan: Plan, profiles: Mapping[str, Profile]) -> dict[str, Chosen]:
    chosen = {model: plan.choose(model, profile) for model, profile in profiles.items()}
    for model, choice in chosen.items():
        flags = "".join(f", {key}={value}" for key, value in choice.defaults.items() if key in choice.parameters)
        _log.info("%s: policy %s%s on profile %s", model, choice.spec, flags, choice.profile.name)
        _warn(model, choice)
    return chosen


def _warn(model: str, choice: Chosen) -> None:
    """Of what serves, but hardly as it was meant."""
    profile = choice.profile
    if choice.name == "file" and choice.table is not None and choice.table.profile != profile.name:
        _log.warning("%s: policy file for profile %s, served on %s", model, choice.table.profile, profile.name)
    if profile.energies is None and any(key in choice.parameters for key in ("slo_mean_ms", "slo_p95_ms")):
        _log.warning("%s: no energies are known, so no bound saves any; it is served as fast as can be", model)


def _watch(metrics: Metrics, dispatcher: Dispatcher, backend: _Backend) -> None:
    for model, choice in dispatcher.chosen.items():
        metrics.policy(model, choice.name, choice.spec)
        readings = (dispatcher.queue_length, dispatcher.arrival_rate, lambda m: dispatcher.chosen[m].profile.capacity)
        metrics.watch(model, *(partial(read, model) for read in readings))
    metrics.watch_backlog(dispatcher.backlog)
    metrics.watch_meter(backend.executor.name, backend.meter)


def main() -> None:
    """The console entry point."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    run(app, "serve-model")


if __name__ == "__main__":
    main()
