"""Another server as a device: its models, called over HTTP. Without torch."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from server.backends.executor import Batch, ThreadExecutor
from server.backends.model_devices import ModelDevices
from server.backends.tensor_batches import Row, checked_rows, client_errors
from server.errors import DeviceLostError, DeviceUnavailableError, ModelError
from server.models.model import ServedModel
from server.models.tensors.upstream_source import UpstreamModel

_log = logging.getLogger("batchwright.upstream")
_PROBE_INTERVAL = 0.25  # s, while the server is unavailable
_PROBE_TIMEOUT = 0.5  # s; a server that is starting may hang, and answer the next probe at once
_CHECK_TIMEOUT = 2.0  # s, of an idle server


class UpstreamDevice:
    """A Device for one model of another server."""

    def __init__(self, served: ServedModel[Any]) -> None:
        """Serve this model, whose codec is of an UpstreamModel."""
        model = served.codec.model
        assert isinstance(model, UpstreamModel)
        self._signature = served.signature
        self._model = model

    def serve(self, batch: Batch, /) -> Sequence[Row]:
        """For each sample its outputs, arrays by name.

        Raises:
            BadInputError: the server refuses the samples, or fails on a single one that has NaN or infinity.
            ModelError: it answers another error, or outputs that do not fit the signature or are not a number.
            DeviceUnavailableError: it does not answer, or is not ready.
        """
        with client_errors(batch.inputs):
            outputs = self._model.infer(batch.inputs)
            return checked_rows(self._signature, outputs, len(batch.inputs))

    def check_ready(self) -> None:
        """Ask the server whether the model is ready.

        Raises:
            DeviceUnavailableError: it is not.
        """
        self._model.check_ready(_CHECK_TIMEOUT)

    def check_recovered(self) -> None:
        """Ask the server whether the model is ready and as it was.

        Raises:
            DeviceUnavailableError: it is not.
        """
        self._model.check_ready(_PROBE_TIMEOUT)
        self._model.check_signature(_PROBE_TIMEOUT)

    def abort(self) -> None:
        """Let the call that the executor's thread is making fail; called by another thread."""
        self._model.abort()

    def end(self) -> None:
        """Close the connection; a call that another thread is making fails."""
        self._model.abort()
        self._model.close()


class UpstreamExecutor(ThreadExecutor):
    """An Executor for another server, which may be unavailable for some time."""

    def __init__(self, devices: ModelDevices, name: str) -> None:
        """Start the thread that makes the calls; all devices are UpstreamDevices of the same server."""
        super().__init__(devices, name)
        self._devices = devices

    async def restart(self, model: str, error: DeviceLostError, /) -> NoReturn:
        """Abandon the call of a batch that did not end in time.

        Raises:
            DeviceUnavailableError: always.
        """
        for device in self._upstreams():
            device.abort()
        raise DeviceUnavailableError(str(error)) from error

    def close(self) -> None:
        """End the thread after the batch that is running, and close the connections."""
        super().close()
        for device in self._upstreams():
            device.end()

    async def check(self) -> None:
        """Ask the server whether all its models are ready.

        Raises:
            DeviceUnavailableError: one is not.
        """
        await self._check(UpstreamDevice.check_ready)

    async def wait_until_available(self) -> None:
        """Probe the server until all models are ready and as they were; log each new reason why they are not."""
        reason = ""
        while True:
            await asyncio.sleep(_PROBE_INTERVAL)
            try:
                await self._check(UpstreamDevice.check_recovered)
            except DeviceUnavailableError as error:
                if str(error) != reason:
                    reason = str(error)
                    _log.warning("%s is not available: %s", self.name, reason)
            else:
                return

    def _upstreams(self) -> list[UpstreamDevice]:
        return [device for device in self._devices.all() if isinstance(device, UpstreamDevice)]

    async def _check(self, check: Callable[[UpstreamDevice], None]) -> None:
        try:
            for device in self._upstreams():
                await asyncio.wrap_future(self.call(partial(check, device)))
        except ModelError as error:
            raise DeviceUnavailableError(str(error)) from error
