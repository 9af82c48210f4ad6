"""The distribution of the response time under a table of batch sizes, without simulation, for deterministic services.

Source: this project's own derivation; research/papers.md, section "Beyond the papers". Symbols as in model.py.

A request is at place j of n waiting at a decision, and R(n, j) is its remaining time. With a = pi(n),

    launch:  R(n, j) = l(a) if j <= a, else l(a) + R(n - a + k, j - a) with probability p_k^[a]
    wait:    R(n, j) = exponential(lambda) + R(n + 1, j).

It ends, since j falls or n rises. A mix of two tables is the mean of both. By PASTA an arrival meets a wait with n
requests, and is at place n + 1 of n + 1, or a service of a requests that leaves r behind, with a remaining time v that
is uniform on (0, l(a)). With m arrivals before and k after it in that service, it is at place j = r + m + 1 of j + k:

    P(T <= t) = P(wait n) P(R(n + 1, n + 1) <= t)
                + sum of lambda f(a, r) Poisson(m; lambda (l(a) - v)) Poisson(k; lambda v) P(v + R(j + k, j) <= t)

with f(a, r) such services per arrival, summed over n, a, r, m, k and integrated over v.

Distributions are masses on a grid of times. A shift by l(a) or v splits each mass between two neighbouring times, and
so does the exponential, with the mean preserved, so that the error is of second order in the step. Between nodes of v
the other factors of the integral are linear. P(T > t) jumps at l(a), if a request starts a batch of a by its arrival.
These atoms are kept apart and are exact.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil

import numpy as np
import scipy

from policies.percentile.age_model import later_weight
from policies.solver.distributions import DETERMINISTIC, Floats, Ints
from policies.solver.model import LARGEST_LOAD, Model, Problem, build_model, check_actions, is_within_largest_load
from policies.types import Mix, SpecError

_REACH = 14.0  # queues are cut where their probability has fallen by about exp(-14)
_MOST = 200  # queue lengths beyond the table and B_max, at most
_LARGEST = 128  # B_max
_STEPS = 1000  # of the grid of times; fewer if the queues are long
_WORK = 100_000  # steps of the grid times queue lengths, about
_NEGLIGIBLE = 1e-14  # services with a smaller share of the decisions are neglected
_LEFT = 1e-4  # probability of a response time beyond the grid, at most
_ARRIVALS = 0.3  # mean arrivals between two nodes of the remaining time v, at most


@dataclass(frozen=True, eq=False)
class ResponseLaw:
    """The distribution of the response time under a table of batch sizes.

    Attributes:
        model: the system.
        launches: pairs of a probability and the actions of a table for queue lengths 0, 1, ..., length.
    """

    model: Model
    launches: tuple[tuple[float, Ints], ...]

    @property
    def length(self) -> int:
        """The longest queue that is considered; longer ones count as this one."""
        return len(self.launches[0][1]) - 1

    def late(self, times: Sequence[float]) -> Floats:
        """Return P(T > t) for each t > 0, s; the absolute error is below 5e-4."""
        step, within = self._distribution
        instants, atoms = self._atoms
        middles = np.concatenate([[0.0], step * (np.arange(len(within)) + 0.5)])
        continuous = np.interp(times, middles, np.concatenate([[0.0], within]))
        jumps = (instants <= np.array(times)[:, None] * (1.0 + 1e-12)) @ atoms
        return np.asarray(np.clip(1.0 - continuous - jumps, 0.0, 1.0))

    def percentile(self, share: float) -> float:
        """Return the response time within which this share of the requests is answered, s; infinite beyond 0.9999."""
        step, within = self._distribution
        times = np.unique(np.concatenate([step * (np.arange(len(within)) + 0.5), self._atoms[0]]))
        late = self.late(times.tolist())
        index = int(np.argmax(late <= 1.0 - share))
        if late[index] > 1.0 - share:
            return float("inf")
        if index == 0 or times[index] in self._atoms[0]:
            return float(times[index])
        part = (late[index - 1] - (1.0 - share)) / (late[index - 1] - late[index])
        return float(times[index - 1] + part * (times[index] - times[index - 1]))

    @cached_property
    def _distribution(self) -> tuple[float, Floats]:
        """The step of the grid, s, and P(T <= t) without the atoms, for t halfway from each time to the next."""
        longest = float(self.model.service_times[-1])
        end = 4.0 * (longest + self.model.max_batch_size / self.model.arrival_rate)
        growing, before = True, -1.0
        while True:
            steps = int(np.clip(_WORK // self.length, _STEPS // 4, _STEPS))
            step, within = end / steps, self._within(end / steps, steps)
            reached = np.flatnonzero(within >= within[-1] - _LEFT / 2.0)[0]
            beyond = 1.0 - float(within[-1] + self._atoms[1].sum())
            gained, before = float(within[-1]) - before, float(within[-1])
            # beyond the longest queue there is probability that no time reaches
            growing = growing and beyond > _LEFT and gained > _LEFT / 10.0 and end < 1e3 * longest
            if growing:
                end *= 2.0
            elif end > longest and reached < steps // 3:
                end = max(1.2 * end * float(reached) / steps, longest)
            else:
                return step, within

    def _within(self, step: float, steps: int) -> Floats:
        """Return the cumulated masses of the response time without the atoms at 0, 1, ... steps of the grid."""
        waits, before, nodes = self._arrivals
        started = self._started
        after = _poisson(self.model.arrival_rate * nodes.remaining, self.length + 1)
        total, ends = np.zeros(steps), np.zeros((len(nodes.remaining), steps))
        recent: deque[Floats] = deque(maxlen=self.model.max_batch_size)  # R(., j - 1), R(., j - 2), ...
        for j in range(1, self.length + 1):
            recent.appendleft(self._remaining_time(j, recent, step, steps))
            follows = recent[0][j:]
            weights = after[:, : len(follows)].copy()
            weights[:, -1] += np.maximum(1.0 - weights.sum(axis=1), 0.0)
            ends += before[:, j - 1, None] * (weights @ follows)
            total += waits[j - 1] * recent[0][j]
            for probability, a in started.get(j, []):
                total -= waits[j - 1] * probability * _shifted(np.ones(steps), self.model.service_times[a - 1] / step)
        kernel = nodes.kernel(step, steps)
        transformed = (np.fft.rfft(ends, 2 * steps) * np.fft.rfft(kernel, 2 * steps)).sum(axis=0)
        return np.asarray(total + np.fft.irfft(transformed, 2 * steps)[:steps])

    def _remaining_time(self, j: int, recent: Sequence[Floats], step: float, steps: int) -> Floats:
        """Return the cumulated masses of R(n, j) for n = 0..length; (length + 1, steps)."""
        model, found = self.model, np.zeros((self.length + 1, steps))
        for probability, actions in self.launches:
            for a in np.unique(actions[j:]).tolist():
                rows = j + np.flatnonzero(actions[j:] == a)
                if a >= j:
                    found[rows] += probability * _shifted(np.ones(steps), model.service_times[a - 1] / step)
                elif a:
                    after = self._moves[a][rows] @ recent[a - 1]
                    found[rows] += probability * _shifted(after, model.service_times[a - 1] / step)
        waiting = sum(p * (actions == 0) for p, actions in self.launches)
        arrivals = np.array([model.arrival_rate * step])
        stay = np.exp(-arrivals)
        later = later_weight(arrivals, stay)
        falling, rising = [1.0, -float(stay[0])], [float(1.0 - stay[0] - later[0]), float(later[0])]
        for n in (j + np.flatnonzero(np.asarray(waiting)[j:-1]))[::-1].tolist():
            found[n] += waiting[n] * scipy.signal.lfilter(rising, falling, found[n + 1])
        return found

    @cached_property
    def _moves(self) -> dict[int, Floats]:
        """By action, the probabilities of the next queue length after a launch; (length + 1, length + 1)."""
        size = self.length + 1
        probabilities = self.model.arrival_probabilities(size)
        moves = {}
        for a in sorted({int(a) for _, actions in self.launches for a in actions}):
            matrix = np.zeros((size, size))
            for n in range(a, size):
                left = n - a if a else n
                matrix[n, left:] = probabilities[a, : size - left]
            matrix[:, -1] += np.maximum(1.0 - matrix.sum(axis=1), 0.0)
            moves[a] = matrix
        return moves

    @cached_property
    def _visits(self) -> list[Floats]:
        """By table, the share of decisions with each queue length that this table takes."""
        size = self.length + 1
        transitions = np.zeros((size, size))
        for probability, actions in self.launches:
            for a, matrix in self._moves.items():
                rows = actions == a
                transitions[rows] += probability * matrix[rows]
        equations = transitions.T - np.eye(size)
        equations[-1] = 1.0
        visits = np.linalg.solve(equations, np.eye(size)[-1])
        return [probability * visits for probability, _ in self.launches]

    @cached_property
    def _started(self) -> dict[int, list[tuple[float, int]]]:
        """The batches that a request starts by its arrival as the n-th: pairs of probability and size, by n."""
        found: dict[int, list[tuple[float, int]]] = {}
        for probability, actions in self.launches:
            for n in np.flatnonzero(actions[1:] >= np.arange(1, self.length + 1)) + 1:
                found.setdefault(int(n), []).append((probability, int(actions[n])))
        return found

    @cached_property
    def _atoms(self) -> tuple[Floats, Floats]:
        """The response times of requests that start a batch by their arrival, s, and their probabilities."""
        waits, atoms = self._arrivals[0], np.zeros(self.model.max_batch_size)
        for n, batches in self._started.items():
            for probability, a in batches:
                atoms[a - 1] += probability * waits[n - 1]
        return self.model.service_times[atoms > 0.0], atoms[atoms > 0.0]

    @cached_property
    def _arrivals(self) -> tuple[Floats, Floats, "_Nodes"]:
        """What an arrival meets.

        Returns the probability of a wait with j - 1 requests; for each node of the remaining time v the density of
        place j in the queue at the end of the service, (nodes, length); and the nodes.
        """
        model, length, rate = self.model, self.length, self.model.arrival_rate
        waits, services = np.zeros(length), np.zeros((model.max_batch_size + 1, length))
        arrivals = 0.0
        for visits, (_, actions) in zip(self._visits, self.launches, strict=True):
            arrivals += rate * float(visits @ model.sojourn_time[actions])
            idle = np.flatnonzero(actions[:-1] == 0)
            waits[idle] += visits[idle]
            launching = np.flatnonzero(actions)
            np.add.at(services, (actions[launching], launching - actions[launching]), visits[launching])
        used = np.flatnonzero(services.sum(axis=1))
        nodes = _nodes(np.unique(np.concatenate([[0.0], model.service_times[used - 1]])), rate)
        before = np.zeros((len(nodes.remaining), length))
        for a in used.tolist():
            duration = model.service_times[a - 1]
            inside = nodes.upper <= duration * (1.0 + 1e-12)
            poisson = _poisson(rate * np.maximum(duration - nodes.remaining[inside], 0.0), length)
            for r in np.flatnonzero(services[a] > _NEGLIGIBLE).tolist():
                before[inside, r:] += services[a, r] * poisson[:, : length - r]
        return waits / arrivals, before * rate / arrivals, nodes


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Nodes of the remaining service time v, in panels between which the integrand may jump.

    Attributes:
        remaining: v, s; ascending, with both ends of each panel.
        upper: the upper end of the node's panel, s.
    """

    remaining: Floats
    upper: Floats

    def kernel(self, step: float, steps: int) -> Floats:
        """Return the integral over v of each node's hat function times the shift by v, on the grid; (nodes, steps)."""
        kernel = np.zeros((len(self.remaining), steps))
        for node in np.flatnonzero(self.upper[:-1] == self.upper[1:]).tolist():
            low, high = float(self.remaining[node]), float(self.remaining[node + 1])
            points = ceil(2.0 * (high - low) / step)
            part = (np.arange(points) + 0.5) / points
            whole = ((low + part * (high - low)) / step).astype(np.intp)
            split = (low + part * (high - low)) / step - whole
            kept = whole + 1 < steps
            for hat, basis in ((node, 1.0 - part), (node + 1, part)):
                for offset, share in ((0, 1.0 - split), (1, split)):
                    mass = basis * share * (high - low) / points
                    np.add.at(kernel[hat], whole[kept] + offset, mass[kept])
        return kernel


def _nodes(edges: Floats, rate: float) -> _Nodes:
    """Return nodes on the panels between these edges, s."""
    panels = [
        np.linspace(low, high, ceil(rate * (high - low) / _ARRIVALS) + 1) for low, high in pairwise(edges.tolist())
    ]
    upper = [np.full(len(panel), panel[-1]) for panel in panels]
    return _Nodes(np.concatenate(panels), np.concatenate(upper))


def response_law(problem: Problem, batch_size: Sequence[int], mix: Mix | None = None) -> ResponseLaw:
    """Return the distribution of the response time under a stable table of batch sizes, or a mix of two.

    Args:
        problem: the system; its service times must be deterministic.
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.
        mix: the second table of a randomised policy.

    Raises:
        SpecError: the service times are random, the table is invalid, or the problem is malformed.
    """
    if not has_response_law(problem):
        raise SpecError(
            f"percentiles are computed only for deterministic service times, batches up to {_LARGEST} and loads up to "
            f"{LARGEST_LOAD}; add --simulate N"
        )
    model = build_model(problem)
    tables = (
        [(1.0, batch_size)] if mix is None else [(1.0 - mix.probability, batch_size), (mix.probability, mix.batch_size)]
    )
    for _, table in tables:
        check_actions(table, model.min_batch_size, model.max_batch_size)
    tail = int(batch_size[-1])
    falls = 2.0 * float(model.drain[tail]) / float(model.arrivals_variance[tail])
    longest = max(len(table) for _, table in tables if len(table)) + min(ceil(_REACH / max(falls, 1e-6)), _MOST)
    lengths = range(longest + 1)
    return ResponseLaw(
        model,
        tuple((p, np.array([table[min(n, len(table) - 1)] for n in lengths], dtype=np.intp)) for p, table in tables),
    )


def has_response_law(problem: Problem) -> bool:
    """Return whether the service times are deterministic, batches and load not so large that queues have to be cut."""
    small = problem.truncated_profile.max_batch_size <= _LARGEST and is_within_largest_load(problem)
    return problem.service == DETERMINISTIC and small


def _poisson(means: Floats, counts: int) -> Floats:
    """Return Poisson probabilities of 0..counts - 1 for each mean; (means, counts)."""
    k = np.arange(counts)
    mean = np.maximum(means, 1e-300)[:, None]
    return np.asarray(np.exp(k * np.log(mean) - mean - scipy.special.gammaln(k + 1.0)))


def _shifted(within: Floats, by: float) -> Floats:
    """Shift cumulated masses, along the last axis, by a number of steps; each mass is split between two times."""
    whole = int(by)
    part = by - whole
    shifted = np.zeros_like(within)
    if whole < within.shape[-1]:
        shifted[..., whole:] = (1.0 - part) * within[..., : within.shape[-1] - whole]
    if whole + 1 < within.shape[-1]:
        shifted[..., whole + 1 :] += part * within[..., : within.shape[-1] - whole - 1]
    return shifted
