"""Fast simulation of tables of batch sizes and of maximum ages on one device, without Request and State objects.

The results equal those of simulator.py to the last bit. A table of batch sizes takes about one step per batch: a wait
is skipped up to the arrival that may end it. A table of maximum ages takes a step per arrival in a wait. Service is
first come, first served, so the batch sizes determine the batch of each request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from policies.queue.arrivals import Instants
from policies.queue.lookup import draw
from policies.queue.simulator import Run
from policies.traits import ActionTable
from policies.types import MaxAges, Mix


@dataclass(frozen=True)
class ServiceModel:
    """Service time and energy of the device.

    Attributes:
        service_time: returns the service time of a batch of b, s; called once per batch in order of launch, so it may
            be random.
        max_batch_size: the largest batch of the device, at least the table's.
        energies: energy of a batch of 1, 2, ..., J; None where unknown.
    """

    service_time: Callable[[int], float]
    max_batch_size: int
    energies: Sequence[float] | None = None


def simulate_table(table: ActionTable, device: ServiceModel, instants: Instants) -> Run:
    """Serve one request for each instant of arrival (s, sorted, at least one), and drain the queue greedily at the end.

    A request's id, on which the draws of a mix depend, is its index among the arrivals. The final drain may launch
    batches above the table's maximum.
    """
    return _run(_serve(_actions(table, device.max_batch_size), device, instants.tolist()), device, instants)


def simulate_ages(table: MaxAges, device: ServiceModel, instants: Instants, seed: int = 0) -> Run:
    """Serve one request for each instant of arrival (s, sorted, at least one) by a table of maximum ages.

    Args:
        table: the table.
        device: its largest batch is that of the table, unless the table has a smaller one.
        instants: of the arrivals; a request's id, on which the draws of a mix depend, is its index.
        seed: seed of the draws.
    """
    return _run(_serve_by_age(table, device, instants.tolist(), seed), device, instants)


def _run(served: tuple[list[float], list[float], list[int]], device: ServiceModel, instants: Instants) -> Run:
    starts, finishes, sizes = served
    batch_sizes = np.array(sizes, dtype=np.int64)
    return Run(
        scheduled=len(instants),
        responses=np.repeat(finishes, batch_sizes) - instants,
        arrivals=instants,
        waits=np.repeat(starts, batch_sizes) - instants,
        batch_sizes=batch_sizes,
        finishes=np.array(finishes),
        energies=None if device.energies is None else np.array(device.energies)[batch_sizes - 1],
        elapsed=finishes[-1] - float(instants[0]),
    )


@dataclass(frozen=True)
class _Actions:
    """Actions by queue length, up to the length from which they are constant.

    Attributes:
        first: the action of the table.
        second: the action of the second table, taken with `probability`; no draw where both are equal.
        drain: the action after the last arrival.
        steps: number of arrivals until either table launches; None: neither ever does.
    """

    first: Sequence[int]
    second: Sequence[int]
    drain: Sequence[int]
    steps: Sequence[int | None]
    probability: float
    seed: int


def _actions(table: ActionTable, largest: int) -> _Actions:
    mix = table.mix or Mix(0.0, table.batch_size)
    lengths = range(max(len(table.batch_size), len(mix.batch_size), largest + 1))
    first, second = (
        [min(sizes[min(n, len(sizes) - 1)], table.max_batch_size, n) for n in lengths]
        for sizes in (table.batch_size, mix.batch_size)
    )
    drain = [min(n, largest) for n in lengths]
    return _Actions(first, second, drain, _steps(list(map(max, first, second))), mix.probability, table.seed)


def _steps(sizes: Sequence[int]) -> list[int | None]:
    """Count the arrivals from each queue length to the next that launches; the last entry repeats."""
    steps: list[int | None] = [1 if sizes[-1] else None]
    for size in reversed(sizes[1:]):
        after = steps[-1]
        steps.append(1 if size else None if after is None else after + 1)
    return steps[::-1]


def _serve(
    actions: _Actions, device: ServiceModel, arrivals: list[float]
) -> tuple[list[float], list[float], list[int]]:
    """Return start and finish, s, and size of each batch."""
    first, second, top, service_time = actions.first, actions.second, len(actions.first) - 1, device.service_time
    starts: list[float] = []
    finishes: list[float] = []
    sizes: list[int] = []
    now, served, arrived, total = 0.0, 0, 0, len(arrivals)  # requests served..arrived - 1 are waiting
    arrivals = [*arrivals, inf]
    while served < total:
        while arrivals[arrived] <= now:  # faster than bisection, because few arrive between two batches
            arrived += 1
        length = arrived - served
        if length > top:  # min() makes a run of small batches a third slower
            length = top
        size = first[length]
        if size != second[length] and draw(actions.seed, served, arrived - 1) < actions.probability:
            size = second[length]
        if size == 0:
            step = actions.steps[length]
            if step is None or arrived + step > total:  # the remaining arrivals cause no launch: drain after the last
                step, first, second = total - arrived, actions.drain, actions.drain
            arrived += step
            now = max(now, arrivals[arrived - 1])
            continue
        starts.append(now)
        now += service_time(size)
        finishes.append(now)
        sizes.append(size)
        served += size
    return starts, finishes, sizes


def _serve_by_age(
    table: MaxAges, device: ServiceModel, arrivals: list[float], seed: int
) -> tuple[list[float], list[float], list[int]]:
    """Return start and finish, s, and size of each batch."""
    largest, service_time = table.largest(device.max_batch_size), device.service_time
    first, second = table.max_age, table.others or table.max_age
    mixed = first != second
    starts: list[float] = []
    finishes: list[float] = []
    sizes: list[int] = []
    now, served, arrived, total = 0.0, 0, 0, len(arrivals)  # requests served..arrived - 1 are waiting
    arrivals = [*arrivals, inf]
    while served < total:
        oldest = arrivals[served]
        now = max(now, oldest)
        ages = second if mixed and draw(seed, served, served) < table.probability else first
        top = len(ages) - 1
        while True:
            while arrivals[arrived] <= now:
                arrived += 1
            length = arrived - served
            due = oldest + ages[min(length, top)]
            if due <= now:
                break
            if due == inf and arrived == total:  # drain after the last arrival
                first, second, largest = (0.0, 0.0), (0.0, 0.0), device.max_batch_size
                break
            now = min(due, arrivals[arrived])
        size = min(length, largest)
        starts.append(now)
        now += service_time(size)
        finishes.append(now)
        sizes.append(size)
        served += size
    return starts, finishes, sizes
