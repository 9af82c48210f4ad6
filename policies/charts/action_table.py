"""What a policy would do, by queue length and arrival rate, found by asking it; and how it decides, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.catalog import Chosen
from policies.smdp.table import PolicyTable
from policies.types import Kind, Launch, Request, State

_LOADS = [0.05 * k for k in range(1, 20)]  # asked about where no table names the rates
_COLUMNS = 130  # queue lengths, at most
_WORDS = {
    "greedy": "Launches everybody who waits as soon as the device is free.",
    "serial": "Launches one request at a time, as soon as the device is free.",
    "static": "Launches batches of exactly {arg}.",
    "timeout": "Launches a full batch, or everybody who waits once the oldest has waited {arg} ms. "
    "The chart is of requests that have just arrived.",
    "max-under-deadline": "Launches a full batch, or everybody who waits at the last instant at which the oldest can "
    "be answered within {slo_ms} ms. The chart is of requests that have just arrived.",
    "rate-matching": "Launches once as many wait as the smallest batch whose service rate meets the arrival rate.",
    "rate-matching-literal": "BatchMonitor's Algorithm 1 to the letter: the arrivals of the last second choose the "
    "batch size.",
    "lazy": "Launches one stage at a time. Between stages newcomers go first as long as everybody can be answered "
    "within {slo_ms} ms (slack {slack}); they catch up and ride along.",
    "catch-up": "Launches stage by stage, or whole batches where stopping costs more than it may gain. Between stages "
    "newcomers go first where it pays and everybody can be answered within {slo_ms} ms; they catch up and ride along.",
    "multi-bin": "Requests of similar size wait together, in {arg} bins; within each it decides as {inner} does.",
    "joining": "Between two iterations who is finished leaves, and who waits takes the place.",
    "file": "Launches by the solved table of a file: the row nearest to the measured arrival rate.",
}
_SOLVED = "Launches by the solved table: the row nearest to the measured arrival rate{why}."


@dataclass(frozen=True, slots=True)
class Actions:
    """A policy as a chart.

    Attributes:
        queue_lengths: of the columns, ascending from 0.
        rates: of the rows, 1/s, ascending; empty where the rate changes nothing, then there is one row.
        batch_size: rows of actions; 0 waits.
    """

    queue_lengths: Sequence[int]
    rates: Sequence[float]
    batch_size: Sequence[Sequence[int]]


def actions(chosen: Chosen, model: str, mean_rate: float | None = None) -> Actions:
    """Ask the policy at every rate and queue length, of requests that have just arrived.

    Of a mix of two tables the likelier one is shown.

    Args:
        chosen: the policy, with its profile and its table, if it has one.
        model: whose requests.
        mean_rate: long-run mean of the arrival rate, 1/s; None where nobody knows it.
    """
    table, lengths = chosen.table, _lengths(chosen)
    if table is not None and any(row.mix for row in table.rows):
        return _likelier(table, lengths)
    kind = Kind(model)
    crowd = [Request(i, 0.0, kind, chosen.slo) for i in range(lengths[-1])]
    means = {} if mean_rate is None else {kind: mean_rate}

    def action(rate: float, n: int) -> int:
        answer = chosen.policy.decide(State(0.0, crowd[:n], (), {kind: rate}, means)) if n else None
        return len(answer.requests) if isinstance(answer, Launch) else 0

    capacity = chosen.profile.capacity
    rates = [load * capacity for load in _LOADS] if table is None else [row.arrival_rate for row in table.rows]
    rows = [tuple(action(rate, n) for n in lengths) for rate in rates]
    if table is None and len(set(rows)) == 1:
        return Actions(lengths, (), rows[:1])
    return Actions(lengths, rates, rows)


def depends_on_mean_rate(chosen: Chosen) -> bool:
    """Whether the mean rate chooses among tables, as it does for a weight of power that the spec names."""
    return chosen.table is not None and bool(chosen.table.w2) and chosen.name != "file"


def describe_policy(chosen: Chosen) -> str:
    """A sentence or two for people."""
    parameters = chosen.parameters
    bounds = [f", with {key} = {value}" for key, value in parameters.items() if key != "max_wait_ms"]
    text = _WORDS.get(chosen.name, _SOLVED).format(
        **{"why": "".join(bounds), "slack": "printed", "inner": "static", **parameters}
    )
    bound = parameters.get("max_wait_ms", "inf")
    return text if bound == "inf" else f"{text} When the oldest has waited {bound} ms, it launches in any case."


def _lengths(chosen: Chosen) -> list[int]:
    """Queue lengths up to twice the largest batch, where little changes any more; thinned where they are many."""
    largest = chosen.profile.max_batch_size
    last = largest + 2 if chosen.table is None else 2 * largest + 1
    return list(range(0, last + 1, -(-last // _COLUMNS)))


def _likelier(table: PolicyTable, lengths: Sequence[int]) -> Actions:
    def row_of(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[min(n, len(sizes) - 1)] for n in lengths)

    rows = [
        row_of(row.mix.batch_size if row.mix is not None and row.mix.probability > 0.5 else row.batch_size)
        for row in table.rows
    ]
    return Actions(lengths, [row.arrival_rate for row in table.rows], rows)
