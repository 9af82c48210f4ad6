"""A policy for each kind of request: each model, each bin."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from policies.profile import Profile
from policies.types import Action, BatchKey, Launch, Policy, Request, State, Wait


@dataclass(frozen=True, slots=True)
class PerKind:
    """Applies each kind's policy to that kind alone, and chooses among the batches that they launch.

    - Overdue batches, whose oldest request has reached the model's maximum wait, are first, by their oldest request.
    - Of different models, the one with the largest n b W / l(b) is first, for n waiting requests, a batch of b and the
      waiting time W of its oldest request. n b / l(b) is the weight of MaxWeight, the product of queue and service rate
      (Tassiulas and Ephremides, IEEE Trans. Automatic Control 37(12), 1992). W, as in policies that weigh the delay,
      keeps rare requests from waiting for many batches of busier models. `research/co_located.py` measures the gain.
    - Of one model's kinds, its bins, the batch that was formed first is first. The same holds for all models if one has
      an objective, since the weight delays short queues, and while requests are between stages, which a queue of
      another model that grows longer would otherwise suspend.

    A batch that had to wait for its size is formed at its last member's arrival, another one at its first member's: by
    its last one, a kind with occasional arrivals would always be the newest.

    Attributes:
        policies: policy of each model, which its bins share.
        profiles: profile of each model; one model alone needs none.
        max_waits: maximum wait of each model, s; a model without one is never overdue.
        together: models that share one policy, which gets the requests of all of them in one state.
        in_order: whether the batch that was formed first is first among models, too.
    """

    policies: Mapping[str, Policy]
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    max_waits: Mapping[str, float] = field(default_factory=dict)
    together: frozenset[str] = frozenset()
    in_order: bool = False

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
            return min(overdue, key=lambda launch: (_oldest(launch).arrival, launch.requests[-1].id))
        if len(self.policies) == 1:
            return min(launches, key=partial(_by_level, state.now))
        if self.in_order or state.suspended:
            return min(launches, key=_formed)
        first = max(launches, key=lambda launch: self._weight(launch, parts, state.now)).requests[0].kind.model
        of_model = [launch for launch in launches if launch.requests[0].kind.model == first]
        return min(of_model, key=partial(_by_level, state.now))

    def _weight(self, launch: Launch, parts: Mapping[BatchKey, State], now: float) -> float:
        oldest, size = _oldest(launch), len(launch.requests)
        rate = size / self.profiles[oldest.kind.model].service_time(size)
        return len(parts[oldest.kind].waiting) * rate * (now - oldest.arrival)

    def _is_overdue(self, launch: Launch, now: float) -> bool:
        oldest = _oldest(launch)
        return now >= oldest.arrival + self.max_waits.get(oldest.kind.model, inf)

    def _parts(self, state: State, parts: Mapping[BatchKey, State]) -> Iterator[tuple[str, State]]:
        factors = slowdowns(state.rates, self.profiles) if len(self.profiles) > 1 else {}
        for kind, part in parts.items():
            if kind.model not in self.together:
                factor = factors.get(kind.model, 1.0)
                yield kind.model, replace(part, slowdown=factor) if factor > 1.0 else part
        joint = [kind for kind in parts if kind.model in self.together]
        if joint:
            yield joint[0].model, state.among(joint)


def slowdowns(rates: Mapping[BatchKey, float], profiles: Mapping[str, Profile]) -> Mapping[str, float]:
    """Return for each model the factor by which the others make the device slower for it.

    With a load rho_i of its own and rho of all models, the others leave it 1 - (rho - rho_i) of the time, but above
    capacity at least its part of the load, rho_i / rho.

    Args:
        rates: measured arrival rates, 1/s; a model whose rate is 0 or not measured is left out.
        profiles: of all models of the device.

    Returns:
        Factors from 1 to 100.
    """
    loads = dict[str, float]()
    for kind, rate in rates.items():
        loads[kind.model] = loads.get(kind.model, 0.0) + rate / profiles[kind.model].capacity
    total = sum(loads.values())
    left = {model: max(1.0 - (total - load), load / total, 0.01) for model, load in loads.items() if load > 0.0}
    return {model: 1.0 / part for model, part in left.items()}


def _oldest(launch: Launch) -> Request:
    return min(launch.requests, key=lambda request: request.arrival)


def _formed(launch: Launch) -> tuple[float, int]:
    formed = _oldest(launch).arrival if launch.formed is None else launch.formed
    return formed, launch.requests[-1].id


def _by_level(now: float, launch: Launch) -> tuple[int, float, int]:
    """Order of the launches of one model: by the first level in it, then by when it was formed."""
    first = launch.requests[0]
    return (0 if first.urgent_from <= now else first.level, *_formed(launch))
