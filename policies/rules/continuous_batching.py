"""Continuous batching: requests join and leave the batch between decode steps.

Orca (Yu et al. 2022) calls it iteration-level scheduling; Multi-Bin Batching leaves it aside (its footnote 1). A stage
is a decode step, and the model takes requests at different steps in one batch. Within a bin, only requests of that bin
join. Where batches of several bins are under way, PerKind runs the one whose oldest request arrived first until it is
complete; the rows of the other batches stay on the device meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from policies.profile import Profile
from policies.rules.rule import BinnedPolicy, Rule
from policies.rules.traits import StepPolicy
from policies.sizing.bins import equal_edges
from policies.sizing.size_models import lengths_of
from policies.smdp.decode_steps import DecodeProblem, DecodeSolution, solve_decode_steps
from policies.spec import Spec
from policies.types import Action, Launch, SpecError, State, Wait
from policies.unrolled import check_decode_steps

_LOADS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SETTLED = 1e-3  # of the average cost; the policy settles before it


@dataclass(frozen=True, slots=True)
class ContinuousBatching(StepPolicy):
    """Launch one decode step of all running requests and of as many waiting ones as fit; never waits.

    Attributes:
        max_batch_size: largest batch.
    """

    max_batch_size: int

    def decide(self, state: State, /) -> Action:
        """Running requests in order of arrival, then the oldest waiting ones."""
        batch = [*state.suspended, *state.waiting[: self.max_batch_size]][: self.max_batch_size]
        return Launch(batch, 1, "full" if len(batch) >= self.max_batch_size else "policy")


@dataclass(frozen=True)
class SolvedContinuousBatching(StepPolicy):
    """Lets as many waiting requests join as the table of the nearest arrival rate says; all below half the lowest rate.

    Attributes:
        rates: of the tables, 1/s, ascending.
        tables: a solution for each rate.
        max_batch_size: largest batch.
        max_wait: waiting time of the oldest request after which all that fit join, s.
    """

    rates: Sequence[float]
    tables: Sequence[DecodeSolution]
    max_batch_size: int
    max_wait: float = inf

    def decide(self, state: State, /) -> Action:
        """Running requests in order of arrival, then the oldest waiting ones; an idle device may wait for more."""
        active, waiting = len(state.suspended), len(state.waiting)
        rate = state.arrival_rate if state.rates else self.rates[0]
        joining = min(waiting, self.max_batch_size - active)
        due = state.waiting[0].arrival + self.max_wait if waiting else inf
        if rate >= self.rates[0] / 2.0 and state.now < due:
            table = min(zip(self.rates, self.tables, strict=True), key=lambda row: abs(row[0] - rate))[1]
            joining = min(joining, table.joining(min(active, self.max_batch_size), waiting))
        batch = [*state.suspended, *state.waiting[:joining]][: self.max_batch_size]
        if not batch:
            return Wait(min(state.reevaluate_at, due))
        return Launch(batch, 1, "full" if len(batch) >= self.max_batch_size else "policy")


def decode_problem(sizes: Sequence[float], profile: Profile, w2: float) -> DecodeProblem:
    """Return the problem for requests of these sizes, service times alone, s, at an arrival rate of 1/s."""
    mean = max(1.0, float(np.mean(lengths_of(sizes, profile))))
    return DecodeProblem(profile.decode_step_time, mean, 1.0, profile.max_batch_size, profile.powers, 1.0, w2)


def solve_joining(sizes: Sequence[float], profile: Profile, w2: float) -> SolvedContinuousBatching:
    """Solve the tables for requests of these sizes, service times alone, s.

    Args:
        sizes: observed ones, of which the mean number of decode steps is used.
        profile: of the device, with lengths and energies; its largest size is the largest batch.
        w2: weight of the mean power, per W.
    """
    problem = decode_problem(sizes, profile, w2)
    rates = [load * problem.capacity for load in _LOADS]
    tables = [solve_decode_steps(replace(problem, arrival_rate=rate), settled=_SETTLED) for rate in rates]
    return SolvedContinuousBatching(rates, tables, profile.max_batch_size)


def _build(spec: Spec, profile: Profile) -> ContinuousBatching | BinnedPolicy:
    check_decode_steps(spec, profile)
    if not profile.varies_by_length:
        raise SpecError(
            f"policy {spec.text!r} is for models that generate tokens; profile {profile.name!r} has no lengths, or the "
            "simulated requests have none: name another policy, or add --sizes to a simulation"
        )
    largest = profile.max_batch_size if spec.arg is None else spec.whole("ARG", 1, profile.max_batch_size)
    w2 = spec.number("w2", 0.0)
    if not w2:
        return ContinuousBatching(largest)
    solve = partial(solve_joining, profile=profile.truncated(largest), w2=w2)
    return BinnedPolicy(1, partial(equal_edges, bins=1), largest, f"joining:{largest}", solve)


CONTINUOUS_BATCHING = Rule(
    name="joining",
    build=_build,
    keys=frozenset({"w2"}),
    takes_arg=True,
    needs_lengths=True,
    description="Experimental. Continuous batching: between two decode steps finished requests leave the batch and "
    "waiting ones join it; with w2, once sizes are known, as many as a solved table says. It is faster if a decode "
    "step takes longer than its launch; with a very small network only up to about half load.",
    example="joining",
)
