"""Finish suspended requests before a policy without stages decides, as after a swap from a policy by stages."""

from dataclasses import dataclass

from policies.rules.drain import Drain
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
