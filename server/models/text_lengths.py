"""How long a text will take alone: by its own length where that is known, else as predicted from the texts before."""

from dataclasses import dataclass
from typing import Literal

from policies.profile import Profile
from policies.sizing.size_models import Estimator, Learned, Online, Oracle, fit_lengths
from server.models.text import Generated, Text

Guess = Literal["limit", "online", "learned"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Predicted service times of one model's texts, served alone.

    Attributes:
        known: for texts whose length is known.
        guess: for those whose end the model decides; learns from them.
    """

    known: Estimator
    guess: Estimator

    def of(self, text: Text) -> float:
        """Of one that arrives, s."""
        return (self.known if text.forced else self.guess).size(text.lengths)

    def observe(self, text: Text, output: object) -> None:
        """A text was answered."""
        if isinstance(output, Generated) and not text.forced:
            self.guess.observe(text.lengths, len(output.tokens))


def sizes_of(profile: Profile, generates: bool, guess: str) -> Sizes:
    """Predict service times by a profile with lengths.

    Args:
        profile: of the model on its device.
        generates: whether the model generates tokens.
        guess: "limit" takes max_new_tokens for what will be generated; "online" goes by the texts of such prompts
            before; "learned" by what stood in them.
    """
    oracle = Oracle(profile)
    if not generates or guess == "limit":
        return Sizes(oracle, oracle)
    assert profile.lengths is not None
    assert profile.length_service_times is not None
    times = fit_lengths([(0, length) for length in profile.lengths], profile.length_service_times[0])
    return Sizes(oracle, Online(times) if guess == "online" else Learned(times))
