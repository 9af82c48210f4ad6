"""Simulated runs: the server's batcher and policy on a virtual clock, with the same arrivals as a live run."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.catalog import ModelPolicy, choose, combine, in_stages
from policies.profile import Profile
from policies.queue import simulator
from policies.queue.arrivals import Instants
from policies.queue.batcher import Batcher
from policies.queue.fleet import run_fleet, shortest_expected_delay
from policies.queue.simulator import Router, Run, Service, Station, serve
from policies.queue.table_simulator import ServiceModel, simulate_ages, simulate_table
from policies.rules.multi_bin import mispredicted
from policies.types import BatchKey, Launch, Request, SpecError


@dataclass(frozen=True)
class RequestSizes:
    """Sizes of the requests of a run.

    Attributes:
        lengths: length of each request in order of arrival, in the unit of the profile's lengths.
        bin_error: p_e, probability of each neighbouring bin instead of the right one (Multi-Bin, section 6.2).
        seed: seed of these errors.
    """

    lengths: NDArray[np.float64]
    bin_error: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class RequestLevels:
    """Priority levels of the requests of a run.

    Attributes:
        levels: level of each request in order of arrival; 1 is the first.
        shares: of the levels in the arrivals, the first level first, for which policies are solved.
        weights: of the levels' mean response times, W1:W2:...; None for policies that do not know the levels.
    """

    levels: Sequence[int]
    shares: Sequence[float]
    weights: str | None = None


@dataclass(frozen=True)
class Simulation:
    """Simulation of a policy on one device or several; each run starts from an empty queue and an unused monitor.

    Attributes:
        profile: the device's service times and energies.
        spec: spec of the policy.
        model: model name of the requests.
        stages: number of equal stages for a policy that decides by stage; None is the profile's number, else 10.
        sizes: sizes of the requests if they differ; multi-bin policies know them on arrival.
        others: profiles of further devices. Each device has its own queue and arrival rate estimate; a request goes to
            the device with the shortest expected delay.
        levels: priority levels of the requests; None for one level.
    """

    profile: Profile
    spec: str
    model: str = ""
    stages: int | None = None
    sizes: RequestSizes | None = None
    others: Sequence[Profile] = ()
    levels: RequestLevels | None = None

    def run(self, instants: Instants) -> Run:
        """Simulate one request per arrival instant (s, sorted, at least one).

        Raises:
            SpecError: the spec cannot be used with this profile, or the profiles cannot be combined.
        """
        if self.sizes is None and self.levels is None and not self.others:
            return simulate_policy(self._chosen(self.profile), instants, self.model)
        return run_fleet(*self._served(instants)).whole

    def services(self, instants: Instants) -> Iterator[tuple[Station, Service]]:
        """Simulate the same run and yield each service and its device, in order of completion."""
        return serve(*self._served(instants))

    def _served(self, instants: Instants) -> tuple[list[Station], list[Request], Router]:
        chosen = self._chosen_by_each()
        devices: list[DeviceModel] = [SimulatedDevice(each.profile, each.profile.service_time) for each in chosen]
        requests = _requests(chosen[0], instants, self.model)
        if self.sizes is not None:
            devices = [SimulatedDeviceOfLengths(self.profile)]
            requests = _requests_of_sizes(chosen[0], instants, self.model, self.sizes)
        count = 1
        if self.levels is not None:
            count = len(self.levels.shares)
            for request, level in zip(requests, self.levels.levels, strict=True):
                request.level = level
        stations = [
            Station(_batcher(each, self.model, count), device.service_time, device.energy)
            for each, device in zip(chosen, devices, strict=True)
        ]
        return stations, requests, shortest_expected_delay(stations, [{self.model: each.profile} for each in chosen])

    def _chosen_by_each(self) -> list[ModelPolicy]:
        """Policy of each device: solved once per profile, with a separate monitor per device."""
        if self.others and self.sizes is not None:
            raise SpecError("requests of different sizes are simulated on one device: leave --sizes out, or name one")
        if self.others and self.levels is not None:
            raise SpecError("priority levels are simulated on one device: leave --levels out, or name one")
        profiles = (self.profile, *self.others)
        known = {profile: self._chosen(profile) for profile in profiles}
        stages = sorted({chosen.profile.stages for chosen in known.values()})
        if len(stages) > 1:
            raise SpecError(
                f"one profile has {stages[0]} stages, another {stages[-1]}: give the number for all with --stages"
            )
        return [replace(known[profile], monitor=deepcopy(known[profile].monitor)) for profile in profiles]

    def _chosen(self, profile: Profile) -> ModelPolicy:
        chosen = self._chosen_for_sizes(profile)
        return chosen if self.levels is None else chosen.with_solved_shares(self.levels.shares)

    def _chosen_for_sizes(self, profile: Profile) -> ModelPolicy:
        weights = None if self.levels is None else self.levels.weights
        defaults = {} if weights is None else {"priority_weights": weights}
        if self.sizes is None:
            return _without_sizes(choose(self.spec, in_stages(self.spec, profile, self.stages), defaults))
        if not profile.varies_by_length:
            name = profile.name
            raise SpecError(f"profile {name!r} has no lengths; simulate longest, or one with length_service_time_s")
        if self.stages is not None:
            raise SpecError(f"--stages {self.stages} is for requests of equal size; leave --stages or --sizes out")
        chosen = choose(self.spec, profile, defaults)
        if self.sizes.bin_error and chosen.bins is not None and chosen.bins.pooled:
            raise SpecError(f"--bin-error is for policies that keep bins apart, not for {self.spec}; leave it out")
        alone = [chosen.profile.service_time(1, length) for length in self.sizes.lengths.tolist()]
        return chosen if chosen.bins is None else chosen.with_sizes(alone)


def _without_sizes(chosen: ModelPolicy) -> ModelPolicy:
    if chosen.solve_for is not None:
        raise SpecError(f"policy {chosen.spec!r} is solved for the sizes of requests; simulate it with --sizes")
    return chosen


def simulate_policy(
    chosen: ModelPolicy, instants: Instants, model: str = "", service_time: Callable[[int], float] | None = None
) -> Run:
    """Simulate one request per arrival instant under a chosen policy.

    A policy that depends only on the queue length, and a table of maximum ages, are simulated by a table lookup, ten to
    thirty times faster and with the same result. The run changes the monitor of `chosen`, so each run needs a new one.

    Args:
        chosen: the policy, its monitor and the device's profile.
        instants: arrival instants, s, sorted, at least one.
        model: model name of the requests.
        service_time: draws the service time of a batch of b, s; None takes the profile's means.
    """
    profile = _without_sizes(chosen).profile
    drawn, table = service_time or profile.service_time, chosen.fixed_action_table()
    ages, largest = chosen.fixed_max_ages(), profile.max_batch_size
    if ages is not None:
        return simulate_ages(ages, ServiceModel(drawn, largest, profile.energies), instants)
    if table is not None:
        return simulate_table(table, ServiceModel(drawn, profile.max_batch_size, profile.energies), instants)
    device, requests = SimulatedDevice(profile, drawn), _requests(chosen, instants, model)
    return simulator.run(_batcher(chosen, model), requests, device.service_time, device.energy)


class DeviceModel(Protocol):
    """Service times and energies of a device on a virtual clock."""

    def service_time(self, launch: Launch) -> float:
        """Service time of a launch, s."""
        ...

    def energy(self, service: Service) -> float | None:
        """Energy of a service, J; None if unknown."""
        ...


@dataclass(frozen=True)
class SimulatedDevice:
    """A device with a profile, for launches of the whole model and of stages.

    Attributes:
        profile: service times by stage, and energies.
        drawn: draws the service time of a batch of b through all stages, s; some stages take their share of it.
    """

    profile: Profile
    drawn: Callable[[int], float]

    def service_time(self, launch: Launch) -> float:
        """Service time of a launch, s."""
        size, first = len(launch.requests), launch.requests[0].stage
        share = self.profile.launch_time(size, first, _last_stage(launch, first)) / self.profile.service_time(size)
        return self.drawn(size) * share

    def energy(self, service: Service) -> float | None:
        """Energy of a service, J."""
        launch, first = service.launch, service.first_stage
        return self.profile.launch_energy(len(launch.requests), first, _last_stage(launch, first))


@dataclass(frozen=True)
class SimulatedDeviceOfLengths:
    """A device for requests of different lengths, which are their payload.

    A batch runs until its longest request is complete.

    Attributes:
        profile: profile with lengths.
    """

    profile: Profile

    def service_time(self, launch: Launch) -> float:
        """Service time of a launch, s."""
        return self.profile.service_time(len(launch.requests), max(r.payload for r in launch.requests))

    def energy(self, service: Service) -> float | None:
        """Energy of a launch, J: the power of a batch of this size is taken as that of the profile at any length."""
        size = len(service.launch.requests)
        energy = self.profile.energy(size)
        return None if energy is None else energy / self.profile.service_time(size) * (service.finish - service.start)


def _last_stage(launch: Launch, first: int) -> int:
    """Stage before which a launch ends."""
    return max(r.stages for r in launch.requests) if launch.stages is None else first + launch.stages


def _requests(chosen: ModelPolicy, instants: Instants, model: str) -> list[Request]:
    kind, profile = BatchKey(model), chosen.profile
    alone, stages, slo = profile.service_time(1), profile.stages, chosen.slo
    return [Request(i, t, kind, t + slo, size=alone, stages=stages) for i, t in enumerate(instants.tolist())]


def _requests_of_sizes(chosen: ModelPolicy, instants: Instants, model: str, sizes: RequestSizes) -> list[Request]:
    """Requests with their lengths as payload; the bin follows from the service time."""
    rng = np.random.default_rng([sizes.seed, 3])
    requests = []
    for i, (at, length) in enumerate(zip(instants.tolist(), sizes.lengths.tolist(), strict=True)):
        alone = chosen.profile.service_time(1, length)
        kind = chosen.kind(model, alone)
        if chosen.bins is not None and not chosen.bins.pooled:
            kind = mispredicted(kind, len(chosen.bins.edges) + 1, sizes.bin_error, rng)
        requests.append(Request(i, at, kind, at + chosen.slo, size=alone, payload=length, length=length))
    return requests


def _batcher(chosen: ModelPolicy, model: str, levels: int = 1) -> Batcher:
    policy, monitor = combine({model: chosen}) if chosen.bins is not None else (chosen.policy, chosen.monitor)
    profile = chosen.profile
    largest, tokens = {model: profile.max_batch_size}, {model: profile.max_batch_tokens}
    return Batcher(policy, largest, monitor, tokens, {model: levels})
