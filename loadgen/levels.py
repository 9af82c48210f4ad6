"""Priority levels of the requests of a run, and the header that names them to the server."""

import numpy as np

from policies.rules.by_level import parse_shares

LEVELS_USAGE = "S1,S2,...: share of each priority level in the requests, the first level first, of two to four levels"
_MOST = 4  # that the header can name: it has three values before the default


def parse_levels(text: str) -> tuple[float, ...]:
    """Parse the shares of --levels.

    Raises:
        SpecError: the shares are malformed.
    """
    return parse_shares("--levels", text, 2, _MOST)


def draw_levels(text: str, requests: int, seed: int) -> list[tuple[int, str]]:
    """Draw the level of each request, independently, with the value of the header; level 1 is the first.

    Raises:
        SpecError: the shares are malformed.
    """
    shares = parse_levels(text)
    headers = [_urgency(level, len(shares)) for level in range(1, len(shares) + 1)]
    drawn = np.random.default_rng([seed, 8]).random(requests)
    places: list[int] = np.searchsorted(np.cumsum(shares)[:-1], drawn, side="right").tolist()
    return [(place + 1, headers[place]) for place in places]


def _urgency(level: int, levels: int) -> str:
    """The value of the header Priority (RFC 9218) for a level: the server's level is 1 + floor(u (levels - 1) / 3)."""
    return "u=7" if level == levels else f"u={-(-3 * (level - 1) // (levels - 1))}"
