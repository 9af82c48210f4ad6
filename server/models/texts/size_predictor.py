"""Predicted service times of text samples: by their known length, else by a prediction of the generated length."""

from dataclasses import dataclass
from typing import Literal

from policies.profile import Profile
from policies.sizing.size_models import Estimator, Learned, Online, Oracle, fit_lengths
from server.models.texts.samples import GeneratedTokens, TextSample

Guess = Literal["limit", "online", "learned"]


@dataclass(frozen=True, slots=True)
class TextSizePredictor:
    """Predicts the service time of a text sample that is served alone.

    Attributes:
        known_length: used where the number of generated tokens is known.
        unknown_length: used where an end token may end the output; learns from such outputs.
    """

    known_length: Estimator
    unknown_length: Estimator

    def predict(self, sample: TextSample) -> float:
        """The predicted service time, s."""
        return (self.known_length if sample.ignore_eos else self.unknown_length).size(sample.lengths)

    def observe(self, sample: TextSample, output: object) -> None:
        """Learn from a sample that was served."""
        if isinstance(output, GeneratedTokens) and not sample.ignore_eos:
            self.unknown_length.observe(sample.lengths, len(output.tokens))


def make_size_predictor(profile: Profile, generates: bool, guess: str) -> TextSizePredictor:
    """Make a predictor from a profile with lengths.

    Args:
        profile: the profile of the model on its device.
        generates: whether the model generates tokens.
        guess: the prediction of the generated length: "limit" is max_new_tokens; "online" the mean of earlier prompts
            of about the same length; "learned" a regression on the prompt's tokens.
    """
    oracle = Oracle(profile)
    if not generates or guess == "limit":
        return TextSizePredictor(oracle, oracle)
    assert profile.lengths is not None
    assert profile.length_service_times is not None
    times = fit_lengths([(0, length) for length in profile.lengths], profile.length_service_times[0])
    return TextSizePredictor(oracle, Online(times) if guess == "online" else Learned(times))
