"""Lookup: the action stands in a table by arrival rate and queue length."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from policies.types import Action, Mix, State, Wait, launch_oldest


@dataclass(frozen=True, slots=True)
class Row:
    """Actions at one arrival rate.

    Attributes:
        arrival_rate: 1/s.
        batch_size: action for queue length 0, 1, 2, ...; 0 waits; the last one repeats.
        mix: the other table, if the policy is randomised.
    """

    arrival_rate: float
    batch_size: Sequence[int]
    mix: Mix | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    """Takes the action of the row whose arrival rate is nearest to the measured one.

    Below half the lowest rate every state launches what there is: with nobody else to come, waiting costs and buys
    nothing. With a single row, and a rate not measured, that row serves.

    Attributes:
        rows: ascending in arrival rate.
        boundaries: ascending, 1/s; row i serves from boundaries[i] up to boundaries[i + 1].
        max_batch_size: largest batch.
        seed: of the draws, where a row is a mix of two tables.
    """

    rows: Sequence[Row]
    boundaries: Sequence[float]
    max_batch_size: int
    seed: int = 0

    def row(self, arrival_rate: float) -> Row | None:
        """The row that serves at this rate (1/s); None below half the lowest."""
        index = bisect_right(self.boundaries, arrival_rate) - 1
        return self.rows[index] if index >= 0 else None

    def decide(self, state: State, /) -> Action:
        """Look the action up; ask again once the silence itself lowers the rate."""
        row = self.row(state.arrival_rate) if state.rates else self.rows[0]
        n = len(state.waiting)
        size = n if row is None else self._action(row, state)
        if size == 0:
            return Wait(state.ask_again)
        return launch_oldest(state, min(size, self.max_batch_size), self.max_batch_size)

    def _action(self, row: Row, state: State) -> int:
        table = row.batch_size
        if row.mix is not None and draw(self.seed, state.waiting[0].id, state.waiting[-1].id) < row.mix.probability:
            table = row.mix.batch_size
        return table[min(len(state.waiting), len(table) - 1)]


def draw(seed: int, oldest: int, newest: int) -> float:
    """A number in [0, 1) that depends only on who waits, by id, so that asking again gives the same answer.

    The hash alone is equally spread, but neighbouring ids get numbers that depend on each other; folded and multiplied
    they do not, as far as a mix can tell.
    """
    who = hash((seed, oldest, newest)) % 2**64
    who = (who ^ who >> 32) * 0x9E3779B97F4A7C15 % 2**64
    return (who ^ who >> 32) / 2**64


def lookup(rows: Sequence[Row], max_batch_size: int, seed: int = 0) -> Lookup:
    """A Lookup whose rows serve up to halfway between their rates; the lowest down to half its own."""
    rates = [row.arrival_rate for row in rows]
    middles = [(low + high) / 2 for low, high in pairwise(rates)]
    return Lookup(rows, [rates[0] / 2, *middles], max_batch_size, seed)
