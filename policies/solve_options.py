"""What solve-policy is asked: its flags as one question, or what is wrong with them."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from policies.profile import Profile
from policies.smdp.choice import BOUNDS, ShareBound, parse_bound
from policies.smdp.model import Problem
from policies.smdp.rvi import Rvi
from policies.types import SpecError

MEASURED_OVER = 400_000  # requests, where a share is bounded and --simulate does not say


@dataclass(frozen=True)
class Question:
    """What was asked.

    Attributes:
        problem: the system and the weights.
        spec: the policy to evaluate; None solves.
        scheme: of relative value iteration; None solves exactly.
        bound: name and text of the bound that chooses the weight.
        mixed: whether two policies may be mixed to meet the bound.
        simulate: number of requests to simulate; 0 for none.
        seed: of the simulated arrivals.
    """

    problem: Problem
    spec: str | None
    scheme: Rvi | None
    bound: tuple[str, str] | None
    mixed: bool
    simulate: int
    seed: int

    def at(self, arrival_rate: float) -> "Question":
        """The same question at this rate, 1/s; a bound on a share is simulated in any case."""
        simulate = MEASURED_OVER if self.shared_bound is not None and not self.simulate else self.simulate
        return replace(self, problem=replace(self.problem, arrival_rate=arrival_rate), simulate=simulate)

    @property
    def profile(self) -> Profile:
        """Up to the largest batch."""
        return self.problem.profile.truncated(self.problem.max_batch_size)

    @property
    def shared_bound(self) -> ShareBound | None:
        """The bound, if it is one on the share within a time."""
        bound = None if self.bound is None else parse_bound(*self.bound)
        return bound if isinstance(bound, ShareBound) else None

    @property
    def bound_said(self) -> dict[str, float | str] | None:
        """The bound as files and answers tell it."""
        if self.bound is None:
            return None
        key, text = self.bound
        return {key: text if key == "slo_share" else float(text)}


def refuse(wrong: bool, message: str) -> None:
    """Complain where something is wrong.

    Raises:
        SpecError: it is.
    """
    if wrong:
        raise SpecError(message)


def scheme_of(method: str, given: tuple[float | None, int | None, float | None, int | None]) -> Rvi | None:
    """The papers' scheme, from c_o, s_max, epsilon and the iterations where they are given; None for the exact method.

    Raises:
        SpecError: no such method, or one that does not take what is given.
    """
    refuse(method not in ("exact", "rvi"), f"--method {method!r} is neither exact nor rvi; give one of them")
    flags = ("overflow_cost", "max_queue_length", "epsilon", "max_iterations")
    named: dict[str, Any] = {flag: value for flag, value in zip(flags, given, strict=True) if value is not None}
    if method == "rvi":
        return Rvi(**named)
    for flag, value in named.items():
        raise SpecError(f"--{flag.replace('_', '-')} {value:g} belongs to the papers' method; add --method rvi")
    return None


def bound_of(w2: float | None, given: tuple[float | str | None, ...]) -> tuple[str, str] | None:
    """Name and text of the one bound among those of `BOUNDS` that is given; None where none is.

    Raises:
        SpecError: two of them are given, or one and the weight.
    """
    named = {key: str(value) for key, value in zip(BOUNDS, given, strict=True) if value is not None}
    chosen = list(named) + ["w2"] * (w2 is not None)
    if named and len(chosen) > 1:
        first, second = (f"--{key.replace('_', '-')}" for key in chosen[:2])
        raise SpecError(f"{first} and {second} each choose the weight; give one of them")
    return next(iter(named.items()), None)


def check(question: Question, writes: bool) -> None:
    """Whether the flags go together; `writes` says that a policy file is wanted.

    Raises:
        SpecError: they do not.
    """
    solving, bounded = question.spec is None, question.bound is not None
    refuse(question.simulate < 0, f"--simulate {question.simulate} is no number of requests; give 1 or more")
    refuse(question.seed < 0, f"--seed {question.seed} is below 0; give 0 or more")
    refuse(bounded and not solving, "a bound chooses a policy, --evaluate names one: give one of them")
    refuse(bounded and question.scheme is not None, "a bound is met by the exact method: leave --method rvi out")
    refuse(question.scheme is not None and not solving, "--evaluate is exact: leave --method rvi out")
    refuse(not question.mixed and not bounded, "--no-mix says how to meet a bound: give one, or leave it out")
    refuse(writes and not solving, "--output writes a solved policy: leave --evaluate out")


def rate_of(capacity: float, arrival_rate: float | None, load: float | None) -> float:
    """The arrival rate that is given, or the load's, 1/s.

    Raises:
        SpecError: both are given or none, or it cannot be.
    """
    if (arrival_rate is None) == (load is None):
        raise SpecError("give either --arrival-rate PER_SECOND or --load RHO")
    rate = arrival_rate if arrival_rate is not None else (load or 0.0) * capacity
    if not 0.0 < rate < inf:
        raise SpecError(f"an arrival rate of {rate:g} per second cannot be: give a positive rate or load")
    return rate


def loads_of(text: str) -> list[float]:
    """The loads of LO:HI:N.

    Raises:
        SpecError: they are no loads.
    """
    try:
        low, high, count = text.split(":")
        loads: list[float] = np.linspace(float(low), float(high), int(count)).tolist()
    except ValueError:
        raise SpecError(f"--rates {text!r} is not LO:HI:N; write for example 0.02:0.98:49") from None
    if not loads or not 0.0 < min(loads) <= max(loads) < 1.0 or sorted(set(loads)) != loads:
        raise SpecError(f"--rates {text!r}: loads must ascend within 0..1, both excluded; write 0.02:0.98:49")
    return loads
