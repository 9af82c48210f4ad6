"""Arrival schedules: from a value of --arrivals to sorted instants, reproducible by the seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite

import numpy as np

from policies.queue import arrivals
from policies.queue.arrivals import Instants
from policies.types import SpecError

MAX_REQUESTS = 10_000_000
_STEPS_USAGE = "steps:R1@S1,R2@S2,... (rate relative to --rate @ length in s)"
ARRIVALS_USAGE = "poisson, constant, backlog, mmpp:R1,R2,S1,S2, steps:R1@S1,R2@S2,..., ramp:R1:R2 or trace:FILE"
RELATIVE_ARRIVALS = ("mmpp", "steps", "ramp")  # whose rates are relative to --rate


@dataclass(frozen=True)
class Schedule:
    """Arrivals of a run.

    Attributes:
        instants: sorted arrival instants, s.
        duration: scheduled time of arrivals, s.
        edges: start of each step of constant rate, and the end of the last, s; empty where the rate has no steps.
    """

    instants: Instants
    duration: float
    edges: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Demand:
    rate: float  # 1/s
    duration: float  # s
    rng: np.random.Generator


def make_schedule(arrival_process: str, rate: float | None, duration: float | None, seed: int) -> Schedule:
    """Make the schedule for the values of the flags.

    Args:
        arrival_process: value of --arrivals: a name and, after a colon, its arguments.
        rate: mean arrival rate, 1/s; may be None for a trace.
        duration: time of arrivals, s; may be None for a trace.
        seed: seed of random arrivals.

    Raises:
        SpecError: a value is invalid, or there are no arrivals.
    """
    name, _, rest = arrival_process.partition(":")
    _check_positive("--rate", rate)
    _check_positive("--duration", duration)
    if seed < 0:
        raise SpecError(f"--seed is {seed}; give 0 or more")
    if name == "trace":
        instants = arrivals.trace(rest, rate, duration)
        made = Schedule(instants, duration or float(instants[-1]))
    elif name not in _BUILD:
        raise SpecError(f"unknown arrivals {arrival_process!r}: choose {ARRIVALS_USAGE}")
    elif rate is None or duration is None:
        raise SpecError(f"arrivals {name!r} need --rate and --duration; only a trace has its own")
    else:
        edges = _step_edges(rest, duration) if name == "steps" else ()
        made = Schedule(_BUILD[name](rest, _Demand(rate, duration, np.random.default_rng(seed))), duration, edges)
    if not len(made.instants):
        raise SpecError(f"no request arrives within {made.duration:g} s; raise --rate or --duration")
    return made


def _poisson(rest: str, demand: _Demand) -> Instants:
    _check_plain("poisson", rest, demand)
    return arrivals.poisson(demand.rate, demand.duration, demand.rng)


def _constant(rest: str, demand: _Demand) -> Instants:
    _check_plain("constant", rest, demand)
    return arrivals.constant(demand.rate, demand.duration)


def _backlog(rest: str, demand: _Demand) -> Instants:
    _check_plain("backlog", rest, demand)
    return arrivals.backlog(demand.rate, demand.duration)


def _mmpp(rest: str, demand: _Demand) -> Instants:
    usage = "mmpp:R1,R2,S1,S2 (two rates relative to --rate, two mean phase lengths in s)"
    numbers = _numbers(rest.split(","), usage)
    if len(numbers) != 4:
        raise SpecError(f"mmpp takes four numbers, not {len(numbers)}: {usage}")
    _check_relative(numbers[:2], numbers[2:], demand, usage)
    if demand.duration > MAX_REQUESTS * min(numbers[2:]):
        raise SpecError(f"phases of {min(numbers[2:]):g} s are too short for {demand.duration:g} s; lengthen them")
    rates = [demand.rate * number for number in numbers[:2]]
    return arrivals.mmpp(rates, numbers[2:], demand.duration, demand.rng)


def _steps(rest: str, demand: _Demand) -> Instants:
    relative, lengths = _parse_steps(rest)
    _check_relative(relative, lengths, demand, _STEPS_USAGE)
    return arrivals.steps([demand.rate * number for number in relative], lengths, demand.duration, demand.rng)


def _parse_steps(rest: str) -> tuple[list[float], list[float]]:
    """Relative rates and lengths, s."""
    pairs = [_numbers(step.split("@"), _STEPS_USAGE) for step in rest.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise SpecError(f"steps {rest!r} cannot be read: {_STEPS_USAGE}")
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _step_edges(rest: str, duration: float) -> tuple[float, ...]:
    """Start of each step that begins within the duration, and the end of the last, s."""
    starts = accumulate(_parse_steps(rest)[1][:-1], initial=0.0)
    return (*(start for start in starts if start < duration), duration)


def _ramp(rest: str, demand: _Demand) -> Instants:
    usage = "ramp:R1:R2 (rates at the start and at the end, relative to --rate)"
    ends = _numbers(rest.split(":"), usage)
    if len(ends) != 2:
        raise SpecError(f"ramp takes two numbers, not {len(ends)}: {usage}")
    _check_relative(ends, (), demand, usage)
    if max(ends) == 0:
        raise SpecError(f"a ramp from 0 to 0 has no arrivals: write {usage}")
    return arrivals.ramp(demand.rate * ends[0], demand.rate * ends[1], demand.duration, demand.rng)


_BUILD: dict[str, Callable[[str, _Demand], Instants]] = {
    "poisson": _poisson,
    "constant": _constant,
    "backlog": _backlog,
    "mmpp": _mmpp,
    "steps": _steps,
    "ramp": _ramp,
}


def _numbers(texts: Sequence[str], usage: str) -> list[float]:
    try:
        return [float(text) for text in texts]
    except ValueError as error:
        raise SpecError(f"{error}: write {usage}") from None


def _check_positive(flag: str, value: float | None) -> None:
    if value is not None and not (value > 0 and isfinite(value)):
        raise SpecError(f"{flag} is {value:g}; give a number above 0")


def _check_plain(name: str, rest: str, demand: _Demand) -> None:
    if rest:
        raise SpecError(f"arrivals {name!r} take nothing after the colon, not {rest!r}")
    _check_number(demand.rate, demand)


def _check_relative(relative: Sequence[float], lengths: Sequence[float], demand: _Demand, usage: str) -> None:
    if not all(isfinite(r) and r >= 0 for r in relative) or not all(isfinite(s) and s > 0 for s in lengths):
        raise SpecError(f"rates are 0 or more{' and lengths above 0' if lengths else ''}: write {usage}")
    _check_number(demand.rate * max(relative), demand)


def _check_number(rate: float, demand: _Demand) -> None:
    # before anything is drawn, because a typing error could otherwise exhaust the memory
    if rate * demand.duration > MAX_REQUESTS:
        raise SpecError(
            f"{rate:g}/s for {demand.duration:g} s is over {MAX_REQUESTS:,} requests; lower --rate or --duration"
        )
