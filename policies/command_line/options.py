"""Options of solve-policy: parsing, and checks of their combinations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from policies.objectives.bounds import FORMS, check_power, parse_bounds
from policies.objectives.frontier import BOUNDS, Bound, ShareBound
from policies.percentile.ages import ResponseBounds
from policies.solver.model import Problem
from policies.solver.rvi import Rvi
from policies.types import SpecError

DEFAULT_SIMULATED_REQUESTS = 400_000  # where a share is bounded and --simulate is not given


@dataclass(frozen=True)
class SolveOptions:
    """What to solve or evaluate, and how.

    Attributes:
        problem: the system and the weights.
        spec: the policy to evaluate; None solves.
        scheme: parameters of relative value iteration; None solves exactly.
        bounds: name and text of each bound that the policy has to keep; empty without one.
        mixed: whether two policies may be mixed to meet the bounds.
        simulate: number of requests to simulate; 0 for none.
        seed: seed of the simulated arrivals.
        form: of the policy that keeps a percentile: max-ages or batch-size.
    """

    problem: Problem
    spec: str | None
    scheme: Rvi | None
    bounds: tuple[tuple[str, str], ...]
    mixed: bool
    simulate: int
    seed: int
    form: str = FORMS[0]

    def at(self, arrival_rate: float) -> "SolveOptions":
        """Return the options at this arrival rate, 1/s.

        With a bound on a share that is evaluated by simulation, --simulate gets a default.
        """
        needed = isinstance(self.bound, ShareBound) and not self.simulate
        simulate = DEFAULT_SIMULATED_REQUESTS if needed else self.simulate
        return replace(self, problem=replace(self.problem, arrival_rate=arrival_rate), simulate=simulate)

    @property
    def bound(self) -> Bound | ResponseBounds | None:
        """The bounds; None without one."""
        requests = max(self.simulate, DEFAULT_SIMULATED_REQUESTS)
        return parse_bounds(self.bounds, self.form, requests, self.seed) if self.bounds else None

    @property
    def limits(self) -> tuple[float, ...]:
        """The response times, s, within which a share of the requests has to be answered."""
        match self.bound:
            case ResponseBounds() as bounds:
                return bounds.limits
            case ShareBound(response_time):
                return (response_time,)
            case _:
                return ()

    @property
    def bound_entry(self) -> dict[str, float | str] | None:
        """The bounds in policy files and JSON results: names and values."""
        if not self.bounds:
            return None
        numbers: dict[str, float | str] = {key: float(text) for key, text in self.bounds if key != "slo_share"}
        shares = " ".join(text for key, text in self.bounds if key == "slo_share")
        return numbers | ({"slo_share": shares} if shares else {})


def reject_if(invalid: bool, message: str) -> None:
    """Raise `SpecError` with this message if the condition holds.

    Raises:
        SpecError: the condition holds.
    """
    if invalid:
        raise SpecError(message)


def scheme_of(
    method: str,
    overflow_cost: float | None,
    max_queue_length: int | None,
    epsilon: float | None,
    max_iterations: int | None,
) -> Rvi | None:
    """Return the parameters of relative value iteration; None for the exact method.

    Raises:
        SpecError: the method is unknown, or does not take the options given.
    """
    reject_if(method not in ("exact", "rvi"), f"--method {method!r} is neither exact nor rvi; give one of them")
    options: dict[str, Any] = {
        "overflow_cost": overflow_cost,
        "max_queue_length": max_queue_length,
        "epsilon": epsilon,
        "max_iterations": max_iterations,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if method == "rvi":
        return Rvi(**given)
    if given:
        name, value = next(iter(given.items()))
        flag = f"--{name.replace('_', '-')}"
        raise SpecError(f"{flag} {value:g} is an option of relative value iteration; add --method rvi")
    return None


def bounds_of(
    w2: float | None, given: tuple[float | str | Sequence[str] | None, ...], form: str
) -> tuple[tuple[str, str], ...]:
    """Return name and text of each bound that is given, of those in `BOUNDS`; slo_share may have several texts.

    Percentiles can be kept together with each other and with a mean, by a table of maximum ages.

    Raises:
        SpecError: the bounds cannot be combined, or a bound and the weight are given.
    """
    named = [
        (key, str(text).removesuffix(".0"))
        for key, value in zip(BOUNDS, given, strict=True)
        if value is not None
        for text in (value if isinstance(value, Sequence) and not isinstance(value, str) else (value,))
    ]
    keys = [key for key, _ in named]
    together = (
        form == FORMS[0] and not {"power_cap_w", "resource_cap"} & set(keys) and {"slo_p95_ms", "slo_share"} & set(keys)
    )
    chosen = keys + ["w2"] * (w2 is not None)
    if named and len(chosen) > 1 and not (together and w2 is None):
        first, second = (f"--{key.replace('_', '-')}" for key in chosen[:2])
        raise SpecError(f"{first} and {second} each choose the weight; give one of them")
    return tuple(named)


def check_options(options: SolveOptions, writes: bool) -> None:
    """Check the combination of options; `writes` is whether --output is given.

    Raises:
        SpecError: they exclude each other, or a number is out of range.
    """
    solving, bounded = options.spec is None, bool(options.bounds)
    reject_if(options.simulate < 0, f"--simulate {options.simulate} is below 0; give the number of requests")
    reject_if(options.seed < 0, f"--seed {options.seed} is below 0; give 0 or more")
    check_power([key for key, _ in options.bounds], options.problem.profile)
    reject_if(bounded and not solving, "--evaluate names a policy and a bound selects one: give one of them")
    reject_if(bounded and options.scheme is not None, "a bound needs the exact method: leave --method rvi out")
    reject_if(options.scheme is not None and not solving, "--evaluate is exact: leave --method rvi out")
    reject_if(not options.mixed and not bounded, "--no-mix applies to a bound: add one, or leave --no-mix out")
    reject_if(writes and not solving, "--output writes a solved policy: leave --evaluate out")


def rate_of(capacity: float, arrival_rate: float | None, load: float | None) -> float:
    """Return the arrival rate given directly or by the load, 1/s.

    Raises:
        SpecError: both are given or none, or the rate is not positive and finite.
    """
    if (arrival_rate is None) == (load is None):
        raise SpecError("give either --arrival-rate PER_SECOND or --load RHO")
    given, rate = ("load", load * capacity) if load is not None else ("arrival-rate", arrival_rate or 0.0)
    if not 0.0 < rate < inf:
        raise SpecError(f"--{given} {arrival_rate if load is None else load:g} is invalid; give a positive number")
    return rate


def loads_of(text: str) -> list[float]:
    """Parse the loads of LO:HI:N.

    Raises:
        SpecError: the text is malformed, or a load is outside (0, 1).
    """
    try:
        low, high, count = text.split(":")
        loads: list[float] = np.linspace(float(low), float(high), int(count)).tolist()
    except ValueError:
        raise SpecError(f"--rates {text!r} is not LO:HI:N; write for example 0.02:0.98:49") from None
    if not loads or not 0.0 < min(loads) <= max(loads) < 1.0 or sorted(set(loads)) != loads:
        raise SpecError(f"--rates {text!r}: loads must ascend within 0..1, both excluded; write 0.02:0.98:49")
    return loads
