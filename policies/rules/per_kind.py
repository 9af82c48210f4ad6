"""A policy for each kind of request: each model, each bin."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from policies.types import Action, Launch, Policy, State, Wait


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


def _rank(launch: Launch) -> tuple[bool, float, int]:
    # A batch that still grows is formed anew with each arrival: without the limit it might never have its turn.
    newest = launch.requests[-1]
    return launch.reason != "max_wait", newest.arrival, newest.id
