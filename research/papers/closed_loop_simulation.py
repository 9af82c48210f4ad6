"""Closed-loop simulation: a device's profile changes while it serves, and a controller swaps the policy.

The drift detection is the live controller's (policies/adaptation/drift.py), evaluated after each batch. A new policy
takes effect SOLVE_TIME after the drift was detected.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.adaptation.drift import DriftDetector
from policies.adaptation.energy_refits import Drift
from policies.catalog import ModelPolicy, choose
from policies.profile import Profile
from policies.queue.arrivals import Instants
from policies.queue.batcher import Batcher
from policies.queue.simulator import Service, simulate
from policies.types import BatchKey, Launch, Request

SOLVE_TIME = 0.25  # s


@dataclass(frozen=True, slots=True)
class Phase:
    """The device's true profile from the instant `start` on, s."""

    start: float
    profile: Profile


@dataclass(frozen=True)
class DriftingDevice:
    """A device whose profile changes over time.

    Attributes:
        phases: ascending by start; the first starts at 0.
        noise: draws a factor on the service time of each batch.
    """

    phases: Sequence[Phase]
    noise: Callable[[], float] = lambda: 1.0

    def at(self, instant: float) -> Profile:
        """Profile at an instant, s."""
        return next(phase.profile for phase in reversed(self.phases) if phase.start <= instant)

    def service_time(self, launch: Launch) -> float:
        """Service time of a launch, by the profile at its start, s."""
        return self.at(launch.requests[0].started).service_time(len(launch.requests)) * self.noise()

    def energy(self, service: Service) -> float:
        """Energy of a batch, J; 0 if the profile has none."""
        return self.at(service.start).energy(len(service.launch.requests)) or 0.0


@dataclass(frozen=True, slots=True)
class PolicySwap:
    """A change of policy.

    Attributes:
        detected: instant of the detection, s.
        swapped: instant from which the new policy decides, s.
        drifts: the detected drifts; empty if the change was known in advance.
        chosen: the new policy.
    """

    detected: float
    swapped: float
    drifts: tuple[Drift, ...]
    chosen: ModelPolicy


class PolicyController(Protocol):
    """Observes each batch and decides when to swap the policy."""

    def after(self, service: Service, energy: float) -> PolicySwap | None:
        """Process a completed batch and its energy, J; return a swap, or None."""
        ...


class LearningController:
    """Swaps the policy when it detects a drift of the observed service times or energies."""

    def __init__(self, spec: str, profile: Profile) -> None:
        """`profile` is the profile assumed at first."""
        self._spec = spec
        self._evidence = DriftDetector(profile)
        self._joules = 0.0
        self._evidence.observe_energy(0.0, 0.0)

    def after(self, service: Service, energy: float) -> PolicySwap | None:
        """Update the drift detection; solve again with the refitted profile after a drift."""
        self._joules += energy
        self._evidence.observe_batch(len(service.launch.requests), service.finish - service.start)
        self._evidence.observe_energy(service.finish, self._joules)
        refit = self._evidence.refit()
        if refit is None:
            return None
        return PolicySwap(service.finish, service.finish + SOLVE_TIME, refit.drifts, choose(self._spec, refit.profile))


class OracleController:
    """Swaps to the policy of the true profile at each change: the reference for LearningController."""

    def __init__(self, spec: str, device: DriftingDevice) -> None:
        """Solve for all phases but the first."""
        self._pending = [PolicySwap(p.start, p.start, (), choose(spec, p.profile)) for p in device.phases[1:]]

    def after(self, service: Service, energy: float) -> PolicySwap | None:
        """Return the policy of a phase that has begun."""
        return self._pending.pop(0) if self._pending and self._pending[0].swapped <= service.finish else None


@dataclass(frozen=True)
class ClosedLoopRun:
    """Result of a closed-loop run.

    Attributes:
        arrivals: arrival instant of each request, s, in order of completion.
        responses: response time of each request, s.
        starts: start of each batch, s.
        energies: energy of each batch, J.
        swaps: policy swaps in order.
    """

    arrivals: NDArray[np.float64]
    responses: NDArray[np.float64]
    starts: NDArray[np.float64]
    energies: NDArray[np.float64]
    swaps: tuple[PolicySwap, ...]

    def cost(self, w2: float, begin: float, end: float) -> float:
        """Mean response time (ms) of the arrivals from `begin` to `end` (s) plus w2 x mean power (W) in that time."""
        arrived = (self.arrivals >= begin) & (self.arrivals < end)
        joules = self.energies[(self.starts >= begin) & (self.starts < end)].sum()
        return float(1e3 * self.responses[arrived].mean() + w2 * joules / (end - begin))


@dataclass
class _Log:
    arrivals: list[float] = field(default_factory=list)
    responses: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    energies: list[float] = field(default_factory=list)
    swaps: list[PolicySwap] = field(default_factory=list)


def closed_loop(
    chosen: ModelPolicy, device: DriftingDevice, instants: Instants, controller: PolicyController
) -> ClosedLoopRun:
    """Simulate one request per arrival instant under a policy that the controller swaps.

    The rate estimate of the arrival monitor survives a swap.

    Args:
        chosen: initial policy, with an unused monitor.
        device: the device that serves.
        instants: arrival instants, s, sorted.
        controller: an unused controller.
    """
    requests = [Request(i, at, BatchKey()) for i, at in enumerate(instants.tolist())]
    batcher = Batcher(chosen.policy, {"": chosen.profile.max_batch_size}, chosen.monitor)
    log = _Log()
    solving: PolicySwap | None = None
    for service, energy in _served(batcher, device, requests, log):
        swap = controller.after(service, energy)
        if swap is not None:
            log.swaps.append(swap)
            solving = swap
        if solving is not None and solving.swapped <= service.finish:
            batcher.policy, solving = solving.chosen.policy, None
    return ClosedLoopRun(
        np.array(log.arrivals), np.array(log.responses), np.array(log.starts), np.array(log.energies), tuple(log.swaps)
    )


def _served(
    batcher: Batcher, device: DriftingDevice, requests: Sequence[Request], log: _Log
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
class DriftTrial:
    """Response of the closed loop to one change of the device.

    Attributes:
        swaps: all swaps of the learning controller.
        detection_time: time from the change to its first detection, s; inf if it was not detected.
        settling_time: time from the change until the last new policy decides, s; inf if it was not detected.
        before: cost before the change.
        learning: cost from the last swap on with the learning controller.
        oracle: cost in the same time with the oracle.
        unchanged: cost in the same time without a swap.
    """

    swaps: tuple[PolicySwap, ...]
    detection_time: float
    settling_time: float
    before: float
    learning: float
    oracle: float
    unchanged: float


def run_drift_trial(profile: Profile, truth: Phase, w2: float, instants: Instants) -> DriftTrial:
    """Simulate a device that changes from `profile` to `truth`, under the policy smdp.

    Args:
        profile: the assumed profile, true until the change.
        truth: the true profile from its start on.
        w2: weight of the power, per W.
        instants: arrival instants, s.
    """
    spec, device, end = f"smdp:w2={w2:g}", DriftingDevice([Phase(0.0, profile), truth]), float(instants[-1])
    learning = closed_loop(choose(spec, profile), device, instants, LearningController(spec, profile))
    oracle = closed_loop(choose(spec, profile), device, instants, OracleController(spec, device))
    unchanged = closed_loop(
        choose(spec, profile), device, instants, OracleController(spec, DriftingDevice(device.phases[:1]))
    )
    after = [swap for swap in learning.swaps if swap.detected >= truth.start]
    begin = after[-1].swapped if after else truth.start
    return DriftTrial(
        swaps=learning.swaps,
        detection_time=after[0].detected - truth.start if after else inf,
        settling_time=begin - truth.start if after else inf,
        before=learning.cost(w2, 0.0, truth.start),
        learning=learning.cost(w2, begin, end),
        oracle=oracle.cost(w2, begin, end),
        unchanged=unchanged.cost(w2, begin, end),
    )
