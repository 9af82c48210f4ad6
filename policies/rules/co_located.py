"""Several models on one device, each by stages: one LazyBatching for all of them (section VI-C, co-location).

A model's newcomers preempt only if the slack of everybody in flight allows, of whatever model. Whose turn it is goes by
least slack: by full times, so that who runs does not fall behind who waits, and the device does not change hands at
each boundary. Each model has its own profile, its own SLO and its own stack.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from policies.rules.lazy_batching import NOBODY, Claim
from policies.types import Action, Launch, State, Wait


class StageRule(Protocol):
    """A policy by stages that can share the device."""

    def decide(self, state: State, /) -> Action:
        """Alone on the device."""
        ...

    def turn(self, state: State, others: Claim) -> Launch | None:
        """The next stage of whoever of this model goes next; None where nobody may for the others' sake."""
        ...

    def claim(self, state: State) -> Claim:
        """What those of this model who are in flight want of the device."""
        ...

    def due(self, state: State) -> float:
        """The instant by which the model's most urgent request would have to be started alone, s."""
        ...


@dataclass(frozen=True, slots=True)
class CoLocated:
    """Asks the models in order of least slack; the first that may launch does.

    Attributes:
        rules: by model.
    """

    rules: Mapping[str, StageRule]

    def decide(self, state: State, /) -> Action:
        """One stage of one sub-batch of one model; never waits."""
        kinds = list(dict.fromkeys(r.kind for r in (*state.suspended, *state.waiting)))
        own = {kind: state.of(kind) for kind in kinds}
        claims = {kind: self.rules[kind.model].claim(own[kind]) for kind in kinds}
        for kind in sorted(kinds, key=lambda k: self.rules[k.model].due(own[k])):
            others = sum((claim for other, claim in claims.items() if other != kind), NOBODY)
            launch = self.rules[kind.model].turn(own[kind], others)
            if launch is not None:
                return launch
        return Wait()
