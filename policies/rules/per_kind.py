"""A policy for each kind of request: each model, each bin."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from policies.profile import Profile
from policies.types import Action, Kind, Launch, Policy, State, Wait


@dataclass(frozen=True, slots=True)
class PerKind:
    """Applies each kind's policy to that kind alone, and chooses among the batches that they launch.

    - Overdue batches, whose oldest request has reached the model's maximum wait, are first, by their oldest request. No
      kind starves.
    - Of different models, the one with the largest product of queue and service rate is first, n b / l(b) for n waiting
      requests and a batch of b: MaxWeight (Tassiulas and Ephremides, IEEE Trans. Automatic Control 37(12), 1992), with
      the service rate of the batch (`benchmarks/co_located.py`).
    - Of one model's kinds, its bins, the batch that was formed first is first. The same holds for all models while
      requests are between stages, which a queue of another model that grows longer would otherwise suspend.

    A batch that had to wait for its size is formed at its last member's arrival, another one at its first member's: by
    its last one, a kind with occasional arrivals would always be the newest.

    Attributes:
        policies: policy of each model, which its bins share.
        profiles: profile of each model; one model alone needs none.
        max_waits: maximum wait of each model, s; a model without one is never overdue.
        together: models that share one policy, which gets the requests of all of them in one state.
    """

    policies: Mapping[str, Policy]
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    max_waits: Mapping[str, float] = field(default_factory=dict)
    together: frozenset[str] = frozenset()

    def decide(self, state: State, /) -> Action:
        """Return the launch that is first, else the shortest wait."""
        parts = state.by_kind()
        launches, until = list[Launch](), inf
        for model, part in self._parts(state, parts):
            match self.policies[model].decide(part):
                case Launch() as launch:
                    launches.append(launch)
                case Wait(end):
                    until = min(until, end)
        if len(launches) < 2:
            return launches[0] if launches else Wait(until)
        overdue = [launch for launch in launches if self._is_overdue(launch, state.now)]
        if overdue:
            return min(overdue, key=lambda launch: (launch.requests[0].arrival, launch.requests[-1].id))
        if state.suspended or len(self.policies) == 1:
            return min(launches, key=_formed)
        first = max(launches, key=lambda launch: self._weight(launch, parts)).requests[0].kind.model
        return min((launch for launch in launches if launch.requests[0].kind.model == first), key=_formed)

    def _weight(self, launch: Launch, parts: Mapping[Kind, State]) -> float:
        kind, size = launch.requests[0].kind, len(launch.requests)
        return len(parts[kind].waiting) * size / self.profiles[kind.model].service_time(size)

    def _is_overdue(self, launch: Launch, now: float) -> bool:
        oldest = launch.requests[0]
        return now >= oldest.arrival + self.max_waits.get(oldest.kind.model, inf)

    def _parts(self, state: State, parts: Mapping[Kind, State]) -> Iterator[tuple[str, State]]:
        factors = slowdowns(state.rates, self.profiles) if len(self.profiles) > 1 else {}
        for kind, part in parts.items():
            if kind.model not in self.together:
                factor = factors.get(kind.model, 1.0)
                yield kind.model, replace(part, slowdown=factor) if factor > 1.0 else part
        joint = [kind for kind in parts if kind.model in self.together]
        if joint:
            yield joint[0].model, state.among(joint)


def slowdowns(rates: Mapping[Kind, float], profiles: Mapping[str, Profile]) -> Mapping[str, float]:
    """Return for each model the load of the device by all models over its own.

    Args:
        rates: measured arrival rates, 1/s; a model whose rate is 0 or not measured is left out.
        profiles: of all models of the device.
    """
    loads = dict[str, float]()
    for kind, rate in rates.items():
        loads[kind.model] = loads.get(kind.model, 0.0) + rate / profiles[kind.model].capacity
    total = sum(loads.values())
    return {model: total / load for model, load in loads.items() if load > 0.0}


def _formed(launch: Launch) -> tuple[float, int]:
    formed = launch.requests[0].arrival if launch.formed is None else launch.formed
    return formed, launch.requests[-1].id
