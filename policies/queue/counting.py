"""A policy of the queue length alone, in front of one device, on a virtual clock: about one step a batch.

The same runs as simulator.py gives, number by number, without a Request or a State for anybody: between two batches
only the queue length matters, so that a wait jumps to the arrival that may end it, and who left with which batch
follows from the batch sizes afterwards, because the oldest go first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from policies.queue.arrivals import Instants
from policies.queue.simulator import Run
from policies.rules.lookup import draw
from policies.types import Mix


@dataclass(frozen=True)
class CountTable:
    """Actions by queue length, or a mix of two such tables.

    Attributes:
        batch_size: action for queue length 0, 1, 2, ...; 0 waits; the last one repeats.
        max_batch_size: the largest batch that is launched before the rest is drained.
        mix: the other table, if the policy is randomised.
        seed: of the draws.
    """

    batch_size: Sequence[int]
    max_batch_size: int
    mix: Mix | None = None
    seed: int = 0


@dataclass(frozen=True)
class Device:
    """What serves the batches.

    Attributes:
        service_time: of a batch of b, s; asked once a batch, in order of launch, so that it may draw.
        max_batch_size: the largest batch it takes, at least the table's.
        energies: of a batch of 1, 2, ..., J; None where unknown.
    """

    service_time: Callable[[int], float]
    max_batch_size: int
    energies: Sequence[float] | None = None


def run_table(table: CountTable, device: Device, instants: Instants) -> Run:
    """Serve one request for each instant of arrival (s, sorted, at least one), and drain the rest greedily.

    A request's id, on which the draws of a mix depend, is its place among the arrivals.
    """
    starts, finishes, sizes = _serve(_actions(table, device.max_batch_size), device, instants.tolist())
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
    """By queue length up to the one from which nothing changes: what is launched, and how long to wait if nothing is.

    Attributes:
        first: the table's action.
        second: the other table's, taken with `probability`; where they agree nothing is drawn.
        drain: the action once nobody else comes.
        steps: arrivals until either table launches; None: it never will.
    """

    first: Sequence[int]
    second: Sequence[int]
    drain: Sequence[int]
    steps: Sequence[int | None]
    probability: float
    seed: int


def _actions(table: CountTable, largest: int) -> _Actions:
    mix = table.mix or Mix(0.0, table.batch_size)
    lengths = range(max(len(table.batch_size), len(mix.batch_size), largest + 1))
    first, second = (
        [min(sizes[min(n, len(sizes) - 1)], table.max_batch_size, n) for n in lengths]
        for sizes in (table.batch_size, mix.batch_size)
    )
    drain = [min(n, largest) for n in lengths]
    return _Actions(first, second, drain, _steps(list(map(max, first, second))), mix.probability, table.seed)


def _steps(sizes: Sequence[int]) -> list[int | None]:
    """Arrivals from each queue length to the next that launches; beyond the last length all are like it."""
    steps: list[int | None] = [1 if sizes[-1] else None]
    for size in reversed(sizes[1:]):
        after = steps[-1]
        steps.append(1 if size else None if after is None else after + 1)
    return steps[::-1]


def _serve(actions: _Actions, device: Device, arrivals: list[float]) -> tuple[list[float], list[float], list[int]]:
    """Start and finish, s, and size of each batch."""
    first, second, top, service_time = actions.first, actions.second, len(actions.first) - 1, device.service_time
    starts: list[float] = []
    finishes: list[float] = []
    sizes: list[int] = []
    now, gone, come, total = 0.0, 0, 0, len(arrivals)  # requests `gone`..`come` - 1 wait
    arrivals = [*arrivals, inf]
    while gone < total:
        while arrivals[come] <= now:  # a bisection takes longer, for there are few between two batches
            come += 1
        length = come - gone
        if length > top:  # min() makes a run of small batches a third slower
            length = top
        size = first[length]
        if size != second[length] and draw(actions.seed, gone, come - 1) < actions.probability:
            size = second[length]
        if size == 0:
            step = actions.steps[length]
            if step is None or come + step > total:  # whoever still comes changes nothing
                step, first, second = total - come, actions.drain, actions.drain
            come += step
            now = max(now, arrivals[come - 1])
            continue
        starts.append(now)
        now += service_time(size)
        finishes.append(now)
        sizes.append(size)
        gone += size
    return starts, finishes, sizes
