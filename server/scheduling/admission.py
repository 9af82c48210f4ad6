"""Who is let in: there must be room in the queue, and time enough for the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

from server.errors import QueueFullError, TooLateError

_TRAVEL = 0.05  # of a time-out: the client's clock began before ours, and ends after
_HALF_LIFE = 5.0  # s after which half of what was learned of lateness is forgotten, if nothing more is seen


@dataclass(frozen=True, slots=True)
class Limits:
    """What the dispatcher puts up with.

    Attributes:
        capacity: requests that may wait.
        patience: a batch that takes longer than this, s, and 20 times the most that it should, is held for hung.
    """

    capacity: int = 1024
    patience: float = 30.0


DEFAULT_LIMITS = Limits()


class Lateness:
    """How much later than the least possible time answers come: smoothed mean plus twice the smoothed deviation.

    Learned as TCP learns its retransmission time-out (RFC 6298): a policy that waits, an interpreter that is busy and
    a device slower than believed all show here. It fades while nothing is seen, since whoever refuses sees nothing.
    """

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0
        self._seen_at = -inf

    def see(self, excess: float, now: float) -> None:
        """An answer came, or a time-out passed, so much after the least possible time, s."""
        self._deviation += 0.25 * (abs(excess - self._mean) - self._deviation)
        self._mean += 0.125 * (excess - self._mean)
        self._seen_at = now

    def margin(self, now: float) -> float:
        """What to add to the least possible time, s."""
        learned = max(0.0, self._mean + 2.0 * self._deviation)
        return learned * 0.5 ** ((now - self._seen_at) / _HALF_LIFE) if learned else 0.0


class Admission:
    """Admits calls by room and by time.

    Attributes:
        limits: what there is room for.
        lateness: what was learned of how late answers come.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.lateness = Lateness()

    def refuse_if_full(self, n: int, waiting: int, backlog: Callable[[], float]) -> None:
        """Check that there is room for `n` more requests beside those `waiting`.

        Raises:
            QueueFullError: there is none; it says in how many seconds of `backlog` there may be.
        """
        refuse_if_full(n, waiting, self.limits.capacity, backlog)

    def seen(self, earliest: float, answered: float) -> None:
        """A call that could be answered at `earliest` was at `answered`, s; 0 for one that tells nothing."""
        if earliest:
            self.lateness.see(answered - earliest, answered)

    def refuse_if_late(self, needed: float, timeout: float, now: float | None) -> None:
        """Check that the client will have its answer in time.

        Args:
            needed: the least time in which the device can serve this call and all before it, s.
            timeout: what is left of the client's, s.
            now: s; None where what was seen of answers under a backlog tells nothing.

        Raises:
            TooLateError: it would not, by `needed` and what was seen of answers lately.
        """
        expected = needed if now is None else needed + self.lateness.margin(now)
        late = expected - (1.0 - _TRAVEL) * timeout
        if late > 0.0:
            wait = _seconds(late)
            raise TooLateError(
                f"the answer would take about {1e3 * expected:.0f} ms, too long for a time-out with "
                f"{1e3 * timeout:.0f} ms left; come again in {wait} s",
                wait,
            )


def refuse_if_full(n: int, taken: int, capacity: int, backlog: Callable[[], float]) -> None:
    """Check that there is room for `n` more requests where so many places of the capacity are taken.

    Raises:
        QueueFullError: there is none; it says in how many seconds of `backlog` there may be.
    """
    if taken + n > capacity:
        wait = _seconds(backlog())
        raise QueueFullError(
            f"no room for {n} more: {taken} of {capacity} places in the queue are taken; come again in {wait} s", wait
        )


def _seconds(time: float) -> int:
    return max(1, ceil(time))
