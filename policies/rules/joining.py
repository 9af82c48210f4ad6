"""Joining: between two iterations who is finished leaves, and who waits takes the place.

What Multi-Bin Batching leaves aside (its footnote 1; Orca, Yu et al. 2022, calls it iteration-level scheduling). A
stage is an iteration, and the model takes requests that stand at different ones in one batch. Within a bin only its own
may join. Where several bins have begun, PerKind runs the one whose oldest member came first, until that one is done: so
no bin keeps the device from the others, whose rows stay as they are meanwhile.
"""

from dataclasses import dataclass

from policies.types import Action, Launch, State


@dataclass(frozen=True, slots=True)
class Joining:
    """One iteration of everybody who has begun and of as many newcomers as there is room for; never waits.

    Attributes:
        max_batch_size: largest batch.
    """

    max_batch_size: int

    def decide(self, state: State, /) -> Action:
        """Who came first stays first: the newest stands last."""
        batch = [*state.suspended, *state.waiting[: self.max_batch_size]][: self.max_batch_size]
        return Launch(batch, 1, "full" if len(batch) >= self.max_batch_size else "policy")
