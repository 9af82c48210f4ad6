"""Drain: launch the remaining requests of all kinds and stages without waiting, as at the shutdown of a server."""

from collections.abc import Mapping
from dataclasses import dataclass

from policies.types import Action, Launch, Reason, State


@dataclass(frozen=True, slots=True)
class Drain:
    """Launches as many requests as fit: suspended ones first, then the kind of the oldest waiting one.

    Attributes:
        max_batch_size: largest batch of each model.
        reason: reason of its launches.
    """

    max_batch_size: Mapping[str, int]
    reason: Reason = "drain"

    def decide(self, state: State, /) -> Action:
        """Launch requests of the kind and stage of the first suspended request, else of the oldest waiting one."""
        candidates = state.suspended or state.waiting
        first = candidates[0]
        batch = [r for r in candidates if r.kind == first.kind and r.stage == first.stage]
        return Launch(batch[: self.max_batch_size[first.kind.model]], reason=self.reason)
