"""The context of one inference call: its start, timeout, memory reservation and measurements."""

from math import inf
from time import monotonic

from starlette.types import Receive, Scope

from server.errors import ExpiredError
from server.transport.asgi import headers_of
from server.transport.memory_budget import MemoryBudget


class RequestContext:
    """The context of one inference call.

    Attributes:
        request_id: the call's id in logs and responses.
        headers: request headers by lower-case name.
        receive: ASGI receive of the call.
        memory: reservation in the memory budget.
        began: arrival of the first byte, s of time.monotonic.
        timeout: the client's timeout, s from `began`; inf without one.
        samples: number of samples; 1 until it is known.
        queued: instant at which the samples were queued, s of time.monotonic; inf before.
        waiting: longest waiting time of the samples, s.
        service: longest service time of their batches, s.
        device: name of the device that served the call.
    """

    __slots__ = (
        "began",
        "device",
        "headers",
        "memory",
        "queued",
        "receive",
        "request_id",
        "samples",
        "service",
        "timeout",
        "waiting",
    )

    def __init__(self, scope: Scope, receive: Receive, budget: MemoryBudget) -> None:
        """Create the context; the call began at its first byte if the connection recorded that, else now."""
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

    def remaining_timeout(self) -> float:
        """Return the rest of the timeout, s; inf without one.

        Raises:
            ExpiredError: the timeout has passed.
        """
        if self.timeout == inf:
            return inf
        remaining = self.began + self.timeout - monotonic()
        if remaining <= 0.0:
            raise self.expired_error()
        return remaining

    def expired_error(self) -> ExpiredError:
        """Return the error for a timeout that passes before the call is queued."""
        return ExpiredError(f"the timeout of {1e3 * self.timeout:g} ms passed before the input was read and decoded")
