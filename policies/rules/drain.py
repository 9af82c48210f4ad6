"""Drain: serve out what is left. Greedy, for every kind and stage: the policy of a server that stops."""

from collections.abc import Mapping
from dataclasses import dataclass

from policies.types import Action, Launch, Reason, State


@dataclass(frozen=True, slots=True)
class Drain:
    """Launches as many as fit, started ones first, then the kind of the oldest request.

    Attributes:
        max_batch_size: largest batch of each model.
        reason: what its launches are called.
    """

    max_batch_size: Mapping[str, int]
    reason: Reason = "drain"

    def decide(self, state: State, /) -> Action:
        """Never waits."""
        everybody = state.suspended or state.waiting
        first = everybody[0]
        mates = [r for r in everybody if r.kind == first.kind and r.stage == first.stage]
        return Launch(mates[: self.max_batch_size[first.kind.model]], reason=self.reason)
