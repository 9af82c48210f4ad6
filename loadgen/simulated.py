"""The same arrivals through the queue alone: the server's own batcher and policy on a virtual clock."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loadgen.report import OK, Record
from policies.catalog import Chosen, choose, count_table, in_stages
from policies.profile import Profile
from policies.queue import counting, simulator
from policies.queue.arrivals import Instants
from policies.queue.batcher import Batcher
from policies.queue.simulator import Run, Service
from policies.types import Kind, Launch, Request


@dataclass(frozen=True)
class Simulation:
    """A policy, by its spec, in front of one emulated device; each run begins afresh.

    Attributes:
        profile: the device's service times and energies.
        spec: of the policy.
        model: the name under which requests arrive.
        stages: of equal length, on which a policy by stages decides; None: as the profile knows them, else 10.
    """

    profile: Profile
    spec: str
    model: str = ""
    stages: int | None = None

    def run(self, instants: Instants) -> Run:
        """Serve one request for each instant of arrival (s, sorted, at least one).

        Raises:
            SpecError: the policy's spec cannot be used with this profile.
        """
        return simulate(self._chosen(), instants, self.model)

    def records(self, instants: Instants) -> Iterator[Record]:
        """The same run, request by request in order of completion, as a client without a network would record it."""
        chosen = self._chosen()
        device = Device(chosen.profile, chosen.profile.service_time)
        requests = _requests(chosen, instants, self.model)
        spent: dict[int, float] = {}  # J, by request, up to the stage that it has reached
        for service in simulator.simulate(_batcher(chosen, self.model), requests, device.service_time):
            size, energy = len(service.launch.requests), device.energy(service)
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

    def _chosen(self) -> Chosen:
        return choose(self.spec, in_stages(self.spec, self.profile, self.stages))


def simulate(
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
    device, requests = Device(profile, drawn), _requests(chosen, instants, model)
    return simulator.run(_batcher(chosen, model), requests, device.service_time, device.energy)


@dataclass(frozen=True)
class Device:
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


def _last_stage(launch: Launch, first: int) -> int:
    """The stage before which a launch ends."""
    return max(r.stages for r in launch.requests) if launch.stages is None else first + launch.stages


def _requests(chosen: Chosen, instants: Instants, model: str) -> list[Request]:
    kind, profile = Kind(model), chosen.profile
    alone, stages, slo = profile.service_time(1), profile.stages, chosen.slo
    return [Request(i, t, kind, t + slo, size=alone, stages=stages) for i, t in enumerate(instants.tolist())]


def _batcher(chosen: Chosen, model: str) -> Batcher:
    return Batcher(chosen.policy, {model: chosen.profile.max_batch_size}, chosen.monitor)
