"""The memory budget of calls: bytes that they may hold until they are answered, and samples that are being decoded."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.errors import QueueFullError, TooLargeError

_LARGE = 256  # a call that holds more than 1/256 of the budget is large
_PART_OF_LARGE = 2  # large calls together may hold half of the budget, so that small calls find room


class MemoryBudgetError(QueueFullError):
    """The memory budget has no room for the bytes of this call."""

    reason = "bytes"


class MemoryBudget:
    """The memory budget of all calls together.

    Large calls share half of the budget, so that no number of them keeps small calls out.

    Attributes:
        pending: by model, samples that have been read and are being decoded; they are not in the queue yet.
        all_pending: the same of all models together.
        limit: bytes that all calls may hold.
        held: bytes that they hold.
        held_by_large: bytes that large calls hold.
    """

    def __init__(self, limit: int, retry_after: Callable[[], int] = lambda: 1) -> None:
        """`retry_after` returns the time after which a rejected call should be sent again, s."""
        self.pending: Counter[str] = Counter()
        self.all_pending = 0
        self.limit = limit
        self.held = 0
        self.held_by_large = 0
        self._retry_after = retry_after

    def reservation(self) -> "Reservation":
        """An empty reservation for one call, as a context manager that releases it."""
        return Reservation(self)

    def change(self, old: int, new: int) -> None:
        """Change the reservation of one call from `old` bytes to `new`.

        Raises:
            TooLargeError: no single call may hold so many.
            MemoryBudgetError: there is no room for the additional bytes now.
        """
        least = self.limit // _LARGE
        large = (new if new > least else 0) - (old if old > least else 0)
        held = self.held + new - old
        if held > self.limit or large > 0:
            self._check(old, new, large)
        self.held = held
        self.held_by_large += large

    def _check(self, old: int, new: int, large: int) -> None:
        most = self.limit // _PART_OF_LARGE
        if new > most:
            raise TooLargeError(f"the call takes {new} bytes, over the limit of {most} for one call; send less at once")
        if self.held + new - old > self.limit or self.held_by_large + large > most:
            wait = self._retry_after()
            raise MemoryBudgetError(
                f"no room for {new - old} bytes: calls hold {self.held} of {self.limit}, large ones "
                f"{self.held_by_large} of {most}; send the call again in {wait} s",
                wait,
            )


class Reservation:
    """The bytes that one call holds in the memory budget."""

    __slots__ = ("_budget", "_held", "_pending")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._held = 0
        self._pending = ("", 0)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.end_pending()
        self.resize(0)

    def begin_pending(self, model: str, n: int) -> None:
        """Count `n` samples of the call that are about to be decoded, before they are queued."""
        self._pending = (model, n)
        self._budget.pending[model] += n
        self._budget.all_pending += n

    def end_pending(self) -> None:
        """Do not count them any more: they are queued, or dropped."""
        model, n = self._pending
        if n:
            self._budget.pending[model] -= n
            self._budget.all_pending -= n
            self._pending = ("", 0)

    def grow(self, count: int) -> None:
        """Reserve so many bytes more.

        Raises:
            TooLargeError: no single call may hold so many.
            MemoryBudgetError: there is no room for them; the reservation stays as it was.
        """
        self._budget.change(self._held, self._held + count)
        self._held += count

    def grow_to(self, count: int) -> None:
        """Reserve at least so many bytes; raises as `grow`."""
        if count > self._held:
            self.grow(count - self._held)

    @contextmanager
    def temporarily(self, count: int) -> Iterator[None]:
        """Reserve so many bytes more while the `with` block runs; raises as `grow`."""
        self.grow(count)
        try:
            yield
        finally:
            self.grow(-count)

    def resize(self, count: int) -> None:
        """Reserve exactly so many bytes; raises as `grow`."""
        self.grow(count - self._held)
