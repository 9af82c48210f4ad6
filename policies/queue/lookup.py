"""Lookup: the action is read from a table by arrival rate and queue length, and maybe the age of the oldest request.

A row is a table of batch sizes by queue length, or a table of maximum ages: with n requests waiting, launch all of
them, at most the largest batch, once the oldest is tau(n) old (policies/percentile/ages.py).

**Varying rates.** A run's mean response time is a mean over requests, its mean power a mean over time. A second with n
requests in the system therefore costs w1 n / (the run's mean rate). A row solved for w2 divides by its own rate. This
overweights the response times at low rates and underweights those in bursts. A row solved for w2 x (mean rate / the
row's rate) minimises the cost of the run. Tables are therefore solved for a few factors of w2 (`Weighting`); at a
steady rate the factor is 1.

**Several models on a device.** A model has the device for the part of the time that the others leave, 1/c, and to it
the device is slower by c, the `slowdown` of the state. Its service times are then c l(b) and its batch energies stay.
In units of time that are c times as long, these are its own l(b), at the rate c lambda and with w2 / c^2. So the row
of c lambda is used, of the table for w2 / c^2, or for the least factor of w2 that was solved. Where it launches, all
that wait are launched: a table may launch fewer at low load, since the rest can follow at once on a device of its own.
`research/co_located.py` measures the gain. Tables that were solved for a bound, and those of files, are used at the
model's own rate.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from typing import ClassVar, Protocol, TypeVar

from policies.traits import ActionTable, control_limit_table
from policies.types import Action, Launch, MaxAges, Mix, State, Wait, launch_oldest


@dataclass(frozen=True, slots=True)
class ActionRow:
    """Actions at one arrival rate.

    Attributes:
        arrival_rate: 1/s.
        batch_size: action for queue length 0, 1, 2, ...; 0 waits; the last one repeats.
        mix: the second table, if the policy is randomised.
        max_ages: a table of maximum ages, which is used in place of the batch sizes; None: none.
    """

    arrival_rate: float
    batch_size: Sequence[int]
    mix: Mix | None = None
    max_ages: MaxAges | None = None


@dataclass(frozen=True, slots=True)
class Weighting:
    """The rows solved for another weight of power.

    Attributes:
        factor: factor of w2.
        rows: ascending in arrival rate.
        boundaries: ascending, 1/s; row i + 1 is used from boundaries[i] on.
    """

    factor: float
    rows: Sequence[ActionRow]
    boundaries: Sequence[float]

    def row(self, arrival_rate: float) -> ActionRow:
        """The row for this rate, 1/s."""
        return self.rows[bisect_right(self.boundaries, arrival_rate)]


class Similar(Protocol):
    """Chooses the requests of a batch by their sizes."""

    def launch(self, state: State, size: int, largest: int) -> Launch:
        """Launch the oldest waiting request with others of similar size, at most `size` together.

        No batch takes longer than one of the size `largest` may.
        """
        ...


@dataclass(frozen=True, slots=True)
class Lookup:
    """Takes the action of the row whose arrival rate is nearest to the measured one.

    Below half the lowest rate, without slowdown, every state launches all waiting requests: with no arrivals to come,
    waiting gains nothing. Before a rate is measured the first row is used.

    Attributes:
        rows: ascending in arrival rate.
        boundaries: ascending, 1/s; row i is used from boundaries[i] up to boundaries[i + 1].
        max_batch_size: largest batch.
        seed: seed of the draws, if a row is a mix of two tables.
        weightings: ascending in factor, one of them with the factor 1 and these rows; empty if w2 is not adapted.
        ratios: ascending; weighting i + 1 is used from a ratio of mean rate to the row's rate of ratios[i] on.
        uses_slowdown: whether the row depends on the state's slowdown.
        similar: where the row launches, it chooses those of all that wait that share the batch by their sizes, the
            oldest one among them; None: the oldest ones share it, as many as the row launches.
    """

    depends_on_rate: ClassVar[bool] = True

    rows: Sequence[ActionRow]
    boundaries: Sequence[float]
    max_batch_size: int
    seed: int = 0
    weightings: Sequence[Weighting] = ()
    ratios: Sequence[float] = ()
    uses_slowdown: bool = False
    similar: Similar | None = None

    def row(self, arrival_rate: float) -> ActionRow | None:
        """The row for this rate, 1/s; None below half the lowest."""
        index = bisect_right(self.boundaries, arrival_rate) - 1
        return self.rows[index] if index >= 0 else None

    def decide(self, state: State, /) -> Action:
        """Look the action up; decide again once the rate has decayed without arrivals."""
        row = self._row(state) if state.rates else self.rows[0]
        n, largest = len(state.waiting), self.max_batch_size
        if row is not None and row.max_ages is not None:
            due = state.oldest.arrival + self._max_age(row.max_ages, state)
            if state.now < due:
                return Wait(min(due, state.reevaluate_at))
            largest = row.max_ages.largest(largest)
            row = None
        size = n if row is None else self._action(row, state)
        if size == 0:
            return Wait(state.reevaluate_at)
        if self.uses_slowdown and state.slowdown > 1.0:
            size = n
        if self.similar is not None:
            return self.similar.launch(state, min(n, self.max_batch_size), largest)
        return launch_oldest(state, min(size, largest), largest)

    def action_table(self, arrival_rate: float | None) -> ActionTable | None:
        """The row of this rate, with the factor 1; None for a table of maximum ages."""
        row = self.rows[0] if arrival_rate is None else self.row(arrival_rate)
        if row is None:
            return control_limit_table(1, self.max_batch_size)
        if row.max_ages is not None:
            return None
        return ActionTable(row.batch_size, self.max_batch_size, row.mix, self.seed)

    def _row(self, state: State) -> ActionRow | None:
        """The row of the measured rate, or the one for the weight that the mean rate gives it."""
        slowdown = state.slowdown if self.uses_slowdown else 1.0
        if self.row(state.arrival_rate) is None:
            return None
        rate = slowdown * state.arrival_rate
        row = self.row(rate)
        if row is None or not self.weightings or not state.mean_rates:
            return row
        ratio = state.mean_rate / slowdown / row.arrival_rate
        return self.weightings[bisect_right(self.ratios, ratio)].row(rate)

    def _max_age(self, table: MaxAges, state: State) -> float:
        oldest, ages = state.oldest.id, table.max_age
        if table.others and draw(self.seed, oldest, oldest) < table.probability:
            ages = table.others
        return ages[min(len(state.waiting), len(ages) - 1)]

    def _action(self, row: ActionRow, state: State) -> int:
        table = row.batch_size
        if row.mix is not None and draw(self.seed, state.waiting[0].id, state.waiting[-1].id) < row.mix.probability:
            table = row.mix.batch_size
        return table[min(len(state.waiting), len(table) - 1)]


_Table = TypeVar("_Table")


def table_of(state: State, rates: Sequence[float], tables: Sequence[_Table]) -> _Table | None:
    """The table of the rate nearest to the measured one, at first of the lowest; None below half of that.

    Args:
        state: of the queue, with the measured rate.
        rates: of the tables, 1/s, ascending.
        tables: one for each rate.
    """
    rate = state.arrival_rate if state.rates else rates[0]
    if rate < rates[0] / 2.0:
        return None
    return min(zip(rates, tables, strict=True), key=lambda row: abs(row[0] - rate))[1]


def draw(seed: int, oldest: int, newest: int) -> float:
    """A number in [0, 1) that depends only on the waiting requests' ids, so that the same state gets the same action.

    The hash alone is uniform, but its values at neighbouring ids are correlated. Folding and multiplying removes the
    correlation as far as a test of the share of a mix can detect it.
    """
    bits = hash((seed, oldest, newest)) % 2**64
    bits = (bits ^ bits >> 32) * 0x9E3779B97F4A7C15 % 2**64
    return (bits ^ bits >> 32) / 2**64


def lookup(rows: Sequence[ActionRow], max_batch_size: int, seed: int = 0) -> Lookup:
    """Return a Lookup whose rows are used up to halfway to the next rate, the lowest one down to half its own rate."""
    return Lookup(rows, [rows[0].arrival_rate / 2, *_midpoints(rows)], max_batch_size, seed)


def weighted(plain: Lookup, others: Mapping[float, Sequence[ActionRow]]) -> Lookup:
    """Add the rows for other factors of w2; each factor is used up to its geometric mean with the next."""
    tables = sorted({1.0: plain.rows, **others}.items())
    weightings = [Weighting(factor, rows, _midpoints(rows)) for factor, rows in tables]
    ratios = [sqrt(low.factor * high.factor) for low, high in pairwise(weightings)]
    return replace(plain, weightings=weightings, ratios=ratios)


def _midpoints(rows: Sequence[ActionRow]) -> list[float]:
    return [(low.arrival_rate + high.arrival_rate) / 2 for low, high in pairwise(rows)]
