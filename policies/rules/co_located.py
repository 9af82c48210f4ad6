"""Several models on one device, each by stages: one LazyBatching for all of them (section VI-C, co-location).

New requests of a model preempt only if the slack of all requests in flight allows, of whatever model. The model of
least slack is launched first. For this comparison a request counts with its full service time, even if most stages are
done: with the remaining time the device would switch models at each stage boundary. Each model has its own profile, its
own SLO and its own stack.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from policies.rules.lazy_batching import NO_CLAIM, Claim
from policies.types import Action, Launch, State, Wait


@runtime_checkable
class PreemptivePolicy(Protocol):
    """A policy that preempts between stages and can share the device with those of other models."""

    def decide(self, state: State, /) -> Action:
        """The action if no other model is on the device."""
        ...

    def next_launch(self, state: State, others: Claim) -> Launch | None:
        """The next stage of this model's requests; None where the slack of the other models forbids it."""
        ...

    def claim(self, state: State) -> Claim:
        """The device time that this model's requests in flight need."""
        ...

    def latest_start(self, state: State) -> float:
        """The instant by which the model's most urgent request would have to be started alone, s."""
        ...


@dataclass(frozen=True, slots=True)
class CoLocated:
    """Launches the model of least slack among those that may launch.

    Attributes:
        rules: policy of each model.
    """

    rules: Mapping[str, PreemptivePolicy]

    def decide(self, state: State, /) -> Action:
        """Launch one stage of one sub-batch of one model; Wait only without requests."""
        own = state.by_kind()
        claims = {kind: self.rules[kind.model].claim(part) for kind, part in own.items()}
        for kind in sorted(own, key=lambda k: self.rules[k.model].latest_start(own[k])):
            others = sum((claim for other, claim in claims.items() if other != kind), NO_CLAIM)
            launch = self.rules[kind.model].next_launch(own[kind], others)
            if launch is not None:
                return launch
        return Wait()
