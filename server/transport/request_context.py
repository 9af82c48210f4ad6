"""The context of one HTTP call: its start, deadline, memory reservation, and what is measured of it."""

from math import inf
from time import monotonic

from starlette.types import Receive, Scope

from server.errors import ExpiredError
from server.transport.asgi import client_timeout, headers_of
from server.transport.memory_budget import MemoryBudget


class RequestContext:
    """One call for inference.

    Attributes:
        request_id: identifies it in logs and answers.
        headers: by lower-case name.
        receive: of the connection.
        memory: its reservation in the memory budget.
        began: instant of its first byte, s of time.monotonic.
        timeout: the client's, s from the beginning; inf if it has none.
        samples: number of samples, as far as is known.
        queued: instant at which its samples were queued, s of time.monotonic.
        waiting: the longest waiting time of its samples, s.
        service: the longest service time of their batches, s.
        device: the device that served it.
    """

    __slots__ = (
        *("began", "device", "headers", "memory", "queued", "receive", "request_id", "samples", "service", "timeout"),
        "waiting",
    )

    def __init__(self, scope: Scope, receive: Receive, budget: MemoryBudget) -> None:
        """The call began with its first byte, if the connection recorded that."""
        self.request_id = scope["state"].get("request_id", "")
        self.headers = headers_of(scope)
        self.receive = receive
        self.memory = budget.reservation()
        self.began: float = scope["state"].get("began") or monotonic()
        self.timeout = inf
        self.samples = 1
        self.queued = inf
        self.waiting = self.service = 0.0
        self.device = ""

    def read_timeout(self) -> None:
        """Take the time-out from X-Timeout-Ms.

        Raises:
            BadInputError: it is not a positive, finite number.
        """
        self.timeout = client_timeout(self.headers)

    def left(self) -> float:
        """The rest of the time-out, s.

        Raises:
            ExpiredError: it has passed.
        """
        if self.timeout == inf:
            return inf
        left = self.began + self.timeout - monotonic()
        if left <= 0.0:
            raise self.expired()
        return left

    def expired(self) -> ExpiredError:
        """The error when the time-out passes before the call is queued."""
        return ExpiredError(f"the time-out of {1e3 * self.timeout:g} ms passed before the input was read and decoded")
