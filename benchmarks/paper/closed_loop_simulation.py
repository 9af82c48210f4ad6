"""The closed loop on a virtual clock: a device changes while it serves, and the policy is solved again.

Drift is detected by the rules of the live controller (policies/adaptation/drift.py), evaluated after each batch. A new
policy takes effect after a constant time for solving.
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

SOLVING = 0.25  # s, from the detection of a drift until the new policy takes effect


@dataclass(frozen=True, slots=True)
class Phase:
    """The device's actual profile from an instant on, s."""

    start: float
    profile: Profile


@dataclass(frozen=True)
class Device:
    """A device whose profile changes.

    Attributes:
        phases: ascending; the first starts at 0.
        noise: draws the factor on the service time of a batch.
    """

    phases: Sequence[Phase]
    noise: Callable[[], float] = lambda: 1.0

    def at(self, instant: float) -> Profile:
        """The profile at an instant, s."""
        return next(phase.profile for phase in reversed(self.phases) if phase.start <= instant)

    def service_time(self, launch: Launch) -> float:
        """Service time of a launch by the profile at its start, s."""
        return self.at(launch.requests[0].started).service_time(len(launch.requests)) * self.noise()

    def energy(self, service: Service) -> float:
        """Energy of a batch, J; 0 if the profile has none."""
        return self.at(service.start).energy(len(service.launch.requests)) or 0.0


@dataclass(frozen=True, slots=True)
class Swap:
    """A policy swap.

    Attributes:
        noticed: instant of the detection, s.
        swapped: instant at which the new policy takes effect, s.
        drifts: detected drifts; empty for a swap at a known change.
        chosen: the new policy.
    """

    noticed: float
    swapped: float
    drifts: tuple[Drift, ...]
    chosen: Chosen


class SwapRule(Protocol):
    """Decides after each batch whether the policy is swapped."""

    def after(self, service: Service, energy: float) -> Swap | None:
        """The swap that follows from a batch and its energy, J; None for no swap."""
        ...


class DriftDetection:
    """Swaps the policy when a drift is detected."""

    def __init__(self, spec: str, profile: Profile) -> None:
        """Start with a policy solved for `profile`."""
        self._spec = spec
        self._evidence = Evidence(profile)
        self._joules = 0.0
        self._evidence.reading(0.0, 0.0)

    def after(self, service: Service, energy: float) -> Swap | None:
        """A swap to a policy solved for the refitted profile, if the batch completes the evidence of a drift."""
        self._joules += energy
        self._evidence.batch(len(service.launch.requests), service.finish - service.start)
        self._evidence.reading(service.finish, self._joules)
        refit = self._evidence.refit()
        if refit is None:
            return None
        again = choose(self._spec, refit.profile)
        return Swap(service.finish, service.finish + SOLVING, refit.drifts, again)


class KnownChanges:
    """Swaps the policy at each change of the device without delay: the reference for drift detection."""

    def __init__(self, spec: str, device: Device) -> None:
        """Solve for all phases but the first."""
        self._pending = [Swap(p.start, p.start, (), choose(spec, p.profile)) for p in device.phases[1:]]

    def after(self, service: Service, energy: float) -> Swap | None:
        """The swap to the policy for a phase that has started."""
        return self._pending.pop(0) if self._pending and self._pending[0].swapped <= service.finish else None


@dataclass(frozen=True)
class ClosedRun:
    """The result of a run.

    Attributes:
        arrivals: arrival time of each request, s, in order of completion.
        responses: response time of each request, s.
        starts: start of each batch, s.
        energies: energy of each batch, J.
        swaps: policy swaps in order.
    """

    arrivals: NDArray[np.float64]
    responses: NDArray[np.float64]
    starts: NDArray[np.float64]
    energies: NDArray[np.float64]
    swaps: tuple[Swap, ...]

    def cost(self, w2: float, begin: float, end: float) -> float:
        """Mean response time, ms, of the arrivals from `begin` to `end`, s, plus w2 x their mean power, W."""
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


def closed_loop(chosen: Chosen, device: Device, instants: Instants, rule: SwapRule) -> ClosedRun:
    """Serve one request for each arrival, under the chosen policy and those that the rule swaps in.

    The monitor's rate estimate survives a swap.

    Args:
        chosen: the first policy, with a new monitor.
        device: serves the batches.
        instants: arrival times, s, sorted.
        rule: a new one.
    """
    requests = [Request(i, at, Kind()) for i, at in enumerate(instants.tolist())]
    batcher = Batcher(chosen.policy, {"": chosen.profile.max_batch_size}, chosen.monitor)
    log = _Log()
    solving: Swap | None = None
    for service, energy in _served(batcher, device, requests, log):
        swap = rule.after(service, energy)
        if swap is not None:
            log.swaps.append(swap)
            solving = swap
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
    """One change of a device under load, and the costs of three ways to react.

    Attributes:
        swaps: swaps by drift detection.
        noticed: time from the change to the first detection, s; inf if there is none.
        settled: time from the change until the last new policy takes effect, s.
        before: cost before the change.
        detected: cost after the last swap, by drift detection.
        known: cost in the same interval with a swap at the change.
        unchanged: cost in the same interval without a swap.
    """

    swaps: tuple[Swap, ...]
    noticed: float
    settled: float
    before: float
    detected: float
    known: float
    unchanged: float


def trial(profile: Profile, truth: Phase, w2: float, instants: Instants) -> Trial:
    """Serve under smdp with a weight on a device that changes once.

    Args:
        profile: the device's before the change, for which the first policy is solved.
        truth: the device after the change.
        w2: weight of the mean power, per W.
        instants: arrival times, s.
    """
    spec, device, end = f"smdp:w2={w2:g}", Device([Phase(0.0, profile), truth]), float(instants[-1])
    detected = closed_loop(choose(spec, profile), device, instants, DriftDetection(spec, profile))
    known = closed_loop(choose(spec, profile), device, instants, KnownChanges(spec, device))
    unchanged = closed_loop(choose(spec, profile), device, instants, KnownChanges(spec, Device(device.phases[:1])))
    after = [swap for swap in detected.swaps if swap.noticed >= truth.start]
    begin = after[-1].swapped if after else truth.start
    return Trial(
        swaps=detected.swaps,
        noticed=after[0].noticed - truth.start if after else inf,
        settled=begin - truth.start if after else inf,
        before=detected.cost(w2, 0.0, truth.start),
        detected=detected.cost(w2, begin, end),
        known=known.cost(w2, begin, end),
        unchanged=unchanged.cost(w2, begin, end),
    )
