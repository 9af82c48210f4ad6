"""Another server as a device: its models, called over HTTP. Without torch."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from server.backends.executor import Batch, ThreadExecutor
from server.backends.tensor_batches import Row, checked_rows, odd_inputs_blamed
from server.errors import DeviceLostError, DeviceUnavailableError, ModelError
from server.models.model import ServedModel
from server.models.tensors.upstream_source import UpstreamModel

_log = logging.getLogger("batchwright.upstream")
_PROBE_INTERVAL = 0.25  # s, while the server is unavailable
_PROBE_TIMEOUT = 0.5  # s; a server that is starting may hang, and answer the next probe at once
_CHECK_TIMEOUT = 2.0  # s, of an idle server


class UpstreamDevice:
    """A Device for the models of one other server."""

    def __init__(self, models: Iterable[ServedModel[Any]]) -> None:
        """Serve these models, whose codecs are of an UpstreamModel."""
        self._served = {model.name: model for model in models}
        self._models = {name: _upstream(served) for name, served in self._served.items()}

    def serve(self, batch: Batch, /) -> Sequence[Row]:
        """For each sample its outputs, arrays by name.

        Raises:
            BadInputError: the server answers 4xx, or fails on a single sample whose inputs have NaN or infinity.
            ModelError: it answers another error, or outputs that do not fit the signature or are not a number.
            DeviceUnavailableError: it answers 503 or not at all.
        """
        with odd_inputs_blamed(batch.inputs):
            outputs = self._models[batch.model].infer(batch.inputs)
            return checked_rows(self._served[batch.model].signature, outputs, len(batch.inputs))

    def check_ready(self) -> None:
        """Ask the server whether all models are ready.

        Raises:
            DeviceUnavailableError: one is not.
        """
        for model in self._models.values():
            model.check_ready(_CHECK_TIMEOUT)

    def check_recovered(self) -> None:
        """Ask the server whether all models are ready and as they were.

        Raises:
            DeviceUnavailableError: one is not.
        """
        for model in self._models.values():
            model.check_ready(_PROBE_TIMEOUT)
            model.check_signature(_PROBE_TIMEOUT)

    def abort(self) -> None:
        """Let the call that the executor's thread is making fail; called by another thread."""
        for model in self._models.values():
            model.abort()

    def close(self) -> None:
        """Close the connections."""
        for model in self._models.values():
            model.close()


class UpstreamExecutor(ThreadExecutor):
    """An Executor for another server, which may be unavailable for some time."""

    def __init__(self, device: UpstreamDevice, name: str) -> None:
        """Start the thread that makes the calls."""
        super().__init__(device, name)
        self._upstream = device

    async def restart(self, model: str, error: DeviceLostError, /) -> NoReturn:
        """Abandon the call of a batch that did not end in time.

        Raises:
            DeviceUnavailableError: always.
        """
        self._upstream.abort()
        raise DeviceUnavailableError(str(error)) from error

    def close(self) -> None:
        """End the thread after the batch that is running, and close the connections."""
        super().close()
        self._upstream.close()

    async def check(self) -> None:
        """Ask the server whether all its models are ready.

        Raises:
            DeviceUnavailableError: one is not.
        """
        await self._check(self._upstream.check_ready)

    async def wait_until_available(self) -> None:
        """Probe the server until all models are ready and as they were; log each new reason why they are not."""
        reason = ""
        while True:
            await asyncio.sleep(_PROBE_INTERVAL)
            try:
                await self._check(self._upstream.check_recovered)
            except DeviceUnavailableError as error:
                if str(error) != reason:
                    reason = str(error)
                    _log.warning("%s is not available: %s", self.name, reason)
            else:
                return

    async def _check(self, check: Callable[[], None]) -> None:
        try:
            await asyncio.wrap_future(self.call(check))
        except ModelError as error:
            raise DeviceUnavailableError(str(error)) from error


def _upstream(served: ServedModel[Any]) -> UpstreamModel:
    model = served.codec.model
    assert isinstance(model, UpstreamModel)
    return model
