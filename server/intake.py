"""The calls between the door and the queue: how many, and how many bytes until they are answered."""

from collections import Counter
from collections.abc import Callable

from server.errors import QueueFullError, TooLargeError


class IntakeFullError(QueueFullError):
    """The bytes of this call find no place beside those of the others."""

    reason = "bytes"


class Intake:
    """The bound on all calls together; one call's share is a `Share`.

    Attributes:
        coming: samples by model that have come whole and are being decoded, on their way to the queue.
        limit: bytes that all calls may hold.
        held: bytes that they hold.
    """

    def __init__(self, limit: int, seconds: Callable[[], int] = lambda: 1) -> None:
        """`seconds` says after how long a refused client should come again."""
        self.coming: Counter[str] = Counter()
        self.limit = limit
        self.held = 0
        self._seconds = seconds

    def share(self) -> "Share":
        """For one call, as a context manager: it gives everything back at the call's end, however that comes."""
        return Share(self)

    def take(self, count: int) -> None:
        """Hold so many bytes more.

        Raises:
            TooLargeError: there never is room for them.
            IntakeFullError: there is none now.
        """
        if count > self.limit:
            raise TooLargeError(f"the call takes {count} bytes, all calls together may hold {self.limit}; send less")
        if self.held + count > self.limit:
            wait = self._seconds()
            raise IntakeFullError(
                f"no room for {count} bytes: calls hold {self.held} of {self.limit}; come again in {wait} s", wait
            )
        self.held += count

    def give(self, count: int) -> None:
        """Hold so many bytes fewer."""
        self.held -= count


class Share:
    """What one call holds."""

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
        """The call has come whole, with `n` samples that will be in the queue."""
        self._coming = (model, n)
        self._intake.coming[model] += n

    def arrive(self) -> None:
        """They are on their way no longer: in the queue, or nowhere."""
        model, n = self._coming
        if n:
            self._intake.coming[model] -= n
            self._coming = ("", 0)

    def grow(self, count: int) -> None:
        """Hold so many bytes more.

        Raises:
            IntakeFullError: there is no room for them; what is held already stays so.
        """
        self._intake.take(count)
        self._held += count

    def reach(self, count: int) -> None:
        """Hold at least so many bytes.

        Raises:
            IntakeFullError: there is no room for them.
        """
        if count > self._held:
            self.grow(count - self._held)

    def settle(self, count: int) -> None:
        """Hold so many bytes and no more, of those that are held."""
        self._intake.give(self._held - count)
        self._held = count
