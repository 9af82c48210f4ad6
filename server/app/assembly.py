"""Assembly of a server from its plan: models, devices, dispatchers and the application."""

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from math import ceil, inf
from time import monotonic
from typing import TYPE_CHECKING

from policies.adaptation.objective import FIRST_MARGIN
from policies.catalog import choose
from policies.objectives.frontier import SHARE
from policies.planning.pipeline_bounds import PipelineModel, split_bound
from server.api.inference import Inference, decoding_limits
from server.api.pipelines import PipelineRunner
from server.api.texts import error_renderer
from server.app.application import Application, Background
from server.app.backend import Backend, LoadedModel, ProfileSource, make_backend
from server.app.exploration import Exploration
from server.app.repository import Repository
from server.app.start_checks import DEFAULT_MAX_BATCH_SIZE, ServerPlan, model_levels
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
    backends = _with_bounds(plan, _backends(plan, profile_source))
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
        levels=model_levels(settings),
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
    background: dict[str, Background] = {"exploration": exploration.run}
    background |= _add_pipelines(plan, inference, tracing)
    app = Application(inference, version("batchwright"), repository, background)
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


def _with_bounds(plan: ServerPlan, backends: Sequence[Backend]) -> list[Backend]:
    """The devices, with the policies that keep the bounds of pipelines.

    Raises:
        SpecError: a bound cannot be kept.
    """
    specs = dict[str, str]()
    for name, seconds in plan.bounds.items():
        models = dict[str, PipelineModel]()
        for model, number in plan.pipelines[name].calls().items():
            profiles = [each.loaded[model].chosen.profile for each in backends if model in each.loaded]
            models[model] = PipelineModel(profiles[0], number or 1, len(profiles))
        for model, bound in split_bound(models, seconds, SHARE).items():
            limit = f"{1e3 * bound.response_time:.6g}"
            specs[model] = f"smdp:slo_share={limit}:{bound.share:.6g}"
            _log.info("%s gets of the bound of %s: %.4g%% within %s ms", model, name, 100 * bound.share, limit)

    def bounded(name: str, model: LoadedModel) -> LoadedModel:
        if name not in specs:
            return model
        return replace(model, chosen=choose(specs[name], model.chosen.profile, margin_share=FIRST_MARGIN))

    return [
        replace(each, loaded={name: bounded(name, model) for name, model in each.loaded.items()}) for each in backends
    ]


def _add_pipelines(plan: ServerPlan, inference: Inference, tracing: "Tracing | None") -> dict[str, Background]:
    """Add the pipelines to what serves calls; return what watches their processes."""
    settings, metrics = plan.settings, inference.metrics
    watching: dict[str, Background] = {}
    for name, source in plan.pipelines.items():
        served, worker = source.load(name, "", DEFAULT_MAX_BATCH_SIZE, 1)
        workers = [worker, *(worker.another() for _ in range(settings.pipeline_processes - 1))]
        for each in workers:
            each.on_restart = partial(metrics.restarted, f"pipeline {name}")
        runner = PipelineRunner(served, workers, inference, tracing)
        inference.pipelines[name] = runner
        inference.fleet.before_drain = [runner.drain, *inference.fleet.before_drain]  # those that call it are first
        metrics.watch_pipeline(name, partial(getattr, runner, "open_calls"))
        metrics.objective(name, plan.bounds.get(name, inf), SHARE)
        watching[f"pipeline {name}"] = partial(runner.watch, settings.hung_after_s)
    return watching


def _dispatcher(backend: Backend, metrics: Metrics, tracing: "Tracing | None") -> Dispatcher:
    """Create the dispatcher of one device, with the controller that adapts its policies."""
    settings, name = backend.plan.settings, backend.executor.name
    limits = Limits(settings.queue_capacity, settings.hung_after_s)
    chosen = {name: model.chosen for name, model in backend.loaded.items()}
    by_shape = [name for name, model in backend.loaded.items() if model.served.codec.varies_in_shape]
    levels = model_levels(settings)
    dispatcher = Dispatcher(backend.executor, chosen, metrics, monotonic, limits, by_shape, levels)
    controller = Controller(
        dispatcher, metrics, backend.meter, ThreadPoolExecutor(2, "controller"), solve_again_in_process
    )
    dispatcher.accounting.on_served, dispatcher.accounting.on_unprofiled_work = (
        controller.served,
        controller.unprofiled_work,
    )
    dispatcher.policies.on_batch_size_reduced = controller.batch_size_reduced
    dispatcher.learned, dispatcher.latest_ratio = controller.learned, controller.latest_ratio
    dispatcher.mean_rate = controller.mean_rate
    dispatcher.accounting.tracing = tracing
    for model, choice in dispatcher.chosen.items():
        metrics.policy(model, name, choice.name, choice.spec)
        metrics.objective(model, choice.objective, choice.share)
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
