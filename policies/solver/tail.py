"""The exact closure: the cost of long queues, without a truncation error and without an overflow cost.

Beyond some queue length s_max the policy always launches one size b. There the relative value function is a
quadratic up to terms that vanish geometrically,

    h(s) = alpha s^2 + beta s + const,   alpha = w l / (2 lambda d),   beta = beta_0 - g l / d,
    beta_0 = (u + w m2 / 2 + alpha E[D^2]) / d,

with l = y(b), d = d(b) > 0 the mean decrease of the queue by one batch, D its change, m2 = E[G_b^2], u the charge of a
launch and w the holding weight.

This quadratic is subtracted from equation (17) in every state. The rest, e(s) = h(s) - quadratic(s), is 0 beyond s_max.
The sums over long queues vanish, because the mean of a quadratic needs two moments only:

    e(s) = min_a { (w s / lambda - g) kappa(a) + f(a) + sum_k p_k^[a] e(s - a + k) }

    kappa(a) = y(a) - d(a) l / d                                   (lost_time)
    f(a)     = u(a) + w m2(a) / 2 + alpha E[D_a^2] - beta_0 d(a)   (charges)

kappa is the additional time of action a over batches of b for the same drain. kappa and f are 0 for b itself, so there
is no cancellation of large numbers, and the precision does not degrade as the load nears 1. Waiting has kappa(0) =
b / (lambda d) > 0, hence waiting forever is never optimal where w > 0.
"""

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from policies.solver.distributions import Floats, Ints
from policies.solver.model import HOLDING, Model

_TIE = 1e-12  # relative difference of throughputs up to which they are equal
_NEGLIGIBLE = 1e-20  # smaller probabilities do not change a sum in double precision
_BETTER = 1e-12  # least improvement, as a share of the largest bias; smaller ones may be rounding
_SINGULAR = 1e6  # averages over so many times the greatest one of an action are rounding; others are below 3 times


@dataclass(frozen=True, eq=False)
class Closure:
    """A model with the quadratic of its tail subtracted.

    Attributes:
        model: the model.
        action: b, the size launched at every queue length beyond s_max.
        lost_time: kappa(a), s; (B_max + 1,).
        charges: f(a) for each accumulated quantity; (B_max + 1, 3).
    """

    model: Model
    action: int
    lost_time: Floats
    charges: Floats


def close(model: Model, action: int) -> Closure:
    """Return the closure with the tail action `action`, whose drain must be positive."""
    drain = model.drain
    alpha, beta = _quadratic(model, action)
    per_drain = model.sojourn_time[action] / drain[action]
    charges = (
        model.charges
        + np.outer(model.half_second_moment, HOLDING)
        + np.outer(model.squared_move, alpha)
        - np.outer(drain, beta)
    )
    lost_time = model.sojourn_time - drain * per_drain
    lost_time[action], charges[action] = 0.0, 0.0  # exact values; rounding errors would be divided by 1 - rho
    return Closure(model, action, lost_time, charges)


def best_tail(model: Model, weights: Floats) -> int:
    """Return b*, the size of the largest throughput; of several, the one with the smallest quadratic.

    If l is proportional to b, all sizes tie in the throughput, hence in alpha and in the part of beta that the gain
    multiplies. The rest of beta then decides; a wrong choice needs thousands of additional states at high load.

    Args:
        model: a model with a load below 1.
        weights: weights of the accumulated quantities, (3,).
    """
    tied = np.flatnonzero(model.throughput >= model.capacity * (1.0 - _TIE))
    return int(min(tied, key=lambda b: float(_quadratic(model, int(b))[1] @ weights)))


def _quadratic(model: Model, action: int) -> tuple[Floats, Floats]:
    """Return (alpha, beta_0) for each accumulated quantity; (3,) each."""
    drain = model.drain[action]
    alpha = HOLDING * (model.sojourn_time[action] / (2.0 * model.arrival_rate * drain))
    charge = model.charges[action] + HOLDING * model.half_second_moment[action]
    return alpha, np.asarray((charge + alpha * model.squared_move[action]) / drain)


@dataclass(frozen=True, eq=False)
class PolicyValue:
    """The value of a policy.

    Attributes:
        bias: e(0..length - 1) for each accumulated quantity; (length, 3).
        average: averages per unit time: response time (s), power (W), launches (1/s); (3,).
    """

    bias: Floats
    average: Floats


@dataclass(frozen=True, eq=False)
class ShortModel:
    """The closed model on queue lengths 0..length, with e(s) = 0 from `length` on.

    A step of policy iteration is a gather, a linear solve and a matrix product.

    Attributes:
        closure: the model and its tail.
        length: s_max.
    """

    closure: Closure
    length: int

    @cached_property
    def states(self) -> Ints:
        """0..length."""
        return np.arange(self.length + 1)

    def extend(self, policy: Ints) -> Ints:
        """Return the policy on exactly these states, padded with the action of the tail."""
        missing = len(self.states) - len(policy)
        if missing <= 0:
            return policy[: len(self.states)]
        return np.concatenate([policy, np.full(missing, self.closure.action)])

    def resume(self, policy: Ints, value: PolicyValue, weights: Floats) -> Ints:
        """Extend the policy of a shorter model to these queue lengths and improve it once."""
        bias = np.concatenate([value.bias, np.zeros((self.length - len(value.bias), value.bias.shape[1]))])
        return self.improve(self.extend(policy), PolicyValue(bias, value.average), weights)

    def value_of(self, policy: Ints, mixed: tuple[float, Ints] | None = None) -> PolicyValue:
        """Return bias and average of every accumulated quantity under a policy, by one linear solve.

        The unknowns are e(s) - e(0) and, in place of state 0, the averages. Fixing e(length) = 0 instead gives an
        equivalent system, but such a long queue is so rare that elimination loses all digits from B_max = 128 on.

        Args:
            policy: action for each state, (length + 1,).
            mixed: probability, at each decision epoch, of acting by a second policy, and that policy, (length + 1,).

        Raises:
            LinAlgError: the policy has no single average, so that the system is singular.
        """
        transitions, lost_time, charges = self._rows(policy)
        if mixed is not None:
            probability, other = mixed
            blended = zip((transitions, lost_time, charges), self._rows(other), strict=True)
            transitions, lost_time, charges = ((1.0 - probability) * x + probability * y for x, y in blended)
        matrix = np.eye(len(policy))
        matrix[:, :-1] -= transitions
        matrix[:, -1] -= 1.0 - transitions.sum(axis=1)  # all longer queues have the value e(length)
        matrix[:, 0] = lost_time
        accumulated = charges + self._holding * lost_time[:, None]
        solved = np.linalg.solve(matrix, accumulated)
        average = solved[0].copy()
        lasts = lost_time > 0.0
        if not abs(average).max() < _SINGULAR * (accumulated[lasts] / lost_time[lasts, None]).max():
            raise np.linalg.LinAlgError("singular, which LAPACK does not see on every processor")
        solved[0] = 0.0
        return PolicyValue(solved[:-1] - solved[-1], average)

    def _rows(self, policy: Ints) -> tuple[Floats, Floats, Floats]:
        """Return transition probabilities (length + 1, length), kappa and f by state."""
        shifted = self._shifted_arrivals
        starts = policy * (shifted.shape[1] + 1)  # one row down and, for s - a, one to the right, per request
        return (
            self._windows[self.length + 1 - self.states + starts],
            self.closure.lost_time[policy],
            self.closure.charges[policy],
        )

    def improve(self, policy: Ints, value: PolicyValue, weights: Floats) -> Ints:
        """Improve the policy in every state with a better action, equation (17); (length + 1,).

        Args:
            policy: the current actions, (length + 1,).
            value: their value by `value_of`.
            weights: weights of the accumulated quantities, (3,).
        """
        bias, gain = value.bias @ weights, value.average @ weights
        counts = self._likely.shape[1]
        padded = np.concatenate([bias, np.zeros(counts)])
        windows = np.ndarray((len(bias) + 1, counts), buffer=padded, strides=2 * padded.strides)
        after = self._likely @ np.ascontiguousarray(windows).T
        # entry (a, s) is after[a, s - a]; those with s < a are made infinite by `_infeasible`
        by_state = np.ndarray(after.shape, buffer=after, strides=(after.strides[0] - after.itemsize, after.itemsize))
        cost = by_state + self._infeasible
        cost += (self.closure.charges @ weights)[:, None]
        cost += self.closure.lost_time[:, None] * (self._holding @ weights - gain)
        best = cost.argmin(axis=0)
        gained = cost[policy, self.states] - cost[best, self.states]
        # keep the current action in a tie, or rounding could make the iteration cycle
        return np.where(gained > _BETTER * np.abs(bias).max(), best, policy)

    @cached_property
    def _arrivals(self) -> Floats:
        return self.closure.model.arrival_probabilities(self.length)

    @cached_property
    def _likely(self) -> Floats:
        """The columns of `_arrivals` up to the last that is not negligible for every action."""
        return self._arrivals[:, : int(np.flatnonzero(self._arrivals.max(axis=0) > _NEGLIGIBLE)[-1]) + 1]

    @cached_property
    def _shifted_arrivals(self) -> Floats:
        """p_k at column length + k, and 0 for k < 0: a row of the transition matrix is a window of it."""
        return np.hstack([np.zeros((len(self._arrivals), self.length + 1)), self._arrivals])

    @cached_property
    def _windows(self) -> Floats:
        """Windows of `length` consecutive entries of the flattened `_shifted_arrivals`, by first index; a view."""
        flat = self._shifted_arrivals.ravel()
        return np.ndarray((len(flat) - self.length + 1, self.length), buffer=flat, strides=2 * flat.strides)

    @cached_property
    def _holding(self) -> Floats:
        """Holding cost w s / lambda for each state and accumulated quantity; (length + 1, 3)."""
        return np.outer(self.states / self.closure.model.arrival_rate, HOLDING)

    @cached_property
    def _infeasible(self) -> Floats:
        """Infinite where the action launches more than waits, or is not allowed; else 0.

        In the last state only the action of the tail is allowed. With another action, in particular a wait, that state
        and the longer queues of the same value would form a closed class of their own.
        """
        model = self.closure.model
        feasible = (self.states >= model.actions[:, None]) & model.allowed[:, None]
        feasible[:, -1] = model.actions == self.closure.action
        return np.where(feasible, 0.0, inf)
