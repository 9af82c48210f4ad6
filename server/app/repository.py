"""The model repository: models are loaded again, and unloaded, while the server serves."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeVar

from policies.types import SpecError
from server.api.inference import Inference
from server.api.open_inference.repository import State
from server.app.backend import Backend, LoadedModel, ProfileSource, load_again
from server.app.start_checks import check_upstreams
from server.errors import (
    BadInputError,
    DeviceLostError,
    DeviceUnavailableError,
    DrainingError,
    ExecutionError,
    NotFoundError,
    one_line,
)
from server.models.model import ServedModel
from server.models.sources import read_again
from server.models.upstream_spec import is_upstream
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.solver_process import choose_in_process

_log = logging.getLogger("batchwright")
_POLL_INTERVAL = 0.25  # s, at which a call that waits for a load notices the shutdown
_T = TypeVar("_T")
_Staged = list[tuple[Dispatcher, LoadedModel]]  # a model on each of its devices


class Repository:
    """Loads and unloads the models that the settings list, one at a time; all methods run on the event loop.

    A model is loaded under an id of its own, beside the one in service, and takes over the name for all calls that
    begin from then on. Calls that began before are served by the model whose codec read their inputs, which is removed
    after the last one. Where the settings say `replace`, the model in service is removed first.
    """

    def __init__(
        self, inference: Inference, backends: Mapping[Dispatcher, Backend], profile_source: ProfileSource
    ) -> None:
        """`backends` are the devices by their dispatchers."""
        self._inference = inference
        self._backends = backends
        self._profile_source = profile_source
        self._changing = asyncio.Lock()
        self._loading: str | None = None
        self._numbers = count(2)  # of ids
        self._background: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(1, "load")  # that of asyncio.to_thread would delay the exit until it is loaded

    def states(self) -> list[tuple[str, State, str]]:
        """Name and state of each model, and the reason if it is not ready."""
        fleet = self._inference.fleet
        found: list[tuple[str, State, str]] = []
        for model in self._inference.models:
            if self._loading == model and model in fleet.unloaded:
                found.append((model, "LOADING", ""))
            elif fleet.is_ready(model):
                found.append((model, "READY", ""))
            else:
                found.append((model, "UNAVAILABLE", "unloaded" if model in fleet.unloaded else "not ready"))
        for name, pipeline in self._inference.pipelines.items():
            found.append((name, "READY", "") if pipeline.ready else (name, "UNAVAILABLE", "a model is not ready"))
        return found

    async def load(self, model: str) -> None:
        """Load a model from its files as they are now, and use it for all calls that begin from then on.

        It goes on if the caller is cancelled.

        Raises:
            NotFoundError: the settings do not list the model.
            SpecError: it cannot be loaded or served; the model in service stays.
            ExecutionError: loading failed otherwise; the model in service stays.
            DrainingError: the server is stopping.
        """
        self._check_listed(model)
        await self._finish(self._load(model))

    async def unload(self, model: str) -> None:
        """Reject new calls of a model; it is removed from the devices when the accepted ones are answered.

        Raises:
            NotFoundError: the settings do not list the model.
            DrainingError: the server is stopping.
        """
        self._check_listed(model)
        await self._finish(self._unload(model))

    def _check_listed(self, model: str) -> None:
        models = self._inference.models
        if model in self._inference.pipelines:
            raise BadInputError(f"{model} is a pipeline, which is loaded at start; restart the server after an edit")
        if model not in models:
            raise NotFoundError(
                f"no model {model[:80]!r}; the server's configuration lists {', '.join(models)}, others need a restart"
            )

    async def _load(self, model: str) -> None:
        async with self._changing:
            self._loading, id = model, f"{model}#{next(self._numbers)}"
            _log.info("%s: loading %s", model, id)
            try:
                if self._replaces and self._withdraw(model):
                    await self._retire(self._inference.models[model])
                self._put_in_service(model, id, await self._stage(model, id))
            except (SpecError, DeviceLostError, DeviceUnavailableError) as error:
                _log.error("%s is not loaded: %s", model, error)
                raise SpecError(f"{model} is not loaded: {error}{self._remaining(model)}") from error
            except Exception as error:
                _log.exception("%s is not loaded", model)
                raise ExecutionError(
                    f"{model} is not loaded: {type(error).__name__}: {one_line(error)}{self._remaining(model)}"
                ) from error
            finally:
                self._loading = None

    @property
    def _replaces(self) -> bool:
        return next(iter(self._backends.values())).plan.settings.reload == "replace"

    def _remaining(self, model: str) -> str:
        return "" if model in self._inference.fleet.unloaded else "; the model in service stays"

    def _run_in_thread(self, work: Callable[[], _T]) -> "asyncio.Future[_T]":
        return asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _stage(self, model: str, id: str) -> _Staged:
        """Load a model under an id on all its devices that work; if that raises, it is removed from them."""
        devices = [d for d in self._inference.fleet.devices_of(model) if not d.broken.is_set()]
        if not devices:
            raise SpecError(f"no device of {model} works; restart the server")
        staged: _Staged = []
        try:
            with _shared(devices):
                await self._run_in_thread(partial(self._load_on, devices, model, id, staged))
                await self._follow_swaps(model, staged)
        except BaseException:
            for dispatcher, _ in staged:
                self._backends[dispatcher].devices.remove(id)
            raise
        return staged

    def _load_on(self, devices: Sequence[Dispatcher], model: str, id: str, staged: _Staged) -> None:
        """Load a model under an id on these devices, in a thread; append each to `staged`."""
        backends = [self._backends[dispatcher] for dispatcher in devices]
        settings = [backend.plan.settings.only(model) for backend in backends]
        try:
            with ExitStack() as stack:
                for spec in {one.specs[model] for one in settings}:
                    stack.enter_context(read_again(spec))
                check_upstreams([one for one in settings if is_upstream(one.device)])
                for dispatcher, backend in zip(devices, backends, strict=True):
                    before = dispatcher.chosen[model]
                    staged.append((dispatcher, load_again(backend, model, id, before, self._profile_source)))
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:  # which would end the event loop
            raise SpecError(f"it raised {type(error).__name__}") from error

    async def _follow_swaps(self, model: str, staged: _Staged) -> None:
        """Choose the policies again that were swapped while the model was loaded."""
        while swapped := [
            index
            for index, (dispatcher, loaded) in enumerate(staged)
            if dispatcher.chosen[model].spec != loaded.chosen.spec
        ]:
            for index in swapped:
                dispatcher, loaded = staged[index]
                spec, chosen = dispatcher.chosen[model].spec, loaded.chosen
                again = await self._run_in_thread(partial(choose_in_process, spec, chosen.profile, chosen.defaults))
                staged[index] = dispatcher, replace(loaded, chosen=replace(again, promised=chosen.promised))

    def _put_in_service(self, model: str, id: str, staged: _Staged) -> None:
        inference, former = self._inference, self._inference.models[model]
        for dispatcher, loaded in staged:
            by_shape = loaded.served.codec.varies_in_shape
            dispatcher.policies.switch(model, id, loaded.chosen, by_shape)
            inference.metrics.policy(model, dispatcher.device, loaded.chosen.name, loaded.chosen.spec)
            inference.metrics.objective(model, loaded.chosen.objective, loaded.chosen.share)
        inference.models[model] = served = replace(staged[0][1].served, id=id)
        inference.metrics.weights(model, served.weights == "random")
        was_unloaded = model in inference.fleet.unloaded
        inference.fleet.unloaded.discard(model)
        _log.info("%s: %s is in service", model, id)
        if not was_unloaded:
            self._keep(self._retire(former))

    async def _unload(self, model: str) -> None:
        async with self._changing:
            if self._withdraw(model):
                self._keep(self._retire(self._inference.models[model]))

    def _withdraw(self, model: str) -> bool:
        """Reject new calls of a model; return False if that is so already."""
        if model in self._inference.fleet.unloaded:
            return False
        self._inference.fleet.unloaded.add(model)
        for dispatcher in self._inference.fleet.devices_of(model):
            dispatcher.policies.switch(model, None)
        _log.info("%s is unloaded: accepted calls are answered, new ones rejected", model)
        return True

    async def _retire(self, served: ServedModel) -> None:
        """Remove a loaded model from the devices after its last call."""
        await self._inference.calls_ended(served.id)
        for dispatcher in self._inference.fleet.devices_of(served.name):
            dispatcher.policies.forget(served.id)
            self._backends[dispatcher].devices.remove(served.id)
        _log.info("%s: %s is removed", served.name, served.id)

    async def _finish(self, work: Coroutine[None, None, None]) -> None:
        """Wait for a load or unload, which goes on if the caller is cancelled or the server is stopping."""
        task = self._keep(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is logged, if nothing waits
        while not task.done():
            if self._inference.fleet.shutting_down:
                raise DrainingError("the server is stopping; load the model after the restart", 1)
            await asyncio.wait((task,), timeout=_POLL_INTERVAL)
        await task

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that is not garbage-collected."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


@contextmanager
def _shared(devices: Sequence[Dispatcher]) -> Iterator[None]:
    """Mark devices as shared with a model that is being loaded in the `with` block."""
    for dispatcher in devices:
        dispatcher.accounting.shared = True
    try:
        yield
    finally:
        for dispatcher in devices:
            dispatcher.accounting.shared = False
