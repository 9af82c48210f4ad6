"""The actions of any policy by queue length and arrival rate, found by evaluating it, and its description."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.catalog import Chosen
from policies.smdp.table import PolicyTable
from policies.types import Kind, Launch, Request, State

_LOADS = [0.05 * k for k in range(1, 20)]  # evaluated where no table gives the rates
_MAX_COLUMNS = 130
_DESCRIPTIONS = {
    "greedy": "Launches all waiting requests as soon as the device is free.",
    "serial": "Launches one request at a time, as soon as the device is free.",
    "static": "Launches batches of exactly {arg}.",
    "timeout": "Launches a full batch, or all waiting requests once the oldest has waited {arg} ms. "
    "The chart is for requests that have just arrived.",
    "max-under-deadline": "Launches a full batch, or all waiting requests at the last instant at which the oldest can "
    "be answered within {slo_ms} ms. The chart is for requests that have just arrived.",
    "rate-matching": "Launches once the queue length reaches the smallest batch size whose throughput is at least the "
    "arrival rate.",
    "rate-matching-literal": "BatchMonitor's Algorithm 1 as printed: the arrivals of the last second determine the "
    "batch size.",
    "lazy": "Launches one stage at a time. Between stages new requests preempt the batch as long as all requests can "
    "be answered within {slo_ms} ms (slack {slack}); they catch up and are merged with it.",
    "catch-up": "Launches stage by stage, or whole batches where preemption costs more than it can gain. Between "
    "stages new requests preempt the batch if this reduces response times and all requests can be answered within "
    "{slo_ms} ms; they catch up and are merged with it.",
    "multi-bin": "Batches requests of similar size, in {arg} bins; within each bin it decides as {inner} does.",
    "joining": "Continuous batching: at each decode step finished requests leave the batch and waiting ones join it.",
    "file": "Launches by the solved table of a file, with the row nearest to the measured arrival rate.",
}
_SOLVED = "Launches by the solved table, with the row nearest to the measured arrival rate{objective}."


@dataclass(frozen=True, slots=True)
class Actions:
    """The action chart of a policy.

    Attributes:
        queue_lengths: queue lengths of the columns, ascending from 0.
        rates: arrival rates of the rows, 1/s, ascending; empty, with one row, if the rate has no effect.
        batch_size: rows of actions; 0 waits.
    """

    queue_lengths: Sequence[int]
    rates: Sequence[float]
    batch_size: Sequence[Sequence[int]]


def actions(chosen: Chosen, model: str, mean_rate: float | None = None) -> Actions:
    """Evaluate the policy at every rate and queue length, for requests that have just arrived.

    For a mix of two tables, the table of the larger probability is used.

    Args:
        chosen: the policy, with its profile and its table, if it has one.
        model: name of the model.
        mean_rate: long-run mean of the arrival rate, 1/s; None if unknown.
    """
    table, lengths = chosen.table, _lengths(chosen)
    if table is not None and any(row.mix for row in table.rows):
        return _likelier(table, lengths)
    kind = Kind(model)
    requests = [Request(i, 0.0, kind, chosen.slo) for i in range(lengths[-1])]
    means = {} if mean_rate is None else {kind: mean_rate}

    def action(rate: float, n: int) -> int:
        decision = chosen.policy.decide(State(0.0, requests[:n], (), {kind: rate}, means)) if n else None
        return len(decision.requests) if isinstance(decision, Launch) else 0

    capacity = chosen.profile.capacity
    rates = [load * capacity for load in _LOADS] if table is None else [row.arrival_rate for row in table.rows]
    rows = [tuple(action(rate, n) for n in lengths) for rate in rates]
    if table is None and len(set(rows)) == 1:
        return Actions(lengths, (), rows[:1])
    return Actions(lengths, rates, rows)


def depends_on_mean_rate(chosen: Chosen) -> bool:
    """Return whether the policy selects a table by the mean rate, as with a weight w2 in the spec."""
    return chosen.table is not None and bool(chosen.table.w2) and chosen.name != "file"


def describe_policy(chosen: Chosen) -> str:
    """Return a description of one or two sentences for the dashboard."""
    parameters = chosen.parameters
    bounds = [f", with {key} = {value}" for key, value in parameters.items() if key != "max_wait_ms"]
    text = _DESCRIPTIONS.get(chosen.name, _SOLVED).format(
        **{"objective": "".join(bounds), "slack": "printed", "inner": "static", **parameters}
    )
    wait = parameters.get("max_wait_ms", "inf")
    return text if wait == "inf" else f"{text} Once the oldest request has waited {wait} ms, it launches in any case."


def _lengths(chosen: Chosen) -> list[int]:
    """Return queue lengths up to twice the largest batch, above which the actions hardly change; thinned if many."""
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
