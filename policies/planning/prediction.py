"""Predicted response times of the models of a device, by simulation of their policies at measured arrival rates."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import cycle
from math import inf

import numpy as np
from numpy.typing import NDArray

from policies.catalog import ModelPolicy, combine
from policies.planning.savings import Savings, savings
from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.queue.monitor import ForgettingMonitor, rate_time_constant
from policies.queue.simulator import simulate
from policies.types import Launch, Request

_REQUESTS = 6000  # of all models together
_FIRST = 0.1  # part of the requests that does not count, since the queue is empty at first


@dataclass(frozen=True, slots=True)
class Traffic:
    """The calls of a model, and how its device serves them.

    Attributes:
        chosen: its policy.
        profile: its mean service times.
        rate: arrivals a second.
        lengths: of some of its requests; empty where they do not differ.
        ratios: service times of consecutive batches over their means, at least one.
        levels: share of each priority level in the arrivals, and the time, s, from which a request precedes all
            levels; the first level first. Empty for one level.
    """

    chosen: ModelPolicy
    profile: Profile
    rate: float
    lengths: Sequence[float] = ()
    ratios: Sequence[float] = (1.0,)
    levels: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted figures of a model.

    Attributes:
        mean: mean response time, s.
        p95: 95th percentile of it, s.
        batch_size: mean batch size.
        savings: what a goal would save at this rate; None where that is not known.
        within: share of the requests that are answered within the objective of the policy; 1 without one.
        levels: mean and 95th percentile of each priority level that had requests, s; empty for one level.
    """

    mean: float
    p95: float
    batch_size: float
    savings: Savings | None = None
    within: float = 1.0
    levels: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def predict(models: Mapping[str, Traffic], seed: int = 0) -> dict[str, Prediction]:
    """Simulate Poisson arrivals at these rates on one device, which serves all models by their policies.

    The ratios of service times to their means follow each other as they were measured, since a device that is slow for
    a second makes a longer queue than as many slow batches one by one. Above capacity the figures depend on the length
    of the simulation, and only say that the queue grows.

    Args:
        models: by name; those without arrivals are left out.
        seed: of the arrivals and lengths.
    """
    rng = np.random.default_rng(seed)
    served = {model: each for model, each in models.items() if each.rate > 0.0}
    if not served:
        return {}
    duration = _REQUESTS / sum(each.rate for each in served.values())
    requests = sorted(
        (request for model, each in served.items() for request in _requests(model, each, duration, rng)),
        key=lambda request: request.arrival,
    )
    for index, request in enumerate(requests):
        request.id = index
    policy, monitor = combine({model: _unused(each) for model, each in served.items()})
    largest = {model: each.profile.max_batch_size for model, each in served.items()}
    responses: dict[str, list[float]] = {model: [] for model in served}
    levels: dict[str, list[int]] = {model: [] for model in served}
    sizes: dict[str, list[int]] = {model: [] for model in served}

    ratios = {model: cycle(each.ratios) for model, each in served.items()}

    def service_time(launch: Launch) -> float:
        model = launch.requests[0].kind.model
        each, size = served[model], len(launch.requests)
        longest = max(request.payload for request in launch.requests)
        return each.profile.service_time(size, longest) * next(ratios[model])

    first = duration * _FIRST
    tokens = {model: each.profile.max_batch_tokens for model, each in served.items()}
    counts = {model: max(1, len(each.levels)) for model, each in served.items()}
    for service in simulate(Batcher(policy, largest, monitor, tokens, counts), requests, service_time):
        if service.start < first:
            continue
        model = service.launch.requests[0].kind.model
        sizes[model].append(len(service.launch.requests))
        responses[model] += [service.finish - request.arrival for request in service.finished]
        if served[model].levels:
            levels[model] += [request.level for request in service.finished]
    alone = len(served) == 1
    return {
        model: from_responses(
            found,
            levels[model],
            float(np.mean(sizes[model])),
            savings(replace(served[model].chosen, profile=served[model].profile), served[model].rate)
            if alone
            else None,
            served[model].chosen.slo,
        )
        for model, found in responses.items()
        if found
    }


def from_responses(
    responses: Sequence[float],
    levels: Sequence[int],
    batch_size: float,
    saved: Savings | None = None,
    objective: float = inf,
) -> Prediction:
    """The figures of some requests.

    Args:
        responses: their response times, s, at least one.
        levels: their priority levels; empty where the model has one.
        batch_size: mean batch size.
        saved: what a goal would save.
        objective: of the response times, s.
    """
    times, of = np.array(responses), np.array(levels)
    by_level = {level: _mean_and_p95(times[of == level]) for level in np.unique(of).tolist()}
    within = float(np.mean(times <= objective))
    return Prediction(*_mean_and_p95(times), batch_size, saved, within, by_level)


def _mean_and_p95(times: NDArray[np.float64]) -> tuple[float, float]:
    return float(times.mean()), float(np.quantile(times, 0.95))


def _requests(model: str, traffic: Traffic, duration: float, rng: np.random.Generator) -> list[Request]:
    count = max(1, round(duration * traffic.rate))
    arrivals = np.sort(rng.uniform(0.0, duration, count)).tolist()  # of a Poisson process, given their number
    lengths = rng.choice(np.array(traffic.lengths or (0.0,), float), count).tolist()
    made = []
    for arrival, length in zip(arrivals, lengths, strict=True):
        size = traffic.profile.time_alone(length)
        kind = traffic.chosen.kind(model, size)
        made.append(Request(0, arrival, kind, arrival + traffic.chosen.slo, inf, size, 1, length, length=length))
    if traffic.levels:
        shares, max_waits = zip(*traffic.levels, strict=True)
        for request, place in zip(made, rng.choice(len(shares), count, p=shares).tolist(), strict=True):
            request.level, request.urgent_from = place + 1, request.arrival + max_waits[place]
    return made


def _unused(traffic: Traffic) -> ModelPolicy:
    """The policy with a monitor of its own."""
    monitor = traffic.chosen.monitor
    fresh = ForgettingMonitor(rate_time_constant(traffic.profile))
    return replace(traffic.chosen, monitor=fresh if isinstance(monitor, ForgettingMonitor) else deepcopy(monitor))
