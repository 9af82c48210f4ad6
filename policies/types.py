"""What a policy sees and what it may answer.

Times are seconds on the caller's clock. A policy is a pure function of a `State`: it has no clock, no memory and no
I/O, so the same object decides in the simulator and in the server, and a test of it is one state and one action.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, NamedTuple, Protocol

Reason = Literal["full", "policy", "max_wait", "slo", "drain"]


class PolicyError(Exception):
    """A policy answered with an action that cannot be carried out: a bug in the policy, never the client's fault."""


class SpecError(ValueError):
    """A profile, policy or parameter given from outside cannot be used; says what, which value, and what to do."""


class Kind(NamedTuple):
    """What may share a batch: requests of one model, and of one bin where sizes differ."""

    model: str = ""
    bin: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One sample from a client. Once it has arrived, the Batcher alone writes `kind`, `stage` and `started`.

    Attributes:
        id: unique within a queue and ascending in order of arrival.
        arrival: instant of arrival, s.
        kind: what it may share a batch with.
        deadline: arrival + SLO, s; may be missed, and is counted.
        expires: the instant after which the client no longer wants the answer, s.
        size: predicted service time when served alone, s.
        stages: number of stages of its model; where a stage is an iteration, how many it needs itself.
        payload: whatever the caller needs to run and answer it; policies never look inside.
        stage: the next stage to run.
        started: instant of first launch, s; infinite while it waits.
    """

    id: int
    arrival: float
    kind: Kind = Kind()  # noqa: RUF009  (a NamedTuple is immutable)
    deadline: float = inf
    expires: float = inf
    size: float = 0.0
    stages: int = 1
    payload: Any = None
    stage: int = 0
    started: float = inf


@dataclass(frozen=True, slots=True)
class State:
    """A snapshot of the queue at a decision epoch.

    Attributes:
        now: the instant of the decision, s.
        waiting: requests not started, in order of arrival.
        suspended: requests between stages, latest run last.
        rates: measured arrival rate of each kind, 1/s; a kind not measured yet is absent.
        mean_rates: the same over a long time, 1/s; empty where nobody measures it.
    """

    now: float
    waiting: Sequence[Request]
    suspended: Sequence[Request] = ()
    rates: Mapping[Kind, float] = field(default_factory=dict)
    mean_rates: Mapping[Kind, float] = field(default_factory=dict)

    @property
    def arrival_rate(self) -> float:
        """Measured arrival rate over all kinds, 1/s; 0 before the first measurement."""
        return sum(self.rates.values())

    @property
    def mean_rate(self) -> float:
        """Long-run mean of the arrival rate over all kinds, 1/s; 0 where nobody measures it."""
        return sum(self.mean_rates.values())

    @property
    def ask_again(self) -> float:
        """An instant three mean interarrival times from now: if nobody has come by then, the rate has changed."""
        rate = self.arrival_rate
        return self.now + 3.0 / rate if rate > 0.0 else inf

    def of(self, kind: Kind) -> "State":
        """The same snapshot with only the requests of `kind`, and that kind's own rates."""
        return self.among((kind,))

    def by_kind(self) -> Mapping[Kind, "State"]:
        """The same snapshot of each kind that is here, as `of` gives it, in one pass; the suspended ones' first."""
        waiting, suspended = _by_kind(self.waiting), _by_kind(self.suspended)
        return {
            kind: State(
                self.now,
                waiting.get(kind, ()),
                suspended.get(kind, ()),
                {kind: self.rates[kind]} if kind in self.rates else {},
                {kind: self.mean_rates[kind]} if kind in self.mean_rates else {},
            )
            for kind in dict.fromkeys((*suspended, *waiting))
        }

    def among(self, kinds: Collection[Kind]) -> "State":
        """The same snapshot with only the requests of these kinds, and their own rates."""
        return State(
            self.now,
            [r for r in self.waiting if r.kind in kinds],
            [r for r in self.suspended if r.kind in kinds],
            {kind: self.rates[kind] for kind in kinds if kind in self.rates},
            {kind: self.mean_rates[kind] for kind in kinds if kind in self.mean_rates},
        )


def _by_kind(requests: Sequence[Request]) -> dict[Kind, list[Request]]:
    groups: dict[Kind, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.kind, []).append(request)
    return groups


@dataclass(frozen=True, slots=True)
class Mix:
    """The other half of a randomised policy: at each decision epoch, with `probability`, act by this table instead.

    Attributes:
        probability: from 0 to 1.
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.
    """

    probability: float
    batch_size: Sequence[int]


@dataclass(frozen=True, slots=True)
class Launch:
    """Serve these requests together, now.

    Attributes:
        requests: the batch, of one kind; at one stage, unless the model takes any together.
        stages: how many stages to run; None runs to the end.
        reason: why now, for people who watch.
        formed: the instant from which it has a claim to the device, s; None: from its first member's arrival.
    """

    requests: Sequence[Request]
    stages: int | None = None
    reason: Reason = "policy"
    formed: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again at `until` (s), or at the next arrival, whichever is first."""

    until: float = inf


Action = Launch | Wait


class Policy(Protocol):
    """Decides at a decision epoch: a batch is complete, a request arrived at an idle device, or a wait is over."""

    def decide(self, state: State, /) -> Action:
        """Answer for a state in which at least one request waits or is suspended."""
        ...


def launch_oldest(state: State, size: int, full: int, reason: Reason = "policy") -> Launch:
    """The `size` oldest waiting requests; the reason is "full" where that makes the largest batch, `full`."""
    batch = state.waiting[:size]
    return Launch(batch, reason="full" if len(batch) >= full and reason == "policy" else reason)
