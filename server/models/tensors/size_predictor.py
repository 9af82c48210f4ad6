"""Predicted service times of samples of named tensors by their length, which is known at arrival."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from policies.profile import Profile


@dataclass(frozen=True, slots=True)
class LengthPredictor:
    """Predicts the service time of a sample that is served alone.

    Attributes:
        length_of: returns the length of a sample.
        profile: a profile with lengths.
    """

    length_of: Callable[[Any], int]
    profile: Profile

    def predict(self, sample: Any, /) -> float:
        """The profile's service time at the sample's length, s."""
        return self.profile.service_time(1, self.length_of(sample))
