"""Criteria of admission control, which `Dispatcher.check_room` applies: a full queue, or a late answer."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import ceil, inf

from server.errors import QueueFullError, TooLateError, TooManyShapesError

_NETWORK_SHARE = 0.05  # share of a timeout for the network, which the client's timeout includes
MAX_SHAPES = 32  # different shapes of one model that wait at once
_HALF_LIFE = 5.0  # s without an observation after which the margin is half as large


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one dispatcher.

    Attributes:
        capacity: maximum number of waiting requests.
        batch_timeout: a batch is considered hung when it takes longer than this, s, and than 20 times its
            greatest expected service time.
    """

    capacity: int = 1024
    batch_timeout: float = 30.0


DEFAULT_LIMITS = Limits()


class Lateness:
    """Margin between the least possible and the actual response time: smoothed mean plus twice the mean deviation.

    Both are estimated like the round-trip time for TCP's retransmission timeout (RFC 6298). The margin covers policies
    that wait, a busy interpreter, and a device slower than its profile. It decays without observations, because a
    server that rejects all calls observes none.
    """

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0
        self._observed_at = -inf

    def observe(self, excess: float, now: float) -> None:
        """Record that an answer was complete, or a timeout passed, `excess` s after the least possible time."""
        self._deviation += 0.25 * (abs(excess - self._mean) - self._deviation)
        self._mean += 0.125 * (excess - self._mean)
        self._observed_at = now

    def margin(self, now: float) -> float:
        """Return the time to add to the least possible response time, s."""
        learned = max(0.0, self._mean + 2.0 * self._deviation)
        return learned * 0.5 ** ((now - self._observed_at) / _HALF_LIFE) if learned else 0.0


class Admission:
    """Rejects calls whose timeout would pass before their answer.

    Attributes:
        lateness: margin learned from answers.
    """

    def __init__(self) -> None:
        self.lateness = Lateness()

    def observe(self, earliest: float, answered: float) -> None:
        """Learn from a call that was answered at `answered`, at best possible at `earliest`, s; 0 is ignored."""
        if earliest:
            self.lateness.observe(answered - earliest, answered)

    def reject_if_late(self, needed: float, timeout: float, now: float | None) -> None:
        """Check that the answer is expected within the client's timeout.

        Args:
            needed: the least time in which the device can serve this call and all earlier ones, s.
            timeout: remaining timeout of the client, s.
            now: the current instant, s; None leaves out the learned margin, which is valid only under a backlog.

        Raises:
            TooLateError: the answer is expected after the timeout.
        """
        expected = needed if now is None else needed + self.lateness.margin(now)
        late = expected - (1.0 - _NETWORK_SHARE) * timeout
        if late > 0.0:
            wait = _retry_after(late)
            raise TooLateError(
                f"the answer would take about {1e3 * expected:.0f} ms, but {1e3 * timeout:.0f} ms are left of the "
                f"timeout; retry in {wait} s",
                wait,
            )


def reject_if_full(n: int, taken: int, capacity: int, backlog: Callable[[], float]) -> None:
    """Check that `n` more requests fit into a queue with `taken` of `capacity` places taken.

    Raises:
        QueueFullError: they do not; the error has the time of the `backlog` as Retry-After.
    """
    if taken + n > capacity:
        wait = _retry_after(backlog())
        raise QueueFullError(
            f"no room for {n} more: {taken} of {capacity} places in the queue are taken; retry in {wait} s", wait
        )


def reject_if_too_many_shapes(shapes: Collection[str], backlog: Callable[[], float]) -> None:
    """Check that requests of these different shapes may wait at once.

    Each shape has batches of its own, so that many shapes would mean small batches, and a decision over all of them.

    Raises:
        TooManyShapesError: they are over the limit; the error has the time of the `backlog` as Retry-After.
    """
    if len(shapes) > MAX_SHAPES:
        wait = _retry_after(backlog())
        raise TooManyShapesError(
            f"requests of {len(shapes)} different shapes would wait, over the maximum of {MAX_SHAPES}; pad the "
            f"inputs to fewer shapes, or retry in {wait} s",
            wait,
        )


def _retry_after(time: float) -> int:
    return max(1, ceil(time))
