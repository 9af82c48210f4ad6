"""Priority levels of a model: which level a request is of, and the places in the queue that a level may take."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, inf

from server.errors import BadInputError

_URGENCY = re.compile(rb"(?:^|[,\s])u=([0-7])(?=$|[,;\s])")  # of a structured dictionary, RFC 9218
_DEFAULT_URGENCY = 3  # of RFC 9218; from it on a request is of the last level


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of a model.

    Attributes:
        count: L, 1 or more.
        reserved_share: of the queue that only level 1 may take.
        max_waits: of each level, s, after which a request precedes all levels; empty for none.
    """

    count: int = 1
    reserved_share: float = 0.0
    max_waits: tuple[float, ...] = ()

    def level(self, priority: int, urgency: bytes | None, least: int) -> int:
        """The level of a call.

        Args:
            priority: `parameters.priority` of the protocol: 1 is the highest, 0 the default, which is the last level.
            urgency: the header Priority (RFC 9218), which counts where the priority is 0; None without one.
            least: the first level that the client's key may have.

        Raises:
            BadInputError: the priority is beyond the last level.
        """
        if priority > self.count:
            known = "0 or 1" if self.count == 1 else f"1 to {self.count}, or 0 for the last"
            raise BadInputError(f"`priority` is {priority}, and the model has {self.count} levels; send {known}")
        return min(max(priority or self._of_header(urgency), least), self.count)

    def _of_header(self, header: bytes | None) -> int:
        match = None if header is None else _URGENCY.search(header)
        urgency = _DEFAULT_URGENCY if match is None else int(match[1])
        if urgency >= _DEFAULT_URGENCY:
            return self.count
        return 1 + floor(urgency * (self.count - 1) / _DEFAULT_URGENCY)

    def places(self, capacity: int, level: int) -> int:
        """How many of the places in the queue may be taken when a call of this level is admitted."""
        if level == 1 or self.count == 1:
            return capacity
        return max(1, floor(capacity * (1.0 - self.reserved_share)))

    def max_wait(self, level: int) -> float:
        """The time after which a request of this level precedes all others, s."""
        return self.max_waits[level - 1] if self.max_waits else inf


ONE_LEVEL = Levels()


def levels_of(levels: Mapping[str, Levels], model: str) -> Levels:
    """The levels of a model; one where it has none of its own."""
    return levels.get(model, ONE_LEVEL)
