"""serve-model on an emulated device that logs its batches: `python -m benchmarks.servers.logged_batches ARGUMENTS`."""

from collections.abc import Mapping, Sequence
from typing import Any

import server.app.backend
from benchmarks.peer_servers.emulated_batch import BatchLog
from policies.profile import Profile
from server.backends.emulated import EmulatedDevice
from server.backends.executor import Batch
from server.energy.meters import CountingMeter
from server.models.model import Codec


class LoggedDevice(EmulatedDevice):
    """An emulated device with the log of the compared servers."""

    def __init__(
        self, profiles: Mapping[str, Profile], meter: CountingMeter, codecs: Mapping[str, Codec] | None = None
    ) -> None:
        super().__init__(profiles, meter, codecs)
        self._log = BatchLog()

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Serve the batch and log it."""
        start = self._log.started()
        outputs = super().serve(batch)
        self._log.ended(start, len(batch.inputs))
        return outputs


def main() -> None:
    """Serve with LoggedDevice in place of the emulated device."""
    server.app.backend.EmulatedDevice = LoggedDevice  # type: ignore[attr-defined]
    from server.cli import main as serve_model

    serve_model()


if __name__ == "__main__":
    main()
