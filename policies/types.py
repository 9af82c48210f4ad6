"""The interface of a policy: requests, the state of the queue, and the actions launch and wait.

Times are seconds on the caller's clock. A policy is a pure function of a `State`: it has no clock, no memory and no
I/O. The same object decides in the simulator and in the server, and a test of it is one state and one action.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol

Reason = Literal["full", "policy", "max_wait", "slo", "drain"]


class PolicyError(Exception):
    """A policy returned an action that cannot be carried out. This is a bug in the policy, not a client error."""


class SpecError(ValueError):
    """A profile, policy or parameter is invalid. The message names the value and says what to do."""


class ParameterError(SpecError):
    """A parameter is invalid. The message has the form NAME=VALUE PROBLEM.

    Attributes:
        name: of the parameter.
        value: as it was given.
        problem: and what to do.
    """

    def __init__(self, name: str, value: str, problem: str) -> None:
        super().__init__(name, value, problem)
        self.name, self.value, self.problem = name, value, problem

    def __str__(self) -> str:
        return f"{self.name}={self.value} {self.problem}"


class BatchKey(NamedTuple):
    """The batch key: requests share a batch only if they are of one model, one bin and one shape.

    Bins are those of multi-bin batching. Shapes are those of models whose inputs vary in shape. `retired` is
    empty, or the id of the model that the request is for, if another one has taken its name while serving.
    """

    model: str = ""
    bin: int = 0
    shape: str = ""
    retired: str = ""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One sample of a call, the unit that is batched. After arrival only the Batcher sets `kind`, `stage`, `started`.

    Attributes:
        id: unique within a queue and ascending in order of arrival.
        arrival: instant of arrival, s.
        kind: batch key.
        deadline: arrival + SLO, s; a missed deadline is counted, the request is still served.
        expires: end of the client's time-out, s; an expired request leaves the queue.
        size: predicted service time when served alone, s.
        length: of its sample, where batches are padded to their longest one; 0 otherwise.
        stages: number of stages of its model.
        payload: what the caller needs to run the request and to return its result; opaque to policies.
        stage: the next stage to run.
        started: instant of the first launch, s; infinite while it waits.
        level: priority level; 1 is the first.
        urgent_from: instant from which it precedes all levels, s.
    """

    id: int
    arrival: float
    kind: BatchKey = BatchKey()  # noqa: RUF009  (a NamedTuple is immutable)
    deadline: float = inf
    expires: float = inf
    size: float = 0.0
    stages: int = 1
    payload: Any = None
    stage: int = 0
    started: float = inf
    length: float = 0.0
    level: int = 1
    urgent_from: float = inf


@dataclass(frozen=True, slots=True)
class State:
    """A snapshot of the queue at a decision epoch.

    Attributes:
        now: the instant of the decision, s.
        waiting: requests not started, by level, then in order of arrival; urgent ones first.
        suspended: requests between stages, latest run last.
        rates: measured arrival rate of each kind, 1/s; a kind not measured yet is absent.
        mean_rates: long-run mean arrival rate of each kind, 1/s; empty where it is not measured.
        slowdown: factor by which other models make the device slower for the model that is decided for, at least 1.
        level_shares: by model with several levels, the share of each in the arrivals, the first level first.
        by_level: whether requests of several levels wait, so that `waiting` need not be in order of arrival.
    """

    now: float
    waiting: Sequence[Request]
    suspended: Sequence[Request] = ()
    rates: Mapping[BatchKey, float] = field(default_factory=dict)
    mean_rates: Mapping[BatchKey, float] = field(default_factory=dict)
    slowdown: float = 1.0
    level_shares: Mapping[str, Sequence[float]] = field(default_factory=dict)
    by_level: bool = False

    @property
    def oldest(self) -> Request:
        """The waiting request that arrived first; one must wait."""
        return min(self.waiting, key=_arrival) if self.by_level else self.waiting[0]

    @property
    def arrival_rate(self) -> float:
        """Measured arrival rate over all kinds of the snapshot, 1/s; 0 before the first measurement."""
        return sum(self.rates.values())

    @property
    def mean_rate(self) -> float:
        """Long-run mean of the arrival rate over all kinds of the snapshot, 1/s; 0 where it is not measured."""
        return sum(self.mean_rates.values())

    @property
    def reevaluate_at(self) -> float:
        """The instant three mean interarrival times from now, s; the estimated rate has decayed by then."""
        rate = self.arrival_rate
        return self.now + 3.0 / rate if rate > 0.0 else inf

    def by_kind(self) -> Mapping[BatchKey, "State"]:
        """The snapshot restricted to each kind that has requests, by kind; kinds with suspended requests first."""
        waiting, suspended = _by_kind(self.waiting), _by_kind(self.suspended)
        return {
            kind: State(
                self.now,
                waiting.get(kind, ()),
                suspended.get(kind, ()),
                {kind: self.rates[kind]} if kind in self.rates else {},
                {kind: self.mean_rates[kind]} if kind in self.mean_rates else {},
                level_shares=self.level_shares,
                by_level=self.by_level,
            )
            for kind in dict.fromkeys((*suspended, *waiting))
        }

    def among(self, kinds: Collection[BatchKey]) -> "State":
        """The snapshot restricted to the requests and rates of these kinds."""
        return State(
            self.now,
            [r for r in self.waiting if r.kind in kinds],
            [r for r in self.suspended if r.kind in kinds],
            {kind: self.rates[kind] for kind in kinds if kind in self.rates},
            {kind: self.mean_rates[kind] for kind in kinds if kind in self.mean_rates},
            level_shares=self.level_shares,
            by_level=self.by_level,
        )


_arrival = attrgetter("arrival")


def _by_kind(requests: Sequence[Request]) -> dict[BatchKey, list[Request]]:
    groups: dict[BatchKey, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.kind, []).append(request)
    return groups


@dataclass(frozen=True, slots=True)
class Mix:
    """The second table of a randomised policy, used at each decision epoch with the given probability.

    Attributes:
        probability: from 0 to 1.
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.
    """

    probability: float
    batch_size: Sequence[int]


@dataclass(frozen=True, slots=True)
class MaxAges:
    """A table of maximum ages: launch all waiting requests, at most the largest batch, once the oldest is this old.

    Attributes:
        max_age: s, for queue length 0, 1, 2, ...; the last repeats; 0 launches at once, infinity never.
        probability: with which `others` is used for a batch; drawn by the id of its oldest request.
        others: the second table; empty without one.
        max_batch_size: the largest batch, if it is below that of the device; None: the device's.
    """

    max_age: Sequence[float]
    probability: float = 0.0
    others: Sequence[float] = ()
    max_batch_size: int | None = None

    def largest(self, of_device: int) -> int:
        """The largest batch on a device with this one."""
        return of_device if self.max_batch_size is None else min(self.max_batch_size, of_device)


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch these requests as one batch, now.

    Attributes:
        requests: the batch, of one kind and at one stage.
        stages: number of stages to run; None runs to the end.
        reason: why the batch is launched, for metrics.
        formed: instant at which the batch was formed, s, by which batches of different kinds are ordered; None: the
            arrival of its first request.
    """

    requests: Sequence[Request]
    stages: int | None = None
    reason: Reason = "policy"
    formed: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide again at `until` (s) or at the next arrival, whichever is first."""

    until: float = inf


Action = Launch | Wait


class Policy(Protocol):
    """Decides at a decision epoch: completion of a batch, arrival at an idle device, or the end of a wait."""

    def decide(self, state: State, /) -> Action:
        """Return the action for a state in which at least one request waits or is suspended."""
        ...


def launch_oldest(state: State, size: int, full: int, reason: Reason = "policy", formed: float | None = None) -> Launch:
    """Launch the first `size` waiting requests, with `formed` as in `Launch`.

    From `full` requests on the reason "policy" becomes "full".
    """
    batch = state.waiting[:size]
    reason = "full" if len(batch) >= full and reason == "policy" else reason
    return Launch(batch, reason=reason, formed=formed)
