"""Predictors of the number of generated tokens, and of the service time of a request alone.

Multi-Bin Batching needs the prediction to assign a bin (Algorithm 1, line 2). The server knows the length of a padded
input at arrival (`Profile.time_alone`). `Online` and `Learned` predict from past requests: by the length of the prompt,
or by its tokens with the L1 loss of appendix C.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import copysign, expm1, log1p, sqrt
from typing import Protocol

_MEMORY = 256  # requests: a new one has at least the weight 1 / 256 in a mean, so that it follows changes
_FEATURES = 1024  # hash classes of tokens
_MAX_TOKENS = 64  # of a prompt that are used, since a call may have thousands of prompts
_STEP = 0.5  # first step of a weight, in the logarithm of a length


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a request, known at arrival.

    Attributes:
        prompt: number of tokens, or time steps, of the prompt.
        limit: maximum number of generated tokens; 0 if none are generated.
        tokens: the tokens of the prompt, for `Learned`.
    """

    prompt: int
    limit: int = 0
    tokens: Sequence[int] = ()


class Estimator(Protocol):
    """Predicts service times, and may learn from completed requests."""

    def size(self, lengths: Lengths) -> float:
        """Return the predicted service time alone, s."""
        ...

    def observe(self, lengths: Lengths, generated: int) -> None:
        """Learn from the number of tokens generated for a completed request."""
        ...


@dataclass(frozen=True, slots=True)
class Affine:
    """A service time alone that is affine in the lengths.

    Attributes:
        intercept: s.
        per_prompt: s per token of the prompt.
        per_generated: s per generated token.
    """

    intercept: float
    per_prompt: float = 0.0
    per_generated: float = 0.0

    def at(self, prompt: int, generated: float) -> float:
        """Return the service time alone for these lengths, s."""
        return self.intercept + self.per_prompt * prompt + self.per_generated * generated


class Online:
    """Predicts the mean number of tokens generated for prompts of similar length, within a factor of two."""

    def __init__(self, times: Affine) -> None:
        """Start without observations; `times` converts lengths to service times."""
        self._times = times
        self._means: dict[int, tuple[int, float]] = {}  # count and mean, by octave of the prompt length; -1: all

    def size(self, lengths: Lengths) -> float:
        """Return the predicted service time, s; the limit bounds the prediction and is used before any observation."""
        return self._times.at(lengths.prompt, self.expected(lengths))

    def expected(self, lengths: Lengths) -> float:
        """Return the predicted number of generated tokens, at most the limit."""
        _, mean = self._means.get(lengths.prompt.bit_length()) or self._means.get(-1) or (0, float(lengths.limit))
        return min(mean, lengths.limit)

    def observe(self, lengths: Lengths, generated: int) -> None:
        """Update the mean of prompts of similar length, and that of all prompts."""
        for key in (lengths.prompt.bit_length(), -1):
            count, mean = self._means.get(key, (0, 0.0))
            self._means[key] = count + 1, mean + (generated - mean) / min(count + 1, _MEMORY)


class Learned:
    """Predicts the number of generated tokens by a linear model of the prompt's tokens and length.

    This is appendix C.1 with a far smaller model than BERT. The loss is the L1 loss of the logarithm, which has the
    same minimiser, the median. The weights are trained online by AdaGrad, one request at a time; the weights of a
    prompt's tokens share one step. The mean of `Online` is used instead while the model has recently been no better.
    """

    def __init__(self, times: Affine) -> None:
        """Start without observations; `times` converts lengths to service times."""
        self._times = times
        self._mean = Online(times)
        self._weights = [0.0] * (_FEATURES + 2)
        self._errors = [0] * (_FEATURES + 2)
        self._seen = 0
        self._gain = 0.0  # mean reduction of the absolute log error, compared with `Online`

    def size(self, lengths: Lengths) -> float:
        """Return the predicted service time, s; the limit bounds the prediction and is used before any observation."""
        if self._gain <= 0.0:
            return self._mean.size(lengths)
        expected = expm1(self._predict(_features(lengths)))
        return self._times.at(lengths.prompt, min(max(expected, 0.0), lengths.limit))

    def observe(self, lengths: Lengths, generated: int) -> None:
        """Make one training step; the first request sets the intercept."""
        features, target = _features(lengths), log1p(generated)
        if not self._seen:
            self._weights[-1] = target
        self._seen += 1
        error = self._predict(features) - target
        gain = abs(log1p(self._mean.expected(lengths)) - target) - abs(error)
        self._gain += (gain - self._gain) / min(self._seen, _MEMORY)
        self._mean.observe(lengths, generated)
        if not error:
            return
        for index, value in features:
            self._errors[index] += 1
            self._weights[index] -= copysign(_STEP * value / sqrt(self._errors[index]), error)

    def _predict(self, features: Sequence[tuple[int, float]]) -> float:
        return sum([self._weights[index] * value for index, value in features])


def _features(lengths: Lengths) -> list[tuple[int, float]]:
    """Return indices and values of the features: tokens present, normalised; log length of the prompt; intercept."""
    present = {token % _FEATURES for token in lengths.tokens[:_MAX_TOKENS]}
    share = 1.0 / sqrt(max(len(present), 1))
    return [*((token, share) for token in present), (_FEATURES, log1p(lengths.prompt) / 8.0), (_FEATURES + 1, 1.0)]
