"""The memory budget: how many bytes all calls may hold until they are answered, and how many are being decoded."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.errors import QueueFullError, TooLargeError

_LARGE = 256  # a call that holds more than one part in so many of the budget is large
_PART_OF_LARGE = 2  # large calls together may hold one part in so many of the budget, so that small ones find room


class IntakeFullError(QueueFullError):
    """The memory budget has no room for the bytes of this call."""

    reason = "bytes"


class Intake:
    """The memory budget of all calls together; the reservation of one call is a `Share`.

    Large calls share half of the budget, so that no number of them keeps small ones out.

    Attributes:
        coming: samples by model whose bodies have been read and which are being decoded; not yet in the queue.
        all_coming: the same of all models together.
        limit: bytes that all calls may hold.
        held: bytes that they hold.
        held_by_large: bytes that large calls hold.
    """

    def __init__(self, limit: int, seconds: Callable[[], int] = lambda: 1) -> None:
        """`seconds` says after how long a refused client should come again."""
        self.coming: Counter[str] = Counter()
        self.all_coming = 0
        self.limit = limit
        self.held = 0
        self.held_by_large = 0
        self._seconds = seconds

    def share(self) -> "Share":
        """For one call, as a context manager: it gives everything back at the call's end, however that comes."""
        return Share(self)

    def change(self, old: int, new: int) -> None:
        """A call that holds `old` bytes is to hold `new`.

        Raises:
            TooLargeError: one call may never hold so many.
            IntakeFullError: there is no room for the additional ones now.
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
            wait = self._seconds()
            raise IntakeFullError(
                f"no room for {new - old} bytes: calls hold {self.held} of {self.limit}, large ones "
                f"{self.held_by_large} of {most}; send the call again in {wait} s",
                wait,
            )


class Share:
    """The reservation of one call: the bytes that it holds in the memory budget."""

    __slots__ = ("_coming", "_held", "_intake")

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._held = 0
        self._coming = ("", 0)

    def __enter__(self) -> "Share":
        """Begin with nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give all of it back."""
        self.arrive()
        self.settle(0)

    def come(self, model: str, n: int) -> None:
        """The call's body was read; it has `n` samples that will be in the queue."""
        self._coming = (model, n)
        self._intake.coming[model] += n
        self._intake.all_coming += n

    def arrive(self) -> None:
        """Its samples are in the queue, or have been dropped."""
        model, n = self._coming
        if n:
            self._intake.coming[model] -= n
            self._intake.all_coming -= n
            self._coming = ("", 0)

    def grow(self, count: int) -> None:
        """Hold so many bytes more.

        Raises:
            TooLargeError: one call may never hold so many.
            IntakeFullError: there is no room for them; what is held already stays so.
        """
        self._intake.change(self._held, self._held + count)
        self._held += count

    def reach(self, count: int) -> None:
        """Hold at least so many bytes; raises as `grow`."""
        if count > self._held:
            self.grow(count - self._held)

    @contextmanager
    def more(self, count: int) -> Iterator[None]:
        """Hold so many bytes more while the `with` block runs; raises as `grow`."""
        self.grow(count)
        try:
            yield
        finally:
            self.grow(-count)

    def settle(self, count: int) -> None:
        """Hold so many bytes, which may be fewer or more; raises as `grow`."""
        self.grow(count - self._held)
