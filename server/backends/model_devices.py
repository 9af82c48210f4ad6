"""A Device for several models, of which each has a Device of its own on the same hardware."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from server.backends.executor import Batch, Completion, Device, Executor, LoadedDevice, ThreadExecutor, with_timeout
from server.errors import BatchTimeoutError, DeviceLostError
from server.models.tensors.python_source import one_line_errors

_T = TypeVar("_T")


class ModelDevices:
    """Runs each batch on the Device of its model's revision."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        """`devices` are by model name, of the revision 0."""
        self._devices = {(model, 0): device for model, device in devices.items()}

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Run the batch on its model's device."""
        return self._devices[batch.model, batch.revision].serve(batch)

    def load(self) -> None:
        """Load the models that are loaded on the executor's thread.

        Raises:
            SpecError: a model raised an exception.
        """
        for (name, _), device in self._devices.items():
            if isinstance(device, LoadedDevice):
                with one_line_errors(f"loading {name}"):
                    device.load()

    def add(self, model: str, revision: int, device: Device) -> None:
        """Add another revision of a model, whose device is loaded. Can be called on any thread."""
        self._devices[model, revision] = device

    def remove(self, model: str, revision: int) -> None:
        """Remove a revision that has no batches any more, and end its thread or connection; on any thread."""
        end = getattr(self._devices.pop((model, revision), None), "end", None)
        if end is not None:
            end()

    def all(self) -> Sequence[Device]:
        """The devices of all revisions."""
        return [*self._devices.values()]

    def restart(self, model: str) -> None:
        """Load all users' models again, on a new thread, after a batch of `model` exceeded the batch timeout.

        Raises:
            DeviceLostError: it is no model of a user.
        """
        devices = {**self._devices}
        if not all(isinstance(device, LoadedDevice) for (name, _), device in devices.items() if name == model):
            raise DeviceLostError(f"{model} cannot be loaded again")
        for device in devices.values():
            if isinstance(device, LoadedDevice):
                device.restart()


class DeviceOnThread:
    """A LoadedDevice on a thread of its own, so that it can be loaded while the executor's thread serves others.

    Attributes:
        device: the device, which only the thread may use.
    """

    def __init__(self, device: LoadedDevice) -> None:
        """Start the thread."""
        self.device = device
        self._thread = ThreadExecutor(device)

    def call(self, function: Callable[[], _T], timeout: float | None = None) -> _T:
        """Call a function on the thread and return its result.

        Raises:
            BatchTimeoutError: it takes longer than `timeout`, s.
            Exception: whatever the function raises.
        """
        running = self._thread.call(function)
        try:
            return running.result(timeout)
        except TimeoutError as error:
            if running.done():  # the function raised it
                raise
            raise BatchTimeoutError(f"it did not end within {timeout:g} s") from error

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Run the batch."""
        return self.call(partial(self.device.serve, batch))

    def load(self) -> None:
        """Load the model."""
        self.call(self.device.load)

    def restart(self) -> None:
        """Load the model again on a new thread; the old one ends with its batch."""
        self.end()
        self._thread = ThreadExecutor(self.device)
        self.call(self.device.restart)

    def end(self) -> None:
        """End the thread after the batch that is running."""
        self._thread.end()


@dataclass(slots=True)
class RevisionExecutor:
    """An Executor that runs batches of one revision of a model among those of another executor.

    Attributes:
        executor: runs them.
        revision: the revision.
        name: the device's name.
        timeout: batch timeout, s.
    """

    executor: Executor
    revision: int
    name: str
    timeout: float

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        """Run the batch with this revision."""
        return with_timeout(self.executor, replace(batch, revision=self.revision), self.timeout)
