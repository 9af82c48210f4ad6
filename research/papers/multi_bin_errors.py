"""Bins under wrong predictions: batch times from a confusion matrix, and the edges that are best for it.

With the paper's section 6.2, P(predicted bin j | true bin i) is p_e for the neighbours of i; its figure 10 has the
matrix of a predictor. A batch of bin j is B draws from the mixture of the true bins that are predicted as j, so that

    E[t_service,k] = sum over j of P(predicted j) E[max of B draws from the mixture of j]        (equation 2)
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from research.papers.multi_bin_theory import Uniform

_Floats = NDArray[np.float64]
_GRID = 2001  # sizes at which distribution functions are computed
_GROUPS = 64  # of predictions, by probability and by value, between which edges are searched


def neighbour_errors(bins: int, error: float) -> _Floats:
    """Section 6.2: P(predicted j | true i), [i, j]; each neighbour has the probability `error`."""
    confusion = np.zeros((bins, bins))
    for i in range(bins):
        for j in (i - 1, i + 1):
            if 0 <= j < bins:
                confusion[i, j] = error
        confusion[i, i] = 1.0 - confusion[i].sum()
    return confusion


def confused_batch_time(sizes: Uniform, edges: Sequence[float], confusion: _Floats, batch_size: int) -> float:
    """E[t_service,k] for uniform sizes whose bins are predicted with this confusion matrix, s."""
    grid = np.linspace(sizes.low, sizes.high, _GRID)
    bounds = np.array([sizes.low, *edges, sizes.high])
    shares = np.diff(bounds) / (sizes.high - sizes.low)
    below = [np.clip((grid - low) / max(high - low, 1e-12), 0.0, 1.0) for low, high in pairwise(bounds.tolist())]
    joint = confusion * shares[:, None]
    total = 0.0
    for share, column in zip(joint.sum(axis=0), joint.T, strict=True):
        if share > 0.0:
            mixture = column @ np.array(below) / share
            total += float(share) * (sizes.low + float(np.trapezoid(1.0 - mixture**batch_size, grid)))
    return total


def edges_under_errors(sizes: Uniform, confusion: _Floats, batch_size: int) -> tuple[float, ...]:
    """The edges that minimise the time of a batch under this confusion; a local search from equal probability."""
    bins = len(confusion)

    def time(edges: _Floats) -> float:
        bounded = np.sort(np.clip(edges, sizes.low, sizes.high))
        return confused_batch_time(sizes, bounded.tolist(), confusion, batch_size)

    start = np.array(sizes.edges(bins))
    options = {"maxiter": 400 * bins, "xatol": 1e-4, "fatol": 1e-6, "initial_simplex": _simplex(start, sizes)}
    found = minimize(time, start, method="Nelder-Mead", options=options)
    return tuple(np.sort(np.clip(found.x, sizes.low, sizes.high)).tolist())


def _simplex(start: _Floats, sizes: Uniform) -> _Floats:
    step = 0.15 * (sizes.high - sizes.low)
    return np.vstack([start, start + step * np.eye(len(start))])


def edges_of_predictions(predicted: _Floats, sizes: _Floats, bins: int, batch_size: int) -> tuple[float, ...]:
    """The edges between predicted sizes that minimise the time of a batch, by dynamic programming.

    Args:
        predicted: the prediction of each request, in any unit.
        sizes: the true sizes.
        bins: K, at least 1.
        batch_size: B.

    Returns:
        K - 1 edges in the unit of the predictions, fewer where the predictions are of fewer values.
    """
    shares = np.arange(1, _GROUPS) / _GROUPS
    by_share = np.quantile(predicted, shares, method="higher")
    cuts = np.unique([*by_share, *(predicted.min() + np.ptp(predicted) * shares)])
    starts = np.concatenate([[-np.inf], cuts])
    order = np.argsort(predicted, kind="stable")
    ranked, ends = sizes[order], np.searchsorted(predicted[order], [*cuts, np.inf], side="left")
    first = np.concatenate([[0], ends[:-1]])
    groups = len(starts)
    costs = np.full((groups, groups + 1), np.inf)
    for i in range(groups):
        for j in range(i, groups):
            members = ranked[first[i] : ends[j]]
            costs[i, j + 1] = len(members) * _longest(members, batch_size)
    least, choices = costs[0], []
    for _ in range(min(bins, groups) - 1):  # a split never costs more: x^B is convex
        sums = least[:groups, None] + costs
        choices.append(sums.argmin(axis=0))
        least = sums.min(axis=0)
    edges, end = [], groups
    for choice in reversed(choices):
        end = int(choice[end])
        edges.append(float(starts[end]))
    return tuple(reversed(edges))


def _longest(members: _Floats, batch_size: int) -> float:
    """E[max of B draws from these sizes]; 0 without any."""
    if not len(members):
        return 0.0
    ordered = np.sort(members)
    return float(np.diff((np.arange(len(ordered) + 1) / len(ordered)) ** batch_size) @ ordered)
