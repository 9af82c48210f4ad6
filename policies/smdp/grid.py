"""Service times on a grid of instants, and the arrivals until each of them."""

import numpy as np
from scipy.stats import poisson

from policies.smdp.distributions import Floats


def on_grid(grid: Floats, times: Floats) -> Floats:
    """Divide each time between the two neighbouring instants so that the mean is kept.

    Args:
        grid: equally spaced instants, s, ascending; at least one.
        times: within the grid, s, (times,).

    Returns:
        Weights, (times, instants), which sum to 1.
    """
    weights = np.zeros((len(times), len(grid)))
    if len(grid) == 1:
        return weights + 1.0
    place = np.clip((times - grid[0]) / (grid[1] - grid[0]), 0.0, len(grid) - 1.0)
    below = np.minimum(place.astype(int), len(grid) - 2)
    rows = np.arange(len(times))
    weights[rows, below] = below + 1 - place
    weights[rows, below + 1] = place - below
    return weights


def arrival_matrix(mean: float, limit: int) -> Floats:
    """Probabilities from the queue before to the queue after Poisson arrivals, (limit + 1, limit + 1).

    Args:
        mean: mean number of arrivals.
        limit: longest queue; arrivals beyond it are lost.
    """
    masses = poisson.pmf(np.arange(limit + 1), mean)
    matrix = np.zeros((limit + 1, limit + 1))
    for before in range(limit + 1):
        matrix[before, before:] = masses[: limit + 1 - before]
        matrix[before, limit] += max(0.0, 1.0 - matrix[before].sum())
    return matrix
