"""A Device for several models, of which each has a Device of its own on the same hardware."""

import asyncio
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any, TypeVar
from weakref import ref

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

_DEPTH = 8  # of references in which networks are searched
_OTHERS_PART = 2.0  # time for other batches after one of a revision that is being measured, of its service time
_T = TypeVar("_T")


class ModelDevices:
    """Runs each batch on the Device of its model's revision."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        """`devices` are by model name, of the revision 0."""
        self._devices = {(model, 0): device for model, device in devices.items()}

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Run the batch on its model's device."""
        return self._devices[batch.model, batch.revision].serve(batch)

    def launch(self, batch: Batch, /) -> RunningBatch | None:
        """Start the batch; None if its model's device cannot launch."""
        launch = getattr(self._devices[batch.model, batch.revision], "launch", None)
        running: RunningBatch | None = None if launch is None else launch(batch)
        return running

    def upload(self, model: str, revision: int, sample: Any) -> Any:
        """Start the copy of a sample to its model's device, if that can, and return a batch's input in its place."""
        upload = getattr(self._devices.get((model, revision)), "upload", None)
        return sample if upload is None else upload(sample)

    def load(self) -> None:
        """Load the models of users.

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

    def remove(self, model: str, revision: int) -> "Sequence[ref[Any]]":
        """Remove a revision that has no batches any more, and end its process or connection; on any thread.

        Returns:
            References to its networks: those that are still alive are in reference cycles.
        """
        device = self._devices.pop((model, revision), None)
        end = getattr(device, "end", None)
        if end is not None:
            end()
        return _networks(device)

    def direct(self, batch: Batch) -> DirectDevice | None:
        """The device of the batch, if the event loop can hand it over; else None."""
        device = self._devices.get((batch.model, batch.revision))
        return device if isinstance(device, DirectDevice) else None

    def worker_of(self, model: str) -> dict[str, Any]:
        """Facts of the process of a model's newest revision; empty without one."""
        device = next((device for (name, _), device in reversed(self._devices.items()) if name == model), None)
        facts: dict[str, Any] = getattr(device, "facts", dict)()
        return facts

    def all(self) -> Sequence[Device]:
        """The devices of all revisions."""
        return [*self._devices.values()]

    def restart(self, model: str, hung: bool) -> None:
        """Load a user's model again, in all its revisions, after a batch did not end in time or its process died.

        Raises:
            DeviceLostError: it is no model of a user.
        """
        own = [device for (name, _), device in self._devices.items() if name == model]
        if not all(isinstance(device, LoadedDevice) for device in own):
            raise DeviceLostError(f"{model} cannot be loaded again")
        for device in own:
            assert isinstance(device, LoadedDevice)
            device.restart(hung)


def _networks(root: object) -> "list[ref[Any]]":
    """References to the torch modules that an object refers to, directly or by a few others."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found, seen, level = list["ref[Any]"](), set[int](), [root]
    for _ in range(_DEPTH):
        below = list[Any]()
        for each in level:
            if isinstance(each, torch.nn.Module):
                found += map(ref, each.modules())
            elif id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
                below += gc.get_referents(each)
            seen.add(id(each))
        level = below
    return found


@dataclass(slots=True)
class RevisionExecutor:
    """An Executor that runs batches of one revision of a model among those of another executor.

    Attributes:
        executor: runs them.
        revision: the revision.
        name: the device's name.
        timeout: limit of each batch, with its wait for others, s; a batch that is queued behind one that hangs never
            runs.
    """

    executor: Executor
    revision: int
    name: str
    timeout: float

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        """Run the batch with this revision, and leave the device to the others afterwards for twice as long.

        No launch is taken from its standby, since that would leave the others no time. The completion says that one
        began at the batch's end, as on a device without others. The future raises BatchTimeoutError after the timeout.
        """
        return asyncio.ensure_future(self._run(replace(batch, revision=self.revision, standby=None)))

    def upload(self, model: str, _: int, sample: Any) -> Any:
        """Start the copy of a sample to the device, if the executor can, and return a batch's input in its place."""
        (found,) = uploaded(self.executor, model, [sample], self.revision)
        return found

    async def _run(self, batch: Batch) -> Completion:
        completion = await with_timeout(self.executor, batch, self.timeout)
        await asyncio.sleep(_OTHERS_PART * (completion.finished - completion.started))
        return replace(completion, next_started=completion.finished)
