"""Who is let in: there must be room in the queue, and time enough for the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from server.errors import QueueFullError, TooLateError


@dataclass(frozen=True, slots=True)
class Limits:
    """What the dispatcher puts up with.

    Attributes:
        capacity: requests that may wait.
        patience: a batch that takes longer than this, s, and 20 times its expected service time, is held for hung.
    """

    capacity: int = 1024
    patience: float = 30.0


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Backlog:
    """What stands before a new call.

    Attributes:
        waiting: requests in the queue.
        capacity: how many may be.
        seconds: the least time in which the device serves all of them; asked only where it matters.
    """

    waiting: int
    capacity: int
    seconds: Callable[[], float]


def refusal(n: int, backlog: Backlog, timeout: float, answered_in: Callable[[], float]) -> QueueFullError | None:
    """Why `n` more samples are not admitted; None if they are.

    Args:
        n: samples of the call.
        backlog: what stands before them.
        timeout: the client's, s; inf: it has none.
        answered_in: the least time in which they and all before them are served, s. No policy answers earlier, so
            nobody is refused who could have been on time.
    """
    waiting, capacity = backlog.waiting, backlog.capacity
    if waiting + n > capacity:
        wait = _seconds(backlog.seconds())
        return QueueFullError(
            f"no room for {n} more: {waiting} of {capacity} places in the queue are taken; come again in {wait} s", wait
        )
    if timeout == float("inf"):
        return None
    needed = answered_in()
    if needed <= timeout:
        return None
    wait = _seconds(needed - timeout)
    return TooLateError(
        f"the answer would take at least {1e3 * needed:.0f} ms, over the time-out of {1e3 * timeout:.0f} ms; "
        f"come again in {wait} s",
        wait,
    )


def _seconds(time: float) -> int:
    return max(1, ceil(time))
