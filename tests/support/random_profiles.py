"""Hypothesis strategies for profiles."""

from hypothesis import strategies as st

from policies.profile import Profile


@st.composite
def profiles(draw: st.DrawFn, fewest: int = 1, shortest: float = 1e-4, cheapest: float = 0.0) -> Profile:
    """Draw a profile of up to six sizes, monotone or not: times up to 10 ms, energies up to 1 J."""
    sizes = draw(st.integers(fewest, 6))
    times = draw(st.lists(st.floats(shortest, 1e-2), min_size=sizes, max_size=sizes))
    joules = draw(st.lists(st.floats(cheapest, 1.0), min_size=sizes, max_size=sizes))
    return Profile("drawn", tuple(times), energies=tuple(joules))
