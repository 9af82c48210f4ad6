"""The model repository: models are loaded again, and unloaded, while the server serves."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from policies.smdp.choice import SHARE
from policies.types import SpecError
from server.api.inference import Inference
from server.app.backend import Backend, ProfileSource, Revision, load_again
from server.app.plan import check_upstreams
from server.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    DrainingError,
    ExecutionError,
    NotFoundError,
    one_line,
)
from server.models.sources import read_again
from server.models.upstream_spec import is_upstream
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.solver_process import choose_in_process

_log = logging.getLogger("batchwright")
_COLLECT_AFTER = 1.0  # s
_POLL_INTERVAL = 0.25  # s, at which a call that waits for a load notices the shutdown
State = Literal["READY", "LOADING", "UNAVAILABLE"]
_T = TypeVar("_T")
_Staged = list[tuple[Dispatcher, Revision]]  # a revision on each of its devices


class Repository:
    """Loads and unloads the models that the settings list, one at a time; all methods run on the event loop.

    Another revision of a model is loaded beside the one in service, and replaces it for all calls that begin from then
    on. Calls that began before are served by the revision that read their inputs, which is removed after the last one.
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
        return found

    async def load(self, model: str) -> None:
        """Load a model from its files as they are now, and use it for all calls that begin from then on.

        It goes on if the caller is cancelled.

        Raises:
            NotFoundError: the settings do not list the model.
            SpecError: it cannot be loaded or served; the revision in service stays.
            ExecutionError: loading failed otherwise; the revision in service stays.
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
        if model not in models:
            raise NotFoundError(
                f"no model {model[:80]!r}; the server's configuration lists {', '.join(models)}, others need a restart"
            )

    async def _load(self, model: str) -> None:
        async with self._changing:
            self._loading = model
            _log.info("%s: loading revision %d", model, self._next_revision(model))
            try:
                self._put_in_service(model, await self._stage(model))
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
                # a revision that failed is garbage, in cycles, once its exception is handled
                asyncio.get_running_loop().call_later(_COLLECT_AFTER, gc.collect)

    def _remaining(self, model: str) -> str:
        return "" if model in self._inference.fleet.unloaded else "; the revision in service stays"

    def _run_in_thread(self, work: Callable[[], _T]) -> "asyncio.Future[_T]":
        return asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _next_revision(self, model: str) -> int:
        return self._inference.models[model].revision + 1

    async def _stage(self, model: str) -> _Staged:
        """Load the next revision of a model on all its devices that work; if that raises, it is removed from them."""
        devices = [d for d in self._inference.fleet.devices_of(model) if not d.broken.is_set()]
        if not devices:
            raise SpecError(f"no device of {model} works; restart the server")
        staged: _Staged = []
        try:
            with _shared(devices):
                await self._run_in_thread(partial(self._load_on, devices, model, staged))
                await self._follow_swaps(model, staged)
        except BaseException:
            for dispatcher, _ in staged:
                self._backends[dispatcher].devices.remove(model, self._next_revision(model))
            raise
        return staged

    def _load_on(self, devices: Sequence[Dispatcher], model: str, staged: _Staged) -> None:
        """Load the next revision of a model on these devices, in a thread; append each to `staged`."""
        backends = [self._backends[dispatcher] for dispatcher in devices]
        settings = [backend.plan.settings.only(model) for backend in backends]
        try:
            with ExitStack() as stack:
                for spec in {one.specs[model] for one in settings}:
                    stack.enter_context(read_again(spec))
                check_upstreams([one for one in settings if is_upstream(one.device)])
                for dispatcher, backend in zip(devices, backends, strict=True):
                    before, revision = dispatcher.chosen[model], self._next_revision(model)
                    staged.append((dispatcher, load_again(backend, model, revision, before, self._profile_source)))
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:  # which would end the event loop
            raise SpecError(f"it raised {type(error).__name__}") from error

    async def _follow_swaps(self, model: str, staged: _Staged) -> None:
        """Choose the policies again that were swapped while the revision was loaded."""
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

    def _put_in_service(self, model: str, staged: _Staged) -> None:
        inference, former, revision = self._inference, self._inference.models[model], self._next_revision(model)
        for dispatcher, loaded in staged:
            by_shape = loaded.served.codec.varies_in_shape
            dispatcher.set_revision(model, revision, loaded.chosen, by_shape)
            inference.metrics.policy(model, dispatcher.device, loaded.chosen.name, loaded.chosen.spec)
            inference.metrics.objective(model, loaded.chosen.objective, SHARE)
        inference.models[model] = served = replace(staged[0][1].served, revision=revision)
        inference.metrics.weights(model, served.weights == "random")
        was_unloaded = model in inference.fleet.unloaded
        inference.fleet.unloaded.discard(model)
        _log.info("%s: revision %d is in service", model, revision)
        if not was_unloaded:
            self._keep(self._retire(model, former.revision))

    async def _unload(self, model: str) -> None:
        async with self._changing:
            if model in self._inference.fleet.unloaded:
                return
            self._inference.fleet.unloaded.add(model)
            for dispatcher in self._inference.fleet.devices_of(model):
                dispatcher.set_revision(model, None)
            _log.info("%s is unloaded: accepted calls are answered, new ones rejected", model)
            self._keep(self._retire(model, self._inference.models[model].revision))

    async def _retire(self, model: str, revision: int) -> None:
        """Remove a revision from the devices after its last call."""
        await self._inference.calls_ended(model, revision)
        networks: list[Any] = []
        for dispatcher in self._inference.fleet.devices_of(model):
            dispatcher.end_revision(model)
            networks += self._backends[dispatcher].devices.remove(model, revision)
        if any(network() is not None for network in networks):  # in cycles; a collection delays all calls
            gc.unfreeze()  # see lifecycle.py
            gc.collect()
            gc.freeze()
        _log.info("%s: revision %d is removed", model, revision)

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
    """Mark devices as shared with a revision that is being loaded in the `with` block."""
    for dispatcher in devices:
        dispatcher.shared = True
    try:
        yield
    finally:
        for dispatcher in devices:
            dispatcher.shared = False
