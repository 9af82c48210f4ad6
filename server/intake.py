"""The calls between the door and the queue: how many, and how many bytes until they are answered."""

from collections import Counter
from collections.abc import Callable

from server.errors import QueueFullError


class IntakeFullError(QueueFullError):
    """The bytes of this call find no place beside those of the others."""

    reason = "bytes"


class Intake:
    """The bound on all calls together; one call's share is a `Share`.

    Attributes:
        coming: calls by model that were let in and are not in the queue yet: read, or decoded.
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
            IntakeFullError: there is no room for them.
        """
        if self.held + count > self.limit:
            wait = self._seconds()
            raise IntakeFullError(
                f"no room for {count} bytes: calls hold {self.held} of {self.limit}; come again in {wait} s", wait
            )
        self.held += count


class Share:
    """What one call holds."""

    __slots__ = ("_held", "_intake", "_model")

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._held = 0
        self._model: str | None = None

    def __enter__(self) -> "Share":
        """Begin with nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give all of it back."""
        self.arrive()
        self._intake.held -= self._held
        self._held = 0

    def come(self, model: str) -> None:
        """The call was let in, on its way to the queue."""
        self._model = model
        self._intake.coming[model] += 1

    def arrive(self) -> None:
        """It is on its way no longer."""
        if self._model is not None:
            self._intake.coming[self._model] -= 1
            self._model = None

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
