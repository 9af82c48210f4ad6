"""Priority levels of the requests of a run, and the header that names them to the server."""

from collections.abc import Sequence
from math import isclose

import numpy as np

from policies.types import SpecError

LEVELS_USAGE = "S1,S2,...: share of each priority level in the requests, the first level first, of two to four levels"
_MOST = 4  # that the header can name: it has three values before the default


def draw_levels(text: str, requests: int, seed: int) -> list[tuple[int, str]]:
    """Draw the level of each request, independently, with the value of the header; level 1 is the first.

    Raises:
        SpecError: the shares are malformed.
    """
    shares = _parse(text)
    headers = [_urgency(level, len(shares)) for level in range(1, len(shares) + 1)]
    drawn = np.random.default_rng([seed, 8]).random(requests)
    places: list[int] = np.searchsorted(np.cumsum(shares)[:-1], drawn, side="right").tolist()
    return [(place + 1, headers[place]) for place in places]


def _urgency(level: int, levels: int) -> str:
    """The value of the header Priority (RFC 9218) for a level: the server's level is 1 + floor(u (levels - 1) / 3)."""
    return "u=7" if level == levels else f"u={-(-3 * (level - 1) // (levels - 1))}"


def _parse(text: str) -> Sequence[float]:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    valid = 2 <= len(shares) <= _MOST and all(share > 0.0 for share in shares)
    if not valid or not isclose(sum(shares), 1.0, rel_tol=1e-6):
        raise SpecError(f"--levels {text}: give 2 to {_MOST} numbers above 0 that sum to 1, such as 0.2,0.8")
    return shares
