"""Finish some requests before the policy decides: suspended ones, and those for a model that was replaced."""

from dataclasses import dataclass, replace

from policies.queue.drain import Drain
from policies.types import Action, Policy, State


@dataclass(frozen=True, slots=True)
class FinishSuspended:
    """Runs suspended requests to the end, then applies the inner policy to the waiting ones.

    Attributes:
        inner: decides when no request is suspended.
        drain: launches suspended requests.
    """

    inner: Policy
    drain: Drain

    def decide(self, state: State, /) -> Action:
        """Launch suspended requests first."""
        return (self.drain if state.suspended else self.inner).decide(state)


@dataclass(frozen=True, slots=True)
class FinishRetired:
    """Launches requests of retired kinds without waiting, then applies the inner policy to the others.

    Attributes:
        inner: decides when no request is of a retired kind.
        drain: launches the requests of retired kinds.
    """

    inner: Policy
    drain: Drain

    def decide(self, state: State, /) -> Action:
        """Launch requests of retired kinds first."""
        waiting = [request for request in state.waiting if request.kind.retired]
        suspended = [request for request in state.suspended if request.kind.retired]
        if waiting or suspended:
            return self.drain.decide(replace(state, waiting=waiting, suspended=suspended))
        return self.inner.decide(state)
