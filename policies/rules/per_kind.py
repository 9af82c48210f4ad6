"""A policy for each kind of request: each model, each bin."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from policies.types import Action, Launch, Policy, State, Wait


@dataclass(frozen=True, slots=True)
class PerKind:
    """Asks each kind's policy about that kind alone; of several batches the one that was formed first goes.

    Attributes:
        policies: by model; the bins of a model share one.
    """

    policies: Mapping[str, Policy]

    def decide(self, state: State, /) -> Action:
        """A batch is formed when its last member has arrived; one that waited to the limit goes before."""
        kinds = dict.fromkeys(r.kind for r in (*state.suspended, *state.waiting))
        best: Launch | None = None
        until = inf
        for kind in kinds:
            match self.policies[kind.model].decide(state.of(kind)):
                case Launch() as launch:
                    if best is None or _rank(launch) < _rank(best):
                        best = launch
                case Wait(end):
                    until = min(until, end)
        return Wait(until) if best is None else best


def _rank(launch: Launch) -> tuple[bool, float]:
    # A batch that still grows is formed anew with each arrival: without the limit it might never have its turn.
    return launch.reason != "max_wait", launch.requests[-1].arrival
