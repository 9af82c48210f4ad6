"""Exact solution and exact evaluation of batching policies: Howard's policy iteration on the closed model.

Equation (17) of the journal paper (arXiv 2501.02181) on the queue lengths 0..s_max, with the closure of tail.py: one
dense linear solve of size s_max + 1 a step. s_max grows until the gain stops moving. How far it must reach is not
known beforehand: the closure's error falls geometrically with s_max - B_max, the faster the smaller B_max, but sizes
that nearly tie for the highest throughput change places at queue lengths far above B_max.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

import numpy as np

from policies.smdp.distributions import Floats
from policies.smdp.model import (
    LAUNCHES,
    POWER,
    RESPONSE,
    Ints,
    Model,
    Problem,
    build_model,
    check_actions,
    objective_weights,
)
from policies.smdp.tail import Closure, Measured, ShortModel, best_tail, close
from policies.types import SpecError

_SETTLED = 1e-10  # relative change from one s_max to the next
_STEPS = 200  # of policy iteration at one s_max; ten are usual
_PATIENCE = 200  # queue length beyond which the gain alone decides that s_max is long enough
_REACH = 2048  # states added at most: beyond, a linear solve takes more than a quarter of a second


@dataclass(frozen=True, slots=True)
class Solution:
    """A policy and its exact averages.

    Attributes:
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.
        gain: average cost g, w1 x mean response time in ms + w2 x mean power in W.
        mean_response_time: s.
        mean_power: W; None where the profile has no energies.
        energy_per_request: J; None where the profile has no energies.
        mean_batch_size: over batches.
        iterations: linear systems solved.
        change: relative change at the last lengthening of the state space; above 1e-10 only where that reached
            its limit, which takes near ties at a load near 1.
        arrival_rate: lambda, 1/s.
        load: rho.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W.
    """

    batch_size: tuple[int, ...]
    gain: float
    mean_response_time: float
    mean_power: float | None
    energy_per_request: float | None
    mean_batch_size: float
    iterations: int
    change: float
    arrival_rate: float
    load: float
    w1: float
    w2: float


def solve(problem: Problem) -> Solution:
    """The policy of least average cost.

    Raises:
        SpecError: the load is 1 or more, w1 is 0, or the problem is malformed.
    """
    model = build_model(problem)
    _check_solvable(problem, model)
    weights = objective_weights(problem)
    closure = close(model, best_tail(model, weights))
    policy, gain, iterations = _greedy(model, closure.action), inf, 0
    short = ShortModel(closure, model.max_batch_size + _first_reach(closure))
    while True:
        policy, measured, steps = _policy_iteration(short, policy, weights)
        before, gain, iterations = gain, float(measured.average @ weights), iterations + steps
        run = _Run(_trimmed(policy, closure.action), measured.average, _change(gain, before), iterations)
        settled = run.change <= _SETTLED and _ends_like_tail(short, policy)
        if settled or short.length >= model.max_batch_size + _REACH:
            return _solution(problem, model, run)
        short = ShortModel(closure, _next_length(short, closure.holds_from(gain, weights)))
        policy = short.resume(policy, measured, weights)


def evaluate(problem: Problem, batch_size: Sequence[int]) -> Solution:
    """The exact averages of any policy that is a function of the queue length.

    Args:
        problem: the system, and the weights in which the gain is told; w1 may be 0.
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.

    Raises:
        SpecError: the policy cannot keep up with the arrival rate, or is none, or the problem is malformed.
    """
    model = build_model(problem)
    check_actions(batch_size, model.min_batch_size, model.max_batch_size)
    tail = batch_size[-1]
    _check_keeps_up(model, tail)
    policy = _trimmed(np.array(batch_size, dtype=np.intp), tail)
    closure = close(model, tail)
    average, reach, iterations = np.full(3, inf), _first_reach(closure), 0
    while True:
        short = ShortModel(closure, len(policy) + reach)
        before, average = average, short.measure(short.extend(policy)).average
        reach, iterations = 2 * reach, iterations + 1
        run = _Run(policy, average, _change(average, before), iterations)
        if run.change <= _SETTLED or reach > _REACH:
            return _solution(problem, model, run)


@dataclass(frozen=True, eq=False)
class _Run:
    """Where the lengthening of the state space stands.

    Attributes:
        policy: action by queue length; the last repeats.
        average: of each counted quantity, per unit time; (3,).
        change: relative change of what has to settle, since the last length.
        iterations: linear systems solved.
    """

    policy: Ints
    average: Floats
    change: float
    iterations: int


def _policy_iteration(short: ShortModel, policy: Ints, weights: Floats) -> tuple[Ints, Measured, int]:
    """The best policy at one length, what it measures, and how many linear systems that took.

    Should the iteration not end, its last policy stands, with that policy's own averages.
    """
    policy, steps = short.extend(policy), 1
    measured = short.measure(policy)
    while steps < _STEPS:
        better = short.improve(policy, measured, weights)
        if np.array_equal(better, policy):
            break
        policy, measured, steps = better, short.measure(better), steps + 1
    return policy, measured, steps


def _first_reach(closure: Closure) -> int:
    """How many states the closure's error takes to vanish: 6 sqrt(b) leave about ten digits at any load."""
    return ceil(6.0 * sqrt(closure.action))


def _next_length(short: ShortModel, tail_holds_from: float) -> int:
    """Twice as far beyond B_max, or at once as far as the policy is expected to differ from the tail's."""
    largest = short.closure.model.max_batch_size
    expected = min(tail_holds_from + largest + 1.0, _PATIENCE + 1.0)
    return min(max(2 * short.length - largest, ceil(expected)), largest + _REACH)


def _ends_like_tail(short: ShortModel, policy: Ints) -> bool:
    """Whether the last B_max states launch what the tail launches; not asked of long queues.

    Sizes that nearly tie change places at queue lengths that are hardly ever seen (at 8600 for an affine profile with
    B_max = 256 at load 0.1, where the gain has all its digits at 352), so that far out the gain alone decides.
    """
    last = policy[-short.closure.model.max_batch_size :]
    return short.length > _PATIENCE or bool((last == short.closure.action).all())


def _change(now: Floats | float, before: Floats | float) -> float:
    moved, scale = np.abs(np.subtract(now, before)), np.abs(now)
    return float(np.max(moved / np.maximum(scale, np.finfo(float).tiny)))  # a quantity of 0 (no energies) is settled


def _greedy(model: Model, tail: int) -> Ints:
    """Launch what there is, up to the tail's size: where policy iteration starts."""
    states = np.arange(tail + 1)
    return np.where(states >= model.min_batch_size, states, 0)


def _trimmed(policy: Ints, tail: int) -> Ints:
    """The policy up to the first state from which the tail's action holds for good."""
    end = int(np.flatnonzero(policy != tail)[-1]) + 1  # state 0 waits, so there is one
    return np.append(policy[:end], tail)


def _check_solvable(problem: Problem, model: Model) -> None:
    if model.load >= 1.0:
        raise SpecError(
            f"load {model.load:.4g} is 1 or more: arrival rate {problem.arrival_rate:g} per second, capacity "
            f"{model.capacity:.6g} per second; lower the rate or allow larger batches"
        )
    if problem.w1 == 0.0:
        raise SpecError("w1 = 0 leaves response times free to grow for ever; give a positive w1")


def _check_keeps_up(model: Model, size: int) -> None:
    capacity = float(model.throughput[size])
    if model.arrival_rate >= capacity:
        raise SpecError(
            f"the policy's largest queues are served in batches of {size}, at most {capacity:.6g} requests per second "
            f"(load {capacity / model.capacity:.3f}); it cannot keep up with {model.arrival_rate:.6g} (load "
            f"{model.load:.3f}): lower the rate or end in a batch of higher throughput"
        )


def _solution(problem: Problem, model: Model, run: _Run) -> Solution:
    response, power, launches = (float(run.average[i]) for i in (RESPONSE, POWER, LAUNCHES))
    measurable = problem.profile.energies is not None
    return Solution(
        batch_size=tuple(run.policy.tolist()),
        gain=float(run.average @ objective_weights(problem)),
        mean_response_time=response,
        mean_power=power if measurable else None,
        energy_per_request=power / model.arrival_rate if measurable else None,
        mean_batch_size=model.arrival_rate / launches,
        iterations=run.iterations,
        change=run.change,
        arrival_rate=model.arrival_rate,
        load=model.load,
        w1=problem.w1,
        w2=problem.w2,
    )
