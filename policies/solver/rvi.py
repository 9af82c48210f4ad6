"""Relative value iteration on a truncated queue with an overflow cost: the method of the papers.

Source: Xu, Zhou and Niu (arXiv 2501.02181), section V, equations (18) to (30) and Algorithm 1, as printed. Queues
longer than s_max are lumped into one state S_o, which counts as s_max waiting and costs c_o more per unit time. This
leaves a truncation error, and c_o and s_max must be tuned. solver.py has no such error; this module reproduces the
papers' tables and serves for comparison.

| symbol           | name here           | meaning, unit                                                | equation |
|------------------|---------------------|--------------------------------------------------------------|----------|
| s_max            | max_queue_length    | longest queue with a state of its own                        | V-A      |
| S_o              | the last state      | every longer queue, state s_max + 1 of the arrays            | V-A      |
| m^(j given s, a) | chain               | transition probabilities of the truncated model              | (18)     |
| c_o              | overflow_cost       | abstract cost rate of S_o, in the unit of the gain           | (19)     |
| g^               | gain                | average cost of the policy, its overflow cost included       | (21)     |
| mu               | stationary          | stationary distribution of the policy's chain                | (21)     |
| Delta            | overflow_cost_share | what S_o contributes to g^                                   | (22)     |
| delta            | _TOLERANCE          | a Delta below is acceptable                                  | V-A      |
| c~(s, a)         | cost_rate           | cost per unit time                                           | (23)     |
| m~(j given s, a) | slotted             | transition probabilities per time slot                       | (23)     |
| eta              | slot                | slot length, s; 0.99 of its bound: longer slots, fewer steps | (25)     |
| J, H             | values, held        | next iterate; the same with H(s*) = 0                        | (29)     |
| s*               | S_o                 | the state where H is 0; the papers leave the choice free     | (29)     |
| span             | span                | max - min of H_(i+1) - H_i                                   | (28)     |
| epsilon          | epsilon             | the iteration ends with a span below                         | step 4   |
| iter_max         | max_iterations      | or after so many steps                                       | VII-D    |

A cost is divided by its sojourn time before it is used, so c_o y(s, a) of (19) becomes c_o, added to a rate. The
papers' rates are milliseconds of response time and watts. So are the weighted rates here, and c_o needs no conversion.
"""

import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from policies.solver.distributions import Floats, Ints
from policies.solver.model import HOLDING, Model, Problem, build_model, check_solvable, objective_weights
from policies.types import ParameterError

_TOLERANCE = 1e-3  # delta of section VII-D
_MAX_LENGTH = 2048  # largest s_max tried if none is given
_SHARE_OF_BOUND = 0.99  # eta over its bound
_NEGLIGIBLE = 1e-20  # smaller probabilities do not change a sum in double precision
_ABSORBING = 1e-290  # a state with a smaller probability of leaving is absorbing; the inverse must not overflow
_MAX_ARRIVALS = 2**14  # summed one by one for a tail probability
_MAX_PRODUCT = 2**18  # multiplications in a matrix product up to which OpenBLAS uses one thread
_MIN_COLUMNS = 16  # of such a product
_ROUNDING = 1e-9  # a larger difference of a sum of probabilities from 1 is the probability of more arrivals


class IterationLimitWarning(UserWarning):
    """The iteration reached its limit; the policy may not be epsilon-optimal."""


class WaitsForEverWarning(UserWarning):
    """The policy waits forever: in the truncated model the overflow state costs less than serving."""


class OverflowShareWarning(UserWarning):
    """At the longest queue tried, the overflow state contributes more than the papers accept."""


@dataclass(frozen=True, slots=True)
class Rvi:
    """The scheme's parameters; the defaults are those of the journal's section VII-D.

    Attributes:
        overflow_cost: c_o, in the unit of the gain: with w1 = 1, milliseconds of response time.
        max_queue_length: s_max; None: the smallest of 2, 4, 8, ... B_max whose Delta is below 0.001.
        epsilon: span at which the iteration ends, in the unit of the gain.
        max_iterations: iter_max.
    """

    overflow_cost: float = 100.0
    max_queue_length: int | None = None
    epsilon: float = 0.01
    max_iterations: int = 10_000


@dataclass(frozen=True, eq=False, slots=True)
class RviResult:
    """A policy and its averages in the truncated model.

    Attributes:
        batch_size: action for queue length 0..s_max; the last repeats, equation (30).
        overflow_action: action in S_o. The averages below use it, although (30) replaces it by that of s_max.
        gain: g^ of equation (21), the overflow cost included.
        overflow_cost_share: Delta of equation (22), the part of the gain that S_o contributes.
        iterations: iterations of equation (29).
        span: span at the last iteration.
        max_queue_length: s_max.
        averages: response time (s), power (W) and launches (1/s) of the truncated chain, without c_o; (3,).
    """

    batch_size: tuple[int, ...]
    overflow_action: int
    gain: float
    overflow_cost_share: float
    iterations: int
    span: float
    max_queue_length: int
    averages: Floats


def relative_value_iteration(problem: Problem, scheme: Rvi) -> RviResult:
    """Solve by the papers' method. If the method fails there is still a result, with a warning.

    Warns:
        IterationLimitWarning: the span is not below epsilon after max_iterations.
        WaitsForEverWarning: the policy waits at s_max or in S_o.
        OverflowShareWarning: no s_max was given, and even the longest one tried leaves Delta at 0.001 or more.

    Raises:
        SpecError: the load is 1 or more, w1 is 0, or the problem or the scheme is malformed.
    """
    model = build_model(problem)
    _check(problem, model, scheme)
    weights, cost = objective_weights(problem), scheme.overflow_cost
    longest = scheme.max_queue_length or max(_MAX_LENGTH, 2 * model.max_batch_size)
    length = scheme.max_queue_length or 2 * model.max_batch_size
    while True:
        truncated = _Truncated(model, weights, cost, length)
        policy, iterations, span = _iterate(truncated, scheme)
        result = _result(truncated, policy, iterations, span)
        if result.overflow_cost_share < _TOLERANCE or 2 * length > longest:
            break
        length *= 2
    _warn(scheme, result)
    return result


@dataclass(frozen=True, eq=False)
class _Truncated:
    """The model on the states 0..s_max and S_o.

    Attributes:
        model: the model.
        weights: of the counted quantities in the objective, (3,).
        overflow_cost: c_o.
        length: s_max, at least B_max.
    """

    model: Model
    weights: Floats
    overflow_cost: float
    length: int

    @cached_property
    def waiting(self) -> Ints:
        """Number of waiting requests in each state, s_max in S_o; (s_max + 2,)."""
        return np.minimum(np.arange(self.length + 2), self.length)

    @cached_property
    def arrivals(self) -> Floats:
        """p_k for k = 0..s_max; (B_max + 1, s_max + 1)."""
        return self.model.arrival_probabilities(self.length + 1)

    @cached_property
    def slot(self) -> float:
        """Eta, s: 0.99 of the bound of equation (25), the smallest y / (1 - m^(s, s, a))."""
        sizes = self.model.actions[self.model.allowed][1:]
        same, fewer = self.arrivals[sizes, sizes], np.cumsum(self.arrivals, axis=1)[sizes, sizes]
        leaving = np.maximum(1.0 - same, fewer)  # of 0..s_max and of S_o; the larger one is never near 0
        bound = np.min(self.model.sojourn_time[sizes] / leaving)
        return _SHARE_OF_BOUND * min(1.0 / self.model.arrival_rate, float(bound))

    @cached_property
    def per_sojourn(self) -> Floats:
        """Eta / y(a); (B_max + 1,)."""
        return self.slot / self.model.sojourn_time

    @cached_property
    def slotted(self) -> Floats:
        """m~ of equation (23) by arrivals k, for s <= s_max: the queue stays at s where k = a; (B_max + 1, counts).

        Columns beyond the last probability that is not negligible are omitted: those arrivals lead to S_o.
        """
        likely = int(np.flatnonzero(self.arrivals.max(axis=0) > _NEGLIGIBLE)[-1]) + 1
        counts = max(likely, self.model.max_batch_size + 1)
        rows = self.arrivals[:, :counts] * self.per_sojourn[:, None]
        rows[self.model.actions, self.model.actions] += 1.0 - self.per_sojourn
        return rows

    @cached_property
    def cost_rate(self) -> Floats:
        """c~ of equation (23) for s <= s_max; infinite where the action is not allowed; (B_max + 1, s_max + 1)."""
        model, states = self.model, self.waiting[:-1]
        at_once = model.charges @ self.weights + model.half_second_moment * (HOLDING @ self.weights)
        rate = (at_once / model.sojourn_time)[:, None] + states * (HOLDING @ self.weights / model.arrival_rate)
        feasible = (states >= model.actions[:, None]) & model.allowed[:, None]
        return np.where(feasible, rate, inf)

    def chain(self, policy: Ints) -> Floats:
        """m^ of equation (18) under a policy; (s_max + 2, s_max + 2)."""
        left = self.waiting - policy
        lead = np.hstack([np.zeros_like(self.arrivals), self.arrivals])  # no arrivals below 0
        reached = self.length + 1 + np.arange(self.length + 1) - left[:, None]
        inside = lead[policy[:, None], reached]
        return np.column_stack([inside, _tails(self.model, self.length)[policy, self.length - left]])


def results_by_iteration(problem: Problem, scheme: Rvi) -> Iterator[RviResult]:
    """Yield the result after each iteration, up to the one at which the method ends; without its warnings.

    Args:
        problem: as for `relative_value_iteration`.
        scheme: with a max_queue_length.
    """
    assert scheme.max_queue_length is not None
    model = build_model(problem)
    _check(problem, model, scheme)
    truncated = _Truncated(model, objective_weights(problem), scheme.overflow_cost, scheme.max_queue_length)
    for iterations, (total, span) in enumerate(_iterations(truncated, scheme), 1):
        yield _result(truncated, total.argmin(axis=0), iterations, span)


def _iterate(truncated: _Truncated, scheme: Rvi) -> tuple[Ints, int, float]:
    """Run Algorithm 1: the policy (s_max + 2,), the number of iterations, and the last span."""
    ((iterations, (total, span)),) = deque(enumerate(_iterations(truncated, scheme), 1), maxlen=1)
    return total.argmin(axis=0), iterations, span


def _iterations(truncated: _Truncated, scheme: Rvi) -> Iterator[tuple[Floats, float]]:
    """Yield the costs (B_max + 1, s_max + 2), overwritten by the next iteration, and the span of each iteration.

    With H(S_o) = 0 no overflow probability is needed: H is padded with zeros. One matrix product gives the expectation
    for every (action, queue length just after the launch). Read with a row stride shorter by one, the same memory is
    indexed by (action, s). Entries with s < a are invalid and excluded by an infinite cost.
    """
    slotted, cost, limit = truncated.slotted, truncated.cost_rate, truncated.length
    padded = np.zeros(limit + slotted.shape[1])
    held, windows = padded[: limit + 2], sliding_window_view(padded, limit + 1)
    copied, expected, total = np.empty(windows.shape), np.empty(cost.shape), np.empty((len(cost), limit + 2))
    by_state = as_strided(expected, cost.shape, (expected.strides[0] - expected.itemsize, expected.itemsize))
    listed, last, overflow = total[:, :-1], total[:, -2], total[:, -1]
    stays, growth, values = 1.0 - truncated.per_sojourn, np.empty(limit + 2), np.empty(limit + 2)
    # on a busy machine a multi-threaded product of this size takes up to a hundred times as long
    width = max(_MIN_COLUMNS, _MAX_PRODUCT // slotted.size)
    blocks = [(copied[:, i : i + width], expected[:, i : i + width]) for i in range(0, limit + 1, width)]
    iterations, span = 0, inf
    while span >= scheme.epsilon and iterations < scheme.max_iterations:
        np.copyto(copied, windows)
        for columns, out in blocks:
            np.matmul(slotted, columns, out=out)
        np.add(by_state, cost, out=listed)
        # S_o has the transitions of s_max, except that where s_max stays for the slot S_o stays, at H = 0
        np.subtract(last, stays * held[limit] - truncated.overflow_cost, out=overflow)
        total.min(axis=0, out=values)
        np.subtract(values, held, out=growth)
        np.subtract(values, values[-1], out=held)
        span, iterations = float(growth.max() - growth.min()), iterations + 1
        yield total, span


def _result(truncated: _Truncated, policy: Ints, iterations: int, span: float) -> RviResult:
    """Equations (21), (22) and (30)."""
    model = truncated.model
    stationary = _stationary(truncated.chain(policy), model.max_batch_size + 1)
    sojourn = model.sojourn_time[policy]
    held = model.half_second_moment[policy] + truncated.waiting / model.arrival_rate * sojourn
    counted = model.charges[policy] + np.outer(held, HOLDING)
    time = float(stationary @ sojourn)
    averages = stationary @ counted / time
    overflow = truncated.overflow_cost * float(stationary[-1] * sojourn[-1]) / time
    return RviResult(
        batch_size=tuple(policy[:-1].tolist()),
        overflow_action=int(policy[-1]),
        gain=float(averages @ truncated.weights) + overflow,
        overflow_cost_share=float(stationary[-1] * (counted[-1] @ truncated.weights)) / time + overflow,
        iterations=iterations,
        span=span,
        max_queue_length=truncated.length,
        averages=averages,
    )


def _stationary(chain: Floats, reach: int) -> Floats:
    """Return the stationary distribution by the elimination of Grassmann, Taksar and Heyman; (n,).

    The elimination has no subtractions, so that even tiny probabilities have full relative precision. There is one
    recurrent class (the journal's Lemma 2). If no transition leads from a state to the ones below, that class lies in
    this state and those above, and the ones below have probability 0. S_o is such a state if the policy waits there.

    Args:
        chain: transition probabilities, (n, n).
        reach: largest step down of any transition.
    """
    left, lowest = chain.copy(), 0
    for state in range(len(chain) - 1, 0, -1):
        below = slice(max(state - reach, 0), state)
        leaving = left[state, below].sum()
        if leaving < _ABSORBING:
            lowest = state
            break
        left[:state, state] /= leaving
        left[:state, below] += np.outer(left[:state, state], left[state, below])
    share = np.zeros(len(chain))
    share[lowest] = 1.0
    for state in range(lowest + 1, len(chain)):
        share[state] = share[:state] @ left[:state, state]
        share[: state + 1] /= share[: state + 1].sum()  # at each step, to prevent overflow
    return share


def _tails(model: Model, length: int) -> Floats:
    """Return P(N > k) for k = 0..length, summed from the far end; (B_max + 1, length + 1).

    The sum starts where the rest is negligible, or, for very heavy tails, at the farthest count; the difference of the
    total probability from 1 is then added.
    """

    def from_far(counts: int) -> Floats:
        return np.cumsum(model.arrival_probabilities(counts)[:, ::-1], axis=1)[:, ::-1]  # at k: P(k <= N < counts)

    reach = 4 * (length + 1)
    beyond = from_far(reach)
    while reach < _MAX_ARRIVALS and bool(np.any(beyond[:, reach // 2] > _NEGLIGIBLE * beyond[:, length + 1])):
        reach *= 2
        beyond = from_far(reach)
    lacking = 1.0 - beyond[:, :1]
    return beyond[:, 1 : length + 2] + np.where(lacking > _ROUNDING, lacking, 0.0)


def _warn(scheme: Rvi, result: RviResult) -> None:
    length = result.max_queue_length
    if result.span >= scheme.epsilon:
        message = (
            f"relative value iteration stopped at max_iterations = {scheme.max_iterations} with span "
            f"{result.span:.3g}, not below epsilon = {scheme.epsilon:g}; raise max_iterations or epsilon"
        )
        warnings.warn(message, IterationLimitWarning, stacklevel=3)
    if 0 in (result.batch_size[-1], result.overflow_action):
        message = (
            f"the policy waits forever at queue length {length} or beyond, where overflow_cost = "
            f"{scheme.overflow_cost:g} is less than serving costs; raise overflow_cost or max_queue_length"
        )
        warnings.warn(message, WaitsForEverWarning, stacklevel=3)
    if scheme.max_queue_length is None and result.overflow_cost_share >= _TOLERANCE:
        message = (
            f"queues beyond {length}, the longest tried, still contribute {result.overflow_cost_share:.3g} to the "
            f"average cost, {_TOLERANCE:g} or more; give max_queue_length, or another overflow_cost"
        )
        warnings.warn(message, OverflowShareWarning, stacklevel=3)


def _check(problem: Problem, model: Model, scheme: Rvi) -> None:
    length, largest = scheme.max_queue_length, model.max_batch_size
    check_solvable(problem, model)
    if not 0.0 <= scheme.overflow_cost < inf:
        raise ParameterError(
            "overflow_cost", f"{scheme.overflow_cost:g}", "is invalid; give a finite number of 0 or more"
        )
    if length is not None and length < largest:
        raise ParameterError(
            "max_queue_length", f"{length}", f"is below the largest batch, {largest}; give at least {largest}"
        )
    if not 0.0 < scheme.epsilon < inf:
        raise ParameterError("epsilon", f"{scheme.epsilon:g}", "is invalid; give a positive number such as 0.01")
    if scheme.max_iterations < 1:
        raise ParameterError("max_iterations", f"{scheme.max_iterations}", "is below 1; give at least 1")
