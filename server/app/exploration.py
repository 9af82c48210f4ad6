"""What is learned beside the calls: service times of batches that they do not make; it also starts ModelThreads."""

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from policies.cpus import available_cpus
from server.api.inference import Inference
from server.app.backend import Backend, ProfileSource, executor_between, synthetic_batches
from server.app.model_threads import REST, ModelThreads
from server.backends.executor import Batch
from server.errors import one_line
from server.scheduling.dispatcher import Dispatcher

_log = logging.getLogger("batchwright")
_POLL_INTERVAL = 0.25  # s, at which a pause of the calls is noticed
_FEW, _WORTH = 4, 1.1  # size from which larger batches are tried only if it has this many times the rate of one
_LONGEST = 4.0  # largest expected time of a batch that is tried, over that of one request: a call may have to wait


class Exploration:
    """Learns beside the calls, in a twentieth of each device's time; a bit more while that device is slowed down."""

    def __init__(
        self, inference: Inference, backends: Mapping[Dispatcher, Backend], profile_source: ProfileSource
    ) -> None:
        """`backends` are the devices by their dispatchers; `profile_source` keeps what was learned."""
        self._inference = inference
        self._backends = backends
        self._profile_source = profile_source
        self._turns = {dispatcher: asyncio.Lock() for dispatcher in backends}
        self._pool = ThreadPoolExecutor(1, "exploration")

    async def run(self) -> None:
        """Learn, until cancelled or nothing is left to learn."""
        async with asyncio.TaskGroup() as tasks:
            for dispatcher, backend in self._backends.items():
                tasks.create_task(self._learn_estimated(dispatcher))
                if backend.plan.settings.model_threads is None and available_cpus() > 1:
                    for model in backend.loaded:
                        threads = ModelThreads(model, dispatcher, backend, self._inference, self._turns[dispatcher])
                        tasks.create_task(threads.run())

    async def _learn_estimated(self, dispatcher: Dispatcher) -> None:
        for model in sorted(self._backends[dispatcher].estimated):
            try:
                await self._learn(model, dispatcher)
            except Exception as error:  # noqa: BLE001  (the model is served by what is known)
                _log.warning("%s: no more batches of synthetic samples are served: %s", model, one_line(error))

    async def _learn(self, model: str, dispatcher: Dispatcher) -> None:
        """Serve synthetic samples of sizes and lengths that calls may not make, and cache the profile."""
        backend = self._backends[dispatcher]
        for length, samples in synthetic_batches(backend, model):
            await self._try_batch(dispatcher, backend, model, length, samples)
        if self._is_first(model):
            keep = partial(self._profile_source.keep, backend.plan.settings, dispatcher.learned(model))
            await asyncio.get_running_loop().run_in_executor(self._pool, keep)

    async def _try_batch(
        self, dispatcher: Dispatcher, backend: Backend, model: str, length: float, samples: list[Any]
    ) -> None:
        """Run a batch in a pause, and learn from it, unless it is not worth it or the model was replaced."""
        known, size = dispatcher.learned(model), len(samples)
        half = size // 2
        if size > known.max_batch_size:
            return
        if known.service_time(size, length) > _LONGEST * known.service_time(1, max(known.lengths or (0,))):
            return
        if half >= _FEW and half * known.service_time(1, length) < _WORTH * known.service_time(half, length):
            return
        while dispatcher.open_calls or dispatcher.accounting.shared:  # noqa: ASYNC110  (it has no event, and need not be exact)
            await asyncio.sleep(_POLL_INTERVAL)
        if not self._is_first(model):
            return
        async with self._turns[dispatcher]:
            completion = await executor_between(backend, model, REST).run(Batch(model, samples))
        if dispatcher.accounting.on_served is not None and self._is_first(model):
            took = completion.finished - completion.started
            dispatcher.accounting.on_served(model, size, took, length, completion.cpu_time)

    def _is_first(self, model: str) -> bool:
        """Whether the model that the server started with is still in service."""
        return self._inference.models[model].id == model and model not in self._inference.fleet.unloaded
