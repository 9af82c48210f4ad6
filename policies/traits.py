"""Optional interfaces of policies beyond `decide`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from policies.types import Action, Mix, State


@dataclass(frozen=True, slots=True)
class ActionTable:
    """A policy's actions by queue length.

    Attributes:
        batch_size: action for queue length 0, 1, 2, ...; 0 waits; the last one repeats.
        max_batch_size: the largest batch that the policy launches.
        mix: the second table, if the policy is randomised.
        seed: seed of the draws between the two tables.
    """

    batch_size: Sequence[int]
    max_batch_size: int
    mix: Mix | None = None
    seed: int = 0


@runtime_checkable
class QueueLengthPolicy(Protocol):
    """A policy whose action depends on nothing but the queue length and, possibly, the measured rate.

    Such a policy is evaluated exactly, and simulated without a State for each decision.

    Attributes:
        depends_on_rate: whether the actions differ between measured arrival rates.
    """

    depends_on_rate: ClassVar[bool]

    def decide(self, state: State, /) -> Action:
        """As `Policy.decide`."""
        ...

    def action_table(self, arrival_rate: float | None) -> ActionTable | None:
        """Return the actions at this measured rate, 1/s (None: before a rate is measured); None with a time-out."""
        ...


class StepPolicy:
    """Base class of policies that decide between stages.

    They never wait, and launch suspended requests themselves, so that neither `MaximumWait` nor `FinishSuspended` is
    wrapped around them.
    """

    __slots__ = ()


def control_limit_table(limit: int, max_batch_size: int) -> ActionTable:
    """Wait below `limit` requests, then launch all of them, at most `max_batch_size`."""
    lengths = range(max(limit, max_batch_size) + 1)
    return ActionTable(tuple(0 if n < limit else min(n, max_batch_size) for n in lengths), max_batch_size)
