"""Completions whose times follow one another, as those of a device do."""

import asyncio
from collections.abc import Sequence
from typing import Any

from server.backends.executor import Completion


class Timeline:
    """The time of a device that is never idle.

    Attributes:
        now: s.
        handover: time between two batches, s.
    """

    def __init__(self, handover: float = 0.0) -> None:
        self.now = 0.0
        self.handover = handover

    def completed(self, outputs: Sequence[Any], service_time: float) -> asyncio.Future[Completion]:
        """A batch that has taken this time, s."""
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        done.set_result(Completion(outputs, self.now, self.now + service_time))
        self.now += service_time + self.handover
        return done
