"""A user's model in a worker, as a Device. Without torch."""

import logging
from collections.abc import Sequence
from typing import Any

from server.backends.executor import Batch
from server.backends.tensor_batches import Row
from server.errors import WorkerDiedError
from server.models.model import ServedModel
from server.models.tensors.codec import TensorCodec
from server.workers.remote_model import RemoteModel
from server.workers.worker import Lane

_log = logging.getLogger("batchwright.model")


class WorkerDevice:
    """A Device for one model, which its worker loads and runs on a thread of its own."""

    def __init__(self, served: ServedModel[TensorCodec], device: str) -> None:
        """Serve the model of the codec, once `load` was called; `device` is torch's name of it."""
        assert isinstance(served.codec.model, RemoteModel)
        self._name = served.name
        self._worker = served.codec.model.worker
        self._device = device
        self._lane: Lane | None = None

    def load(self) -> None:
        """Load the model.

        Raises:
            SpecError: it raised an exception.
            WorkerDiedError: its process ended.
        """
        self._lane = self._worker.lane()
        self._lane.call("load", self._device, f"loading {self._name}")

    def restart(self) -> None:
        """Load the model in a new process; the old one, which may hang, is killed."""
        _log.warning("%s is loaded again in a new process", self._name)
        if self._lane is not None:
            self._worker.replace(self._lane.process)
        self.load()

    def serve(self, batch: Batch, /) -> Sequence[Row]:
        """For each sample its outputs, arrays by name.

        Raises:
            WorkerDiedError: the process ended.
            Exception: as `TensorDevice.serve`.
        """
        if self._lane is None:
            raise WorkerDiedError("the model is not loaded")
        rows: Sequence[Row] = self._lane.call("run", batch.inputs)
        return rows

    def facts(self) -> dict[str, Any]:
        """Id of the process, number of its restarts, and why the last one died; None where there is none."""
        return {"pid": self._worker.pid, "restarts": self._worker.restarts, "last_fault": self._worker.last_fault}

    def end(self) -> None:
        """End the process."""
        self._worker.close()
