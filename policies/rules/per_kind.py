"""A policy for each kind of request: each model, each bin."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from policies.types import Action, Launch, Policy, State, Wait


@dataclass(frozen=True, slots=True)
class PerKind:
    """Asks each kind's policy about that kind alone; of several batches the one that was formed first goes.

    A batch of a given size is formed when its last member comes. Where the policy waits for nobody, or the first member
    has waited to the limit, it counts from the first: by the last, a kind that somebody joins now and then would be
    always new and never have its turn.

    Attributes:
        policies: by model; the bins of a model share one.
        together: models whose policy, the same for all of them, is asked about all of them at once.
    """

    policies: Mapping[str, Policy]
    together: frozenset[str] = frozenset()

    def decide(self, state: State, /) -> Action:
        """Nobody waits for batches that were formed later."""
        best: Launch | None = None
        until = inf
        for model, part in self._parts(state):
            match self.policies[model].decide(part):
                case Launch() as launch:
                    if best is None or _rank(launch) < _rank(best):
                        best = launch
                case Wait(end):
                    until = min(until, end)
        return Wait(until) if best is None else best

    def _parts(self, state: State) -> Iterator[tuple[str, State]]:
        parts = state.by_kind()
        joint = [kind for kind in parts if kind.model in self.together]
        yield from ((kind.model, part) for kind, part in parts.items() if kind.model not in self.together)
        if joint:
            yield joint[0].model, state.among(joint)


def _rank(launch: Launch) -> tuple[float, int]:
    formed = launch.requests[0].arrival if launch.formed is None else launch.formed
    return formed, launch.requests[-1].id
