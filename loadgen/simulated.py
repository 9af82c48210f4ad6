"""The same arrivals through the queue alone: the server's own batcher and policy on a virtual clock."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

import numpy as np

from loadgen.report import OK, Record
from loadgen.sizes import RequestSizes
from policies.action_lookup import count_table
from policies.catalog import Chosen, choose, combine, in_stages
from policies.profile import Profile
from policies.queue import counting, simulator
from policies.queue.arrivals import Instants
from policies.queue.batcher import Batcher
from policies.queue.fleet import least_expected, run_fleet
from policies.queue.simulator import Router, Run, Service, Station, serve
from policies.rules.multi_bin import mistaken
from policies.types import Kind, Launch, Request, SpecError


@dataclass(frozen=True)
class Simulation:
    """A policy, by its spec, in front of one emulated device or several; each run begins afresh.

    Attributes:
        profile: the device's service times and energies.
        spec: of the policy.
        model: the name under which requests arrive.
        stages: of equal length, on which a policy by stages decides; None: as the profile knows them, else 10.
        sizes: of the requests, where they differ; bins then know them beforehand.
        others: profiles of the devices beside the first. Each has a queue, and measures the rate of its own share; a
            request goes to the one that should answer it first.
    """

    profile: Profile
    spec: str
    model: str = ""
    stages: int | None = None
    sizes: RequestSizes | None = None
    others: Sequence[Profile] = ()

    def run(self, instants: Instants) -> Run:
        """Serve one request for each instant of arrival (s, sorted, at least one).

        Raises:
            SpecError: the policy's spec cannot be used with this profile, or the profiles not beside each other.
        """
        if self.sizes is None and not self.others:
            return simulate_policy(self._chosen(self.profile), instants, self.model)
        return run_fleet(*self._served(instants)).whole

    def records(self, instants: Instants) -> Iterator[Record]:
        """The same run, request by request in order of completion, as a client without a network would record it."""
        spent: dict[int, float] = {}  # J, by request, up to the stage that it has reached
        for station, service in serve(*self._served(instants)):
            size, energy = len(service.launch.requests), station.energy(service)
            for request in service.launch.requests if energy is not None else ():
                spent[request.id] = spent.get(request.id, 0.0) + (energy or 0.0) / size
            for request in service.finished:
                yield Record(
                    scheduled=request.arrival,
                    sent=request.arrival,
                    finished=service.finish,
                    status=OK,
                    batch_size=size,
                    waiting=request.started - request.arrival,
                    service=service.finish - request.started,
                    energy=spent.pop(request.id, None),
                )

    def _served(self, instants: Instants) -> tuple[list[Station], list[Request], Router]:
        chosen = self._chosen_by_each()
        devices: list[DeviceModel] = [SimulatedDevice(each.profile, each.profile.service_time) for each in chosen]
        requests = _requests(chosen[0], instants, self.model)
        if self.sizes is not None:
            devices = [SimulatedTextDevice(self.profile)]
            requests = _sized(chosen[0], instants, self.model, self.sizes)
        stations = [
            Station(_batcher(each, self.model), device.service_time, device.energy)
            for each, device in zip(chosen, devices, strict=True)
        ]
        return stations, requests, least_expected(stations, [{self.model: each.profile} for each in chosen])

    def _chosen_by_each(self) -> list[Chosen]:
        """Solved once for equal devices; each measures for itself."""
        if self.others and self.sizes is not None:
            raise SpecError("requests that differ in size are simulated on one device: leave --sizes out, or name one")
        profiles = (self.profile, *self.others)
        known = {profile: self._chosen(profile) for profile in profiles}
        stages = sorted({chosen.profile.stages for chosen in known.values()})
        if len(stages) > 1:
            raise SpecError(
                f"one profile has {stages[0]} stages, another {stages[-1]}: say with --stages how many all have"
            )
        return [replace(known[profile], monitor=deepcopy(known[profile].monitor)) for profile in profiles]

    def _chosen(self, profile: Profile) -> Chosen:
        if self.sizes is None:
            return choose(self.spec, in_stages(self.spec, profile, self.stages))
        if profile.lengths is None:
            name = profile.name
            raise SpecError(f"profile {name!r} knows no lengths; simulate longest, or one with length_service_time_s")
        if self.stages is not None:
            raise SpecError(f"--stages {self.stages} cuts what takes all alike; with --sizes a stage is an iteration")
        chosen = choose(self.spec, profile)
        alone = [chosen.profile.service_time(1, length) for length in self.sizes.lengths.tolist()]
        return chosen if chosen.bins is None else replace(chosen, bins=chosen.bins.knowing(alone))


def simulate_policy(
    chosen: Chosen, instants: Instants, model: str = "", service_time: Callable[[int], float] | None = None
) -> Run:
    """Serve one request for each instant (s, sorted, at least one) by a policy as it was chosen.

    A policy of the queue length alone goes the fast way, ten to thirty times faster, to the same run.
    The monitor of `chosen` remembers what it saw: choose again for another run.

    Args:
        chosen: the policy, its monitor and the device's profile.
        instants: of arrival, s.
        model: the name under which requests arrive.
        service_time: of a batch of b, s, drawn at each call; None takes the profile's means.
    """
    profile = chosen.profile
    drawn, table = service_time or profile.service_time, count_table(chosen)
    if table is not None:
        return counting.run_table(table, counting.Device(drawn, profile.max_batch_size, profile.energies), instants)
    device, requests = SimulatedDevice(profile, drawn), _requests(chosen, instants, model)
    return simulator.run(_batcher(chosen, model), requests, device.service_time, device.energy)


class DeviceModel(Protocol):
    """A device on a virtual clock."""

    def service_time(self, launch: Launch) -> float:
        """Of a launch, s."""
        ...

    def energy(self, service: Service) -> float | None:
        """Of a service, J; None where unknown."""
        ...


@dataclass(frozen=True)
class SimulatedDevice:
    """Serves launches of whole models and of stages.

    Attributes:
        profile: service times by stage, and energies.
        drawn: service time, s, of a whole batch of b; a part of the stages takes its share of it.
    """

    profile: Profile
    drawn: Callable[[int], float]

    def service_time(self, launch: Launch) -> float:
        """Of a launch, s."""
        size, first = len(launch.requests), launch.requests[0].stage
        share = self.profile.launch_time(size, first, _last_stage(launch, first)) / self.profile.service_time(size)
        return self.drawn(size) * share

    def energy(self, service: Service) -> float | None:
        """Of a service, J."""
        launch, first = service.launch, service.first_stage
        return self.profile.launch_energy(len(launch.requests), first, _last_stage(launch, first))


@dataclass(frozen=True)
class SimulatedTextDevice:
    """Serves requests whose lengths differ, their payload: together to the longest one's end, or by iterations.

    Attributes:
        profile: with lengths.
    """

    profile: Profile

    def service_time(self, launch: Launch) -> float:
        """Of a launch, s; to the end only of requests that have not begun."""
        batch = launch.requests
        if launch.stages is None:
            return self.profile.service_time(len(batch), max(r.payload for r in batch))
        return launch.stages * self.profile.iteration_time(len(batch), sum(r.stage == 0 for r in batch))

    def energy(self, service: Service) -> None:
        """Not known by length."""


def _last_stage(launch: Launch, first: int) -> int:
    """The stage before which a launch ends."""
    return max(r.stages for r in launch.requests) if launch.stages is None else first + launch.stages


def _requests(chosen: Chosen, instants: Instants, model: str) -> list[Request]:
    kind, profile = Kind(model), chosen.profile
    alone, stages, slo = profile.service_time(1), profile.stages, chosen.slo
    return [Request(i, t, kind, t + slo, size=alone, stages=stages) for i, t in enumerate(instants.tolist())]


def _sized(chosen: Chosen, instants: Instants, model: str, sizes: RequestSizes) -> list[Request]:
    """Each with its length, as long as which it takes in iterations, and its kind by the time that alone it takes."""
    rng = np.random.default_rng([sizes.seed, 3])
    requests = []
    for i, (at, length) in enumerate(zip(instants.tolist(), sizes.lengths.tolist(), strict=True)):
        alone = chosen.profile.service_time(1, length)
        kind = chosen.kind(model, alone)
        if chosen.bins is not None:
            kind = mistaken(kind, len(chosen.bins.edges) + 1, sizes.bin_error, rng)
        requests.append(Request(i, at, kind, at + chosen.slo, size=alone, stages=ceil(length), payload=length))
    return requests


def _batcher(chosen: Chosen, model: str) -> Batcher:
    policy, monitor = combine({model: chosen}) if chosen.bins is not None else (chosen.policy, chosen.monitor)
    return Batcher(policy, {model: chosen.profile.max_batch_size}, monitor, (model,) if chosen.profile.lengths else ())
