"""Finishing: a policy that knows no stages first finishes what one that does has left suspended."""

from dataclasses import dataclass

from policies.rules.drain import Drain
from policies.types import Action, Policy, State


@dataclass(frozen=True, slots=True)
class Finishing:
    """Runs suspended requests to the end, then asks the inner policy, which sees waiting ones only.

    Attributes:
        inner: decides about those who wait.
        drain: serves those who are suspended, as they are for a moment after a swap.
    """

    inner: Policy
    drain: Drain

    def decide(self, state: State, /) -> Action:
        """Started ones first."""
        return (self.drain if state.suspended else self.inner).decide(state)
