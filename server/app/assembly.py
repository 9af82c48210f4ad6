"""Assembly of a server from its plan: models, devices, dispatchers and the application."""

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING

from policies.objectives.frontier import SHARE
from server.api.inference import Inference, decoding_limits
from server.api.texts import error_renderer
from server.app.application import Application
from server.app.backend import Backend, ProfileSource, make_backend
from server.app.exploration import Exploration
from server.app.repository import Repository
from server.app.start_checks import ServerPlan
from server.config import Settings
from server.energy.meters import LastReading
from server.scheduling.admission import Limits
from server.scheduling.controller import Controller
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.scheduling.predictor import Predictor
from server.scheduling.solver_process import predict_in_process, solve_again_in_process
from server.telemetry.metrics import Metrics
from server.transport.auth import Keys, load_keys
from server.transport.memory_budget import MemoryBudget
from server.transport.middleware import RequestMiddleware

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright")


@dataclass(frozen=True)
class AssembledServer:
    """A server that is ready to run.

    Attributes:
        app: the HTTP application; its lifespan runs the dispatchers.
        inference: serves the inference calls.
        fleet: the devices, each with its dispatcher.
        metrics: of the whole server.
        keys: API keys; None if calls need none.
    """

    app: RequestMiddleware
    inference: Inference
    fleet: Fleet
    metrics: Metrics
    keys: Keys | None = None


def assemble(plan: ServerPlan, profile_source: ProfileSource, tracing: "Tracing | None" = None) -> AssembledServer:
    """Load the models, measure missing profiles, solve the policies, and build the application."""
    settings, metrics = plan.settings, Metrics()
    backends = _backends(plan, profile_source)
    dispatchers = {_dispatcher(backend, metrics, tracing): backend for backend in backends}
    fleet = Fleet([*dispatchers], settings.queue_capacity)
    budget = MemoryBudget(settings.queue_bytes, lambda: max(1, ceil(fleet.backlog())))
    found = {name: model.served for backend in reversed(backends) for name, model in backend.loaded.items()}
    served = {name: found[name] for name in settings.specs}
    inference = Inference(
        served,
        fleet,
        metrics,
        ThreadPoolExecutor(),
        settings.queue_capacity,
        budget,
        max_json_bytes=settings.max_json_bytes,
        **({} if settings.decoding_threads is None else decoding_limits(settings.decoding_threads)),
    )
    for model, described in served.items():
        readings = (fleet.queue_length, fleet.arrival_rate, fleet.capacity)
        metrics.watch(model, *(partial(read, model) for read in readings))
        metrics.weights(model, described.weights == "random")
    metrics.watch_backlog(fleet.backlog)
    for dispatcher in dispatchers:
        pool = ThreadPoolExecutor(1, "predictor")
        predictor = Predictor(dispatcher, metrics, predict_in_process, pool)
        metrics.observe_batches(dispatcher.device, predictor.completed)
        inference.predictors[dispatcher.device] = predictor
    repository = Repository(inference, dispatchers, profile_source)
    exploration = Exploration(inference, dispatchers, profile_source)
    app = Application(inference, version("batchwright"), repository, {"exploration": exploration.run})
    keys = keys_of(settings)
    requests = RequestMiddleware(
        app,
        keys,
        tracing,
        settings.host,
        metrics.access_denied,
        shutting_down=partial(getattr, fleet, "shutting_down"),
        find_inference=app.find_inference,
        error_renderer=error_renderer,
    )
    return AssembledServer(requests, inference, fleet, metrics, keys)


def _dispatcher(backend: Backend, metrics: Metrics, tracing: "Tracing | None") -> Dispatcher:
    """Create the dispatcher of one device, with the controller that adapts its policies."""
    settings, name = backend.plan.settings, backend.executor.name
    limits = Limits(settings.queue_capacity, settings.hung_after_s)
    chosen = {name: model.chosen for name, model in backend.loaded.items()}
    by_shape = [name for name, model in backend.loaded.items() if model.served.codec.varies_in_shape]
    dispatcher = Dispatcher(backend.executor, chosen, metrics, monotonic, limits, by_shape)
    controller = Controller(
        dispatcher, metrics, backend.meter, ThreadPoolExecutor(2, "controller"), solve_again_in_process
    )
    dispatcher.accounting.on_served, dispatcher.accounting.on_unprofiled_work = (
        controller.served,
        controller.unprofiled_work,
    )
    dispatcher.policies.on_batch_size_reduced, dispatcher.learned = controller.batch_size_reduced, controller.learned
    dispatcher.accounting.tracing = tracing
    for model, choice in dispatcher.chosen.items():
        metrics.policy(model, name, choice.name, choice.spec)
        metrics.objective(model, choice.objective, SHARE)
    metrics.watch_device(name, lambda: dispatcher.up)
    backend.devices.watch(partial(metrics.restarted, name))
    metrics.watch_meter(name, backend.meter.source, LastReading(backend.meter))
    return dispatcher


def keys_of(settings: Settings) -> Keys | None:
    """The API keys of the settings; None without --api-key-file.

    Raises:
        SpecError: the file cannot be read or has errors.
    """
    return None if settings.api_key_file is None else load_keys(settings.api_key_file)


def _backends(plan: ServerPlan, profile_source: ProfileSource) -> list[Backend]:
    """The backend of each device; equal device names get a number."""
    backends: list[Backend] = []
    names = Counter[str]()
    for device in plan.devices:
        backend = make_backend(device, profile_source)
        executor = backend.executor
        names[executor.name] += 1
        if names[executor.name] > 1:
            executor.name += f" #{names[executor.name]}"
        backends.append(backend)
    return backends
