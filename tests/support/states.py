"""Builders of states, for tables of (state, action)."""

from math import inf

from policies.types import BatchKey, Request, State


def waiting(*arrivals: float, kind: BatchKey = BatchKey("m"), slo: float = inf) -> list[Request]:  # noqa: B008
    """Return requests that arrived at these instants, s."""
    return [Request(i, at, kind, deadline=at + slo) for i, at in enumerate(arrivals)]


def state(now: float, *arrivals: float, rate: float | None = None, slo: float = inf) -> State:
    """Return the state at `now` with requests of one kind and a measured arrival rate, 1/s."""
    rates = {} if rate is None else {BatchKey("m"): rate}
    return State(now, waiting(*arrivals, slo=slo), rates=rates)
