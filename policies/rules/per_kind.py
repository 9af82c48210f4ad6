"""A policy for each kind of request: each model, each bin."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from policies.types import Action, Launch, Policy, State, Wait


@dataclass(frozen=True, slots=True)
class PerKind:
    """Applies each kind's policy to that kind alone and launches the batch that was formed first.

    A batch that had to wait for its size is formed at its last member's arrival. A batch that did not, or whose oldest
    request has reached the maximum wait, is formed at its first member's arrival: by its last one, a kind with
    occasional arrivals would always be the newest and would starve.

    Attributes:
        policies: policy of each model, which its bins share.
        together: models that share one policy, which gets the requests of all of them in one state.
    """

    policies: Mapping[str, Policy]
    together: frozenset[str] = frozenset()

    def decide(self, state: State, /) -> Action:
        """Return the launch that was formed first, else the shortest wait."""
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
