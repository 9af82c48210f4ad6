"""The closed loop on a virtual clock: a device changes while it serves, and the policy follows what is observed.

The rules are those of the live controller (policies/adaptation/drift.py); here they are asked after each batch, and a
new policy decides a while after it was called for, as long as solving may take.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.adaptation.drift import Evidence
from policies.adaptation.refitting import Drift
from policies.catalog import Chosen, choose
from policies.profile import Profile
from policies.queue.arrivals import Instants
from policies.queue.batcher import Batcher
from policies.queue.simulator import Service, simulate
from policies.types import Kind, Launch, Request

SOLVING = 0.25  # s, from the call for a new policy until it decides


@dataclass(frozen=True, slots=True)
class Phase:
    """What the device truly is from an instant on, s."""

    start: float
    profile: Profile


@dataclass(frozen=True)
class Device:
    """A device whose profile changes.

    Attributes:
        phases: ascending; the first starts at 0.
        noise: factor on each service time, drawn once a batch.
    """

    phases: Sequence[Phase]
    noise: Callable[[], float] = lambda: 1.0

    def at(self, instant: float) -> Profile:
        """The profile at an instant, s."""
        return next(phase.profile for phase in reversed(self.phases) if phase.start <= instant)

    def service_time(self, launch: Launch) -> float:
        """Of a launch, by the instant at which it starts, s."""
        return self.at(launch.requests[0].started).service_time(len(launch.requests)) * self.noise()

    def energy(self, service: Service) -> float:
        """Of a batch, J; 0 where the profile has none."""
        return self.at(service.start).energy(len(service.launch.requests)) or 0.0


@dataclass(frozen=True, slots=True)
class Swap:
    """A new policy: when it was called for, when it decided first (s), and why; no drifts where it knew beforehand."""

    noticed: float
    swapped: float
    drifts: tuple[Drift, ...]
    chosen: Chosen


class Pilot(Protocol):
    """Sees each batch, and now and then wants another policy."""

    def after(self, service: Service, energy: float) -> Swap | None:
        """A batch ended; its energy in J. What is to decide from some later instant on, if anything is."""
        ...


class Learning:
    """Goes by what it observes."""

    def __init__(self, spec: str, profile: Profile) -> None:
        """`profile` is what is believed at first."""
        self._spec = spec
        self._evidence = Evidence(profile)
        self._joules = 0.0
        self._evidence.reading(0.0, 0.0)

    def after(self, service: Service, energy: float) -> Swap | None:
        """Hand the batch to the rules; solve again where they say so."""
        self._joules += energy
        self._evidence.batch(len(service.launch.requests), service.finish - service.start)
        self._evidence.reading(service.finish, self._joules)
        refit = self._evidence.refit()
        if refit is None:
            return None
        again = choose(self._spec, refit.profile)
        return Swap(service.finish, service.finish + SOLVING, refit.drifts, again)


class Knowing:
    """Has the policy solved for the truth from the very instant of each change: what learning is measured against."""

    def __init__(self, spec: str, device: Device) -> None:
        """Solves for all phases but the first beforehand."""
        self._to_come = [Swap(p.start, p.start, (), choose(spec, p.profile)) for p in device.phases[1:]]

    def after(self, service: Service, energy: float) -> Swap | None:
        """The policy for a phase that has begun."""
        return self._to_come.pop(0) if self._to_come and self._to_come[0].swapped <= service.finish else None


@dataclass(frozen=True)
class ClosedRun:
    """What a run did.

    Attributes:
        arrivals: of each request, s, in order of completion.
        responses: its response time, s.
        starts: of each batch, s.
        energies: of each batch, J.
        swaps: in order.
    """

    arrivals: NDArray[np.float64]
    responses: NDArray[np.float64]
    starts: NDArray[np.float64]
    energies: NDArray[np.float64]
    swaps: tuple[Swap, ...]

    def cost(self, w2: float, begin: float, end: float) -> float:
        """Mean response time in ms, of those who arrive, plus w2 x mean power in W, from `begin` to `end`, s."""
        mine = (self.arrivals >= begin) & (self.arrivals < end)
        joules = self.energies[(self.starts >= begin) & (self.starts < end)].sum()
        return float(1e3 * self.responses[mine].mean() + w2 * joules / (end - begin))


@dataclass
class _Log:
    arrivals: list[float] = field(default_factory=list)
    responses: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    energies: list[float] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)


def closed_loop(chosen: Chosen, device: Device, instants: Instants, pilot: Pilot) -> ClosedRun:
    """Serve one request for each instant of arrival, by the policy at first chosen and by those that the pilot wants.

    What the monitor has seen of the arrivals is kept through a swap.

    Args:
        chosen: newly; its monitor remembers.
        device: what truly serves.
        instants: of arrival, s, sorted.
        pilot: newly made.
    """
    requests = [Request(i, at, Kind()) for i, at in enumerate(instants.tolist())]
    batcher = Batcher(chosen.policy, {"": chosen.profile.max_batch_size}, chosen.monitor)
    log = _Log()
    solving: Swap | None = None
    for service, energy in _served(batcher, device, requests, log):
        wanted = pilot.after(service, energy)
        if wanted is not None:
            log.swaps.append(wanted)
            solving = wanted
        if solving is not None and solving.swapped <= service.finish:
            batcher.policy, solving = solving.chosen.policy, None
    return ClosedRun(
        np.array(log.arrivals), np.array(log.responses), np.array(log.starts), np.array(log.energies), tuple(log.swaps)
    )


def _served(
    batcher: Batcher, device: Device, requests: Sequence[Request], log: _Log
) -> Iterator[tuple[Service, float]]:
    for service in simulate(batcher, requests, device.service_time):
        energy = device.energy(service)
        log.starts.append(service.start)
        log.energies.append(energy)
        for request in service.finished:
            log.arrivals.append(request.arrival)
            log.responses.append(service.finish - request.arrival)
        yield service, energy


@dataclass(frozen=True)
class Trial:
    """One change of a device under load, and how the loop took it.

    Attributes:
        swaps: all of them.
        noticed: from the change to the first call for a new policy, s; inf where it was not noticed.
        settled: from the change until the last new policy decided, s.
        cost: before the change; and from the last swap on, learning, knowing, and never swapping.
    """

    swaps: tuple[Swap, ...]
    noticed: float
    settled: float
    before: float
    learning: float
    knowing: float
    unchanged: float


def trial(profile: Profile, truth: Phase, w2: float, instants: Instants) -> Trial:
    """A device that is `profile` until it becomes `truth`, served by smdp with this weight.

    Args:
        profile: believed, and true until the change.
        truth: from its start on.
        w2: weight of the power, per W.
        instants: of arrival, s.
    """
    spec, device, end = f"smdp:w2={w2:g}", Device([Phase(0.0, profile), truth]), float(instants[-1])
    learning = closed_loop(choose(spec, profile), device, instants, Learning(spec, profile))
    knowing = closed_loop(choose(spec, profile), device, instants, Knowing(spec, device))
    unchanged = closed_loop(choose(spec, profile), device, instants, Knowing(spec, Device(device.phases[:1])))
    after = [swap for swap in learning.swaps if swap.noticed >= truth.start]
    begin = after[-1].swapped if after else truth.start
    return Trial(
        swaps=learning.swaps,
        noticed=after[0].noticed - truth.start if after else inf,
        settled=begin - truth.start if after else inf,
        before=learning.cost(w2, 0.0, truth.start),
        learning=learning.cost(w2, begin, end),
        knowing=knowing.cost(w2, begin, end),
        unchanged=unchanged.cost(w2, begin, end),
    )
