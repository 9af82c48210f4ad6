"""Exact solution and exact evaluation of batching policies: Howard's policy iteration on the closed model.

Equation (17) of the journal paper (arXiv 2501.02181) on the queue lengths 0..s_max, with the closure of tail.py: one
dense linear solve of size s_max + 1 per step. s_max grows until the gain has converged. The necessary length is not
known beforehand: the closure's error falls geometrically with s_max - B_max, faster for a smaller B_max, but sizes
that nearly tie for the highest throughput change order at queue lengths far above B_max.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt

import numpy as np

from policies.solver.distributions import Floats, Ints
from policies.solver.model import (
    HOLDING,
    LAUNCHES,
    POWER,
    RESPONSE,
    Model,
    Problem,
    build_model,
    check_actions,
    check_solvable,
    objective_weights,
)
from policies.solver.rvi import Rvi, RviResult, relative_value_iteration
from policies.solver.tail import Closure, PolicyValue, ShortModel, best_tail, close
from policies.types import Mix, SpecError

_SETTLED = 1e-10  # relative change from one s_max to the next
_STEPS = 200  # maximum steps of policy iteration at one s_max; ten are usual
_REACH = 2048  # maximum number of added states; a longer linear solve takes more than a quarter of a second


@dataclass(frozen=True, slots=True)
class Solution:
    """A policy and its exact averages.

    Attributes:
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.
        gain: average cost g, w1 x mean response time in ms + w2 x mean power in W.
        mean_response_time: s.
        mean_power: of the resource per second: W, cores, or busy share.
        energy_per_request: of the resource: J, CPU s, or busy s.
        mean_batch_size: over batches.
        iterations: linear systems solved; for relative value iteration, iterations of Algorithm 1.
        change: relative change at the last extension of the state space. It is above 1e-10 only where the extension
            reached its limit, with near ties at a load near 1. For relative value iteration: last span over gain.
        arrival_rate: lambda, 1/s.
        load: rho.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W.
        mix: the second table of a randomised policy; the averages are those of the mix.
        overflow_cost_share: Delta, the contribution of the overflow state to the gain; None for the exact method.
    """

    batch_size: tuple[int, ...]
    gain: float
    mean_response_time: float
    mean_power: float
    energy_per_request: float
    mean_batch_size: float
    iterations: int
    change: float
    arrival_rate: float
    load: float
    w1: float
    w2: float
    mix: Mix | None = None
    overflow_cost_share: float | None = None


def solve(problem: Problem, scheme: Rvi | None = None) -> Solution:
    """Return the policy of least average cost.

    Args:
        problem: the system and the weights.
        scheme: parameters of relative value iteration, which has a truncation error and warns where it fails; None:
            the exact method.

    Raises:
        SpecError: the load is 1 or more, w1 is 0, or the problem or the scheme is malformed.
    """
    model = build_model(problem)
    check_solvable(problem, model)
    if scheme is not None:
        return _from_rvi(problem, model, relative_value_iteration(problem, scheme))
    return _solution(problem, model, _best(model, objective_weights(problem)))


def evaluate(problem: Problem, batch_size: Sequence[int], mix: Mix | None = None) -> Solution:
    """Return the exact averages of a policy that is a function of the queue length, randomised or not.

    Args:
        problem: the system, and the weights of the gain; w1 may be 0.
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.
        mix: the second table of a randomised policy, with the same last action.

    Raises:
        SpecError: the policy is unstable at the arrival rate, the table is invalid, or the problem is malformed.
    """
    model = build_model(problem)
    tail = batch_size[-1] if batch_size else 0
    for table in (batch_size, *([mix.batch_size] if mix else ())):
        check_actions(table, model.min_batch_size, model.max_batch_size)
        _check_tail(table[-1], tail)
    _check_keeps_up(model, tail)
    policy = _trimmed(np.array(batch_size, dtype=np.intp), tail)
    mixed = None if mix is None else (mix.probability, np.array(mix.batch_size, dtype=np.intp))
    run = _settle(close(model, tail), _Run(policy, np.full(3, inf), inf, 0, mixed))
    return replace(_solution(problem, model, run), mix=mix)


@dataclass(frozen=True, eq=False)
class _Run:
    """The result at one length of the state space.

    Attributes:
        policy: action by queue length; the last repeats.
        average: average of each accumulated quantity, per unit time; (3,).
        change: relative change since the previous length.
        iterations: linear systems solved.
        mixed: probability and actions of the second table of a randomised policy.
    """

    policy: Ints
    average: Floats
    change: float
    iterations: int
    mixed: tuple[float, Ints] | None = None


def _best(model: Model, weights: Floats) -> _Run:
    """Return the best policy over all tails.

    If the tail's action is not yet optimal at the longest queue considered, another size is cheaper there in spite of
    its lower throughput, and the closure with this size as the tail converges much earlier. A converged result is
    correct with any tail: all the added states were free to choose other actions and did not change it. If neither
    converges, the cheaper one is returned.
    """
    closure, others = close(model, best_tail(model, weights)), []
    run, moved = _improve(closure, weights, _REACH // 4)
    last_before_tail = int(run.policy[-2])
    late_tail = len(run.policy) > model.max_batch_size + _REACH // 16
    if moved > _SETTLED and late_tail and model.throughput[last_before_tail] > model.arrival_rate:
        cheaper = close(model, last_before_tail)
        other, still_moved = _improve(cheaper, weights, _REACH)
        if still_moved <= _SETTLED:
            return _settle(cheaper, other)
        others.append((cheaper, other))
    if moved > _SETTLED:
        run, moved = _improve(closure, weights, _REACH)
    if moved <= _SETTLED:
        return _settle(closure, run)
    found = [_settle(*each) for each in [(closure, run), *others]]
    return min(found, key=lambda each: float(each.average @ weights))


def _improve(closure: Closure, weights: Floats, most: int) -> tuple[_Run, float]:
    """Return the best policy with this tail, and the relative change of the gain at the last extension.

    Args:
        closure: the model and its tail.
        weights: weights of the accumulated quantities, (3,).
        most: maximum number of states beyond B_max.
    """
    model = closure.model
    average, gain, iterations = np.full(3, inf), inf, 2  # linear systems of _start
    short = ShortModel(closure, model.max_batch_size + _first_reach(closure))
    policy = _start(short, weights)
    while True:
        policy, value, steps = _policy_iteration(short, policy, weights)
        before, average, iterations = average, value.average, iterations + steps
        moved, gain = _change(float(average @ weights), gain), float(average @ weights)
        if moved <= _SETTLED or 2 * short.length > 2 * model.max_batch_size + most:
            return _Run(_trimmed(policy, closure.action), average, _change(average, before), iterations), moved
        short = ShortModel(closure, 2 * short.length - model.max_batch_size)
        policy = short.resume(policy, value, weights)


def _policy_iteration(short: ShortModel, policy: Ints, weights: Floats) -> tuple[Ints, PolicyValue, int]:
    """Return the best policy at one length, its value, and the number of linear systems solved.

    If the iteration reaches its limit, the last policy is returned with its own averages.
    """
    (policy, value), steps = _valued(short, short.extend(policy)), 1
    while steps < _STEPS:
        better = short.improve(policy, value, weights)
        if np.array_equal(better, policy):
            break
        (policy, value), steps = _valued(short, better), steps + 1
    return policy, value, steps


def _valued(short: ShortModel, policy: Ints) -> tuple[Ints, PolicyValue]:
    """Return the policy, repaired where it has no single average, and its value.

    If short queues stay short under it and long ones long, the linear system is singular. Then all queue lengths from
    the first on at which the queue grows again launch the tail's size, or wait for it.
    """
    try:
        return policy, short.value_of(policy)
    except np.linalg.LinAlgError:
        shrinks = short.closure.model.drain[policy] > 0.0
        repaired = np.maximum.accumulate(np.maximum.accumulate(shrinks) & ~shrinks)
        tail = short.closure.action
        policy = np.where(repaired, np.where(short.states >= tail, tail, 0), policy)
        return policy, short.value_of(policy)


def _first_reach(closure: Closure) -> int:
    """Return the number of added states to start with: 6 sqrt(b) give about ten digits at any load.

    Where a small batch takes longer than a large one, more requests may arrive during a batch than the largest one
    takes, even if only a service six standard deviations longer than the mean does that. These states have to be there
    from the start: a policy that avoids such batches does not change with more.
    """
    model = closure.model
    times = model.service_times
    deviation = np.sqrt(np.maximum(2.0 * model.half_second_moment[1:] - times**2, 0.0))
    slow = times > np.minimum.accumulate(times[::-1])[::-1]  # slower than a larger batch
    longest = max(float(times.max()), float((times + 6.0 * deviation).max(where=slow, initial=0.0)))
    beyond = min(max(0.0, model.arrival_rate * longest - model.max_batch_size), _REACH / 8)
    return ceil(beyond + 6.0 * sqrt(max(closure.action, beyond)))


def _settle(closure: Closure, run: _Run) -> _Run:
    """Extend the state space until each average of a policy has converged.

    The gain may converge before its parts, if one part dominates or two policies have the same cost.
    """
    reach = _first_reach(closure)
    seen = max(len(run.policy), 0 if run.mixed is None else len(run.mixed[1]))
    while run.change > _SETTLED and reach <= _REACH:
        short = ShortModel(closure, seen + reach)
        mixed = None if run.mixed is None else (run.mixed[0], short.extend(run.mixed[1]))
        average = short.value_of(short.extend(run.policy), mixed).average
        run = replace(run, average=average, change=_change(average, run.average), iterations=run.iterations + 1)
        reach *= 2
    return run


def _change(now: Floats | float, before: Floats | float) -> float:
    moved, scale = np.abs(np.subtract(now, before)), np.abs(now)
    return float(np.max(moved / np.maximum(scale, np.finfo(float).tiny)))  # a quantity of 0 (no energies) has converged


def _start(short: ShortModel, weights: Floats) -> Ints:
    """Return the better one of two policies to start policy iteration: a control limit, or batches of the tail's size.

    The control limit is usually near the optimum where service times rise with the size. It is the economic order
    quantity: batches of q cost K lambda / q in fixed charges and q w / (2 lambda) in holding, with the least sum at
    q = lambda sqrt(2 K / w). K is the fixed part of the charges: that of the smallest batch less the mean increase per
    request times its size.
    """
    model, tail = short.closure.model, short.closure.action
    charges = (model.charges @ weights)[model.min_batch_size :]
    fixed = max(charges[0] - (charges[-1] - charges[0]) * model.min_batch_size / max(len(charges) - 1, 1), 0.0)
    limit = model.arrival_rate * sqrt(2.0 * fixed / float(HOLDING @ weights))
    states = np.arange(tail + 1)
    starts = [np.where(states >= max(least, model.min_batch_size), states, 0) for least in (min(limit, tail), tail)]
    return min(starts, key=lambda policy: float(_valued(short, short.extend(policy))[1].average @ weights))


def _trimmed(policy: Ints, tail: int) -> Ints:
    """Cut the policy after the first state from which on the action is that of the tail."""
    end = int(np.flatnonzero(policy != tail)[-1]) + 1  # state 0 waits, so there is one
    return np.append(policy[:end], tail)


def _check_tail(last: int, tail: int) -> None:
    if last != tail:
        raise SpecError(f"the tables of a mix end in batches of {tail} and {last}; both must end in the same size")


def _check_keeps_up(model: Model, size: int) -> None:
    capacity = float(model.throughput[size])
    if model.arrival_rate >= capacity:
        raise SpecError(
            f"the policy's largest queues are served in batches of {size}, at most {capacity:.6g} requests per second "
            f"(load {capacity / model.capacity:.3f}); it cannot keep up with {model.arrival_rate:.6g} (load "
            f"{model.load:.3f}): lower the rate or end in a batch of higher throughput"
        )


def _from_rvi(problem: Problem, model: Model, result: RviResult) -> Solution:
    run = _Run(
        np.array(result.batch_size, dtype=np.intp), result.averages, result.span / result.gain, result.iterations
    )
    share = result.overflow_cost_share
    return replace(_solution(problem, model, run), gain=result.gain, overflow_cost_share=share)


def _solution(problem: Problem, model: Model, run: _Run) -> Solution:
    response, power, launches = (float(run.average[i]) for i in (RESPONSE, POWER, LAUNCHES))
    mean_batch_size = model.arrival_rate / launches if launches else 0.0  # the papers' method may never launch
    return Solution(
        batch_size=tuple(run.policy.tolist()),
        gain=float(run.average @ objective_weights(problem)),
        mean_response_time=response,
        mean_power=power,
        energy_per_request=power / model.arrival_rate,
        mean_batch_size=mean_batch_size,
        iterations=run.iterations,
        change=run.change,
        arrival_rate=model.arrival_rate,
        load=model.load,
        w1=problem.w1,
        w2=problem.w2,
    )
