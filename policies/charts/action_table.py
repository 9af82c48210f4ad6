"""A policy's actions by queue length and arrival rate, for the dashboard's chart, and a description of the policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.catalog import CATALOG, ModelPolicy
from policies.objectives.table import PolicyTable, ages_json
from policies.rules.solved_table import FILE
from policies.types import BatchKey, Launch, Request, State

_LOADS = [0.05 * k for k in range(1, 20)]  # of the rows where no table gives the rates
_MAX_COLUMNS = 130  # queue lengths, at most


@dataclass(frozen=True, slots=True)
class Actions:
    """A policy's actions as a chart.

    Attributes:
        queue_lengths: of the columns, ascending from 0.
        rates: of the rows, 1/s, ascending; empty where the actions do not depend on the rate, then there is one row.
        batch_size: rows of actions; 0 waits.
    """

    queue_lengths: Sequence[int]
    rates: Sequence[float]
    batch_size: Sequence[Sequence[int]]


def actions(chosen: ModelPolicy, model: str, mean_rate: float | None = None) -> Actions:
    """The policy's action at every rate and queue length, for requests that have just arrived.

    Of a mix of two tables, the likelier one.

    Args:
        chosen: the policy, with its profile and its table, if it has one.
        model: name of the model.
        mean_rate: long-run mean of the arrival rate, 1/s; None where it is not measured.
    """
    table, lengths = chosen.table, _lengths(chosen)
    if table is not None and any(row.mix for row in table.rows):
        return _likelier(table, lengths)
    kind = BatchKey(model)
    waiting = [Request(i, 0.0, kind, chosen.slo) for i in range(lengths[-1])]
    means = {} if mean_rate is None else {kind: mean_rate}

    def action(rate: float, n: int) -> int:
        decided = chosen.policy.decide(State(0.0, waiting[:n], (), {kind: rate}, means)) if n else None
        return len(decided.requests) if isinstance(decided, Launch) else 0

    capacity = chosen.profile.capacity
    rates = [load * capacity for load in _LOADS] if table is None else [row.arrival_rate for row in table.rows]
    rows = [tuple(action(rate, n) for n in lengths) for rate in rates]
    if table is None and len(set(rows)) == 1:
        return Actions(lengths, (), rows[:1])
    return Actions(lengths, rates, rows)


def max_ages_at_rates(chosen: ModelPolicy) -> list[dict[str, Any]]:
    """Return the rows with maximum ages, each with its arrival rate, 1/s; the ages in ms, as in policy files."""
    rows = [] if chosen.table is None else chosen.table.rows
    return [{"rate_hz": row.arrival_rate, **ages_json(row.max_ages)} for row in rows if row.max_ages is not None]


def depends_on_mean_rate(chosen: ModelPolicy) -> bool:
    """Return whether the policy selects a table by the mean rate, as with a weight w2 in the spec."""
    return chosen.table is not None and bool(chosen.table.w2) and chosen.name != FILE.name


def describe_policy(chosen: ModelPolicy) -> str:
    """Return a description of the policy for the dashboard."""
    rule = CATALOG.get(chosen.name, FILE)
    bound = chosen.parameters.get("max_wait_ms", "inf")
    text = rule.describe(chosen.parameters)
    return text if bound == "inf" else f"{text} Launches at the latest when the oldest request has waited {bound} ms."


def _lengths(chosen: ModelPolicy) -> list[int]:
    """Queue lengths up to twice the largest batch, beyond which actions hardly change; thinned where they are many."""
    largest = chosen.profile.max_batch_size
    last = largest + 2 if chosen.table is None else 2 * largest + 1
    return list(range(0, last + 1, -(-last // _MAX_COLUMNS)))


def _likelier(table: PolicyTable, lengths: Sequence[int]) -> Actions:
    def row_of(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[min(n, len(sizes) - 1)] for n in lengths)

    rows = [
        row_of(row.mix.batch_size if row.mix is not None and row.mix.probability > 0.5 else row.batch_size)
        for row in table.rows
    ]
    return Actions(lengths, [row.arrival_rate for row in table.rows], rows)
