"""A policy for each kind of request: each model, each bin."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from policies.types import Action, Kind, Launch, Policy, State, Wait


@dataclass(frozen=True, slots=True)
class PerKind:
    """Asks each kind's policy about that kind alone; of several batches the one that was formed first goes.

    Attributes:
        policies: by model; the bins of a model share one.
        together: models whose policy, the same for all of them, is asked about all of them at once.
    """

    policies: Mapping[str, Policy]
    together: frozenset[str] = frozenset()

    def decide(self, state: State, /) -> Action:
        """A batch is formed when its last member has arrived; one that waited to the limit goes before."""
        best: Launch | None = None
        until = inf
        for kinds in self._asked(state):
            match self.policies[kinds[0].model].decide(state.among(kinds)):
                case Launch() as launch:
                    if best is None or _rank(launch) < _rank(best):
                        best = launch
                case Wait(end):
                    until = min(until, end)
        return Wait(until) if best is None else best

    def _asked(self, state: State) -> list[list[Kind]]:
        kinds = dict.fromkeys(r.kind for r in (*state.suspended, *state.waiting))
        joint = [kind for kind in kinds if kind.model in self.together]
        return [[kind] for kind in kinds if kind.model not in self.together] + ([joint] if joint else [])


def _rank(launch: Launch) -> tuple[bool, float]:
    # A batch that still grows is formed anew with each arrival: without the limit it might never have its turn.
    return launch.reason != "max_wait", launch.requests[-1].arrival
