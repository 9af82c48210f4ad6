"""The memory budget of calls: bytes reserved from reading the body to the response, and samples being decoded."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.errors import RejectedError, TooLargeError

_LARGE_DIVISOR = 256  # a call that reserves more than 1/256 of the budget is large
_MAX_LARGE_DIVISOR = 2  # one call, and all large calls together, may reserve half of the budget


class MemoryBudgetError(RejectedError):
    """The memory budget cannot reserve the bytes of this call."""

    reason = "bytes"


class MemoryBudget:
    """The memory budget of all calls together.

    Large calls may reserve half of the budget, so that the other half is left to small calls.

    Attributes:
        pending: number of samples by model that have been read and are being decoded; they are not queued yet.
        limit: bytes that all calls may reserve.
        reserved: bytes that all calls have reserved.
        reserved_by_large: bytes that large calls have reserved.
    """

    def __init__(self, limit: int, retry_after: Callable[[], int] = lambda: 1) -> None:
        """Create an unused budget; `retry_after` returns the Retry-After of rejected calls, s."""
        self.pending: Counter[str] = Counter()
        self.limit = limit
        self.reserved = 0
        self.reserved_by_large = 0
        self._retry_after = retry_after

    def reservation(self) -> "Reservation":
        """Return an empty reservation for one call, a context manager that releases it."""
        return Reservation(self)

    def is_large(self, size: int) -> bool:
        """Whether a reservation of this size, bytes, is large."""
        return size > self.limit // _LARGE_DIVISOR

    def change(self, old: int, new: int) -> None:
        """Change the reservation of one call from `old` bytes to `new`.

        Raises:
            TooLargeError: the reservation is over the limit for one call.
            MemoryBudgetError: the budget cannot reserve the additional bytes now.
        """
        large = (new if self.is_large(new) else 0) - (old if self.is_large(old) else 0)
        reserved = self.reserved + new - old
        if reserved > self.limit or large > 0:
            self._check(old, new, large)
        self.reserved = reserved
        self.reserved_by_large += large

    def _check(self, old: int, new: int, large: int) -> None:
        most = self.limit // _MAX_LARGE_DIVISOR
        if new > most:
            raise TooLargeError(f"the call takes {new} bytes, over the limit of {most} for one call; send less at once")
        if self.reserved + new - old > self.limit or self.reserved_by_large + large > most:
            wait = self._retry_after()
            raise MemoryBudgetError(
                f"the memory budget has no room for {new - old} bytes: calls reserve {self.reserved} of {self.limit}, "
                f"large ones {self.reserved_by_large} of {most}; send the call again in {wait} s",
                wait,
            )


class Reservation:
    """The bytes that one call has reserved in the memory budget, and its pending samples."""

    __slots__ = ("_budget", "_pending", "_reserved")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._reserved = 0
        self._pending = ("", 0)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.end_pending()
        self.resize(0)

    def begin_pending(self, model: str, n: int) -> None:
        """Count `n` samples of the call as pending, before they are decoded."""
        self._pending = (model, n)
        self._budget.pending[model] += n

    def end_pending(self) -> None:
        """Stop counting the samples as pending, once they are queued or dropped."""
        model, n = self._pending
        if n:
            self._budget.pending[model] -= n
            self._pending = ("", 0)

    def grow(self, count: int) -> None:
        """Reserve `count` additional bytes.

        Raises:
            TooLargeError: the reservation would be over the limit for one call.
            MemoryBudgetError: the budget cannot reserve them now; the reservation is unchanged.
        """
        self.resize(self._reserved + count)

    def grow_to(self, count: int) -> None:
        """Reserve at least `count` bytes in total; raises as `grow`."""
        if count > self._reserved:
            self.resize(count)

    @contextmanager
    def temporarily(self, count: int) -> Iterator[None]:
        """Reserve `count` additional bytes during a `with` block; raises as `grow`."""
        self.grow(count)
        try:
            yield
        finally:
            self.grow(-count)

    def resize(self, count: int) -> None:
        """Reserve exactly `count` bytes in total; raises as `grow`."""
        if count != self._reserved:
            self._budget.change(self._reserved, count)
            self._reserved = count
