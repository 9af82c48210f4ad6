"""A Device for several models, of which each has a Device of its own on the same hardware."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.backends.executor import (
    Batch,
    Completion,
    Device,
    DirectDevice,
    Executor,
    LoadedDevice,
    RunningBatch,
    uploaded,
    with_timeout,
)
from server.errors import DeviceLostError
from server.models.tensors.python_source import one_line_errors


class ModelDevices:
    """Runs each batch on the Device of its model, by the model's id."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        """`devices` are by model; the names are the ids."""
        self._devices = dict(devices)
        self._names = {model: model for model in devices}  # by id
        self._on_restart: Callable[[str], None] = lambda _: None

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Run the batch on its model's device."""
        return self._devices[batch.model_id].serve(batch)

    def launch(self, batch: Batch, /) -> RunningBatch | None:
        """Start the batch; None if its model's device cannot launch."""
        launch = getattr(self._devices[batch.model_id], "launch", None)
        running: RunningBatch | None = None if launch is None else launch(batch)
        return running

    def upload(self, model: str, sample: Any) -> Any:
        """Copy a sample to where the device of a model reads it, and return a batch's input in its place."""
        upload = getattr(self._devices.get(model), "upload", None)
        return sample if upload is None else upload(sample)

    def load(self) -> None:
        """Load the models that workers run.

        Raises:
            SpecError: a model raised an exception.
        """
        for name, device in self._devices.items():
            if isinstance(device, LoadedDevice):
                with one_line_errors(f"loading {name}"):
                    device.load()

    def add(self, model: str, name: str, device: Device) -> None:
        """Add a model by its id, whose device is loaded, beside others of its name. Can be called on any thread."""
        self._names[model] = name
        self._devices[model] = device
        self.watch(self._on_restart)

    def watch(self, on_restart: Callable[[str], None]) -> None:
        """Have a function called at each restart of a model's process, in any thread, with "died" or "hung"."""
        self._on_restart = on_restart
        for device in self._devices.values():
            if isinstance(device, LoadedDevice):
                device.watch(on_restart)

    def remove(self, model: str) -> None:
        """Remove a model that has no batches any more, and end its process or connection; on any thread."""
        end = getattr(self._devices.pop(model, None), "end", None)
        self._names.pop(model, None)
        if end is not None:
            end()

    def direct(self, batch: Batch) -> DirectDevice | None:
        """The device of the batch, if the event loop can hand it over; else None."""
        device: Any = self._devices.get(batch.model_id)
        return device if hasattr(device, "run") else None  # isinstance of a runtime protocol takes 20 us

    def of(self, model: str) -> Device | None:
        """The device of a model by its id; None if it was removed."""
        return self._devices.get(model)

    def worker_of(self, name: str) -> dict[str, Any]:
        """Facts of the process of the newest model of a name; empty without one."""
        own = [device for model, device in self._devices.items() if self._names.get(model) == name]
        facts: dict[str, Any] = getattr(own[-1] if own else None, "facts", dict)()
        return facts

    def all(self) -> Sequence[Device]:
        """The devices of all models."""
        return [*self._devices.values()]

    def restart(self, name: str, hung: bool) -> None:
        """Load all models of a name again, after a batch did not end in time or its process died.

        Raises:
            DeviceLostError: they have no process of their own.
        """
        devices = [*self._devices.items()]  # other threads add and remove models meanwhile
        own = [device for model, device in devices if self._names.get(model) == name]
        if not all(isinstance(device, LoadedDevice) for device in own):
            raise DeviceLostError(f"{name} cannot be loaded again")
        for device in own:
            assert isinstance(device, LoadedDevice)
            device.restart(hung)


@dataclass(slots=True)
class LoadingExecutor:
    """An Executor that runs batches of a model that is being loaded among those of the models in service.

    Attributes:
        executor: runs them.
        model: id of the model.
        name: the device's name.
        timeout: limit of each batch, with its wait for others, s; a batch that is queued behind one that hangs never
            runs.
        rest: time for other batches after each of this model, of its service time.
    """

    executor: Executor
    model: str
    name: str
    timeout: float
    rest: float = 2.0

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        """Run the batch with this model, and leave the device to the others afterwards.

        No launch is taken from its standby, since that would leave the others no time. The completion says that one
        began at the batch's end, as on a device without others. The future raises BatchTimeoutError after the timeout.
        """
        return asyncio.ensure_future(self._run(replace(batch, id=self.model, standby=None)))

    def upload(self, _: str, sample: Any) -> Any:
        """Copy a sample beforehand, if the executor can, and return a batch's input in its place."""
        (found,) = uploaded(self.executor, self.model, [sample])
        return found

    async def _run(self, batch: Batch) -> Completion:
        completion = await with_timeout(self.executor, batch, self.timeout)
        await asyncio.sleep(self.rest * (completion.finished - completion.started))
        return replace(completion, next_started=completion.finished)
