"""The rule of length-aware batching (policies/sizing/length_aware.py)."""

from policies.profile import Profile
from policies.rules.rule import Rule
from policies.sizing.length_aware import LengthAware, length_aware
from policies.spec import Spec


def _build(_: Spec, profile: Profile) -> LengthAware:
    return length_aware(profile)


LENGTH_AWARE = Rule(
    name="length-aware",
    build=_build,
    per_bin=False,
    description="Launches the oldest request with those of similar size, as many as shorten the response times by "
    "sharing a batch, and never waits.",
    example="length-aware",
)
