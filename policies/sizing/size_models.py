"""How long a request will take when served alone, predicted from what is known of it when it arrives.

Multi-Bin Batching asks for it before a request is given its bin (Algorithm 1, line 2). `Oracle` and `Affine` go by the
limit, which is right where so many tokens are forced; `Online` and `Learned` predict how many will be generated from
how many were: the one by the prompt's length, the other by its tokens, with the L1 loss of appendix C.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import copysign, expm1, log1p, sqrt
from typing import Protocol

import numpy as np

from policies.profile import Profile

_MEMORY = 256  # requests: later ones count as one in so many, so that what is learned follows what changes
_FEATURES = 1024  # of a prompt: its tokens fall into so many classes
_READ = 64  # tokens of a prompt: thousands of prompts come in one call
_STEP = 0.5  # at a weight's first error, in the logarithm of a length


@dataclass(frozen=True, slots=True)
class Lengths:
    """What is known of a request before it runs.

    Attributes:
        prompt: tokens, or time steps, that go in.
        limit: at most so many are generated; 0: nothing is.
        tokens: the prompt itself, for who learns from it.
    """

    prompt: int
    limit: int = 0
    tokens: Sequence[int] = ()


class Estimator(Protocol):
    """Predicts service times, and may learn from what came of its requests."""

    def size(self, lengths: Lengths) -> float:
        """Predicted service time when served alone, s."""
        ...

    def observe(self, lengths: Lengths, generated: int) -> None:
        """A request is done: so many tokens were generated."""
        ...


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows: as many tokens are generated as the limit says, and the profile has measured how long that takes.

    Attributes:
        profile: with lengths.
    """

    profile: Profile

    def size(self, lengths: Lengths) -> float:
        """By the profile, at the limit; at the prompt's length where nothing is generated."""
        return self.profile.service_time(1, lengths.limit or lengths.prompt)

    def observe(self, lengths: Lengths, generated: int) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True)
class Affine:
    """A service time affine in the lengths, as fitted to a profiler's measurements; goes by the limit.

    Attributes:
        intercept: s.
        per_prompt: s a token of the prompt.
        per_generated: s a token generated.
    """

    intercept: float
    per_prompt: float = 0.0
    per_generated: float = 0.0

    def at(self, prompt: int, generated: float) -> float:
        """Service time alone, s, for these lengths."""
        return self.intercept + self.per_prompt * prompt + self.per_generated * generated

    def size(self, lengths: Lengths) -> float:
        """As if so many were generated as the limit allows."""
        return self.at(lengths.prompt, lengths.limit)

    def observe(self, lengths: Lengths, generated: int) -> None:
        """Nothing to learn: the profiler fits it."""


def fit_lengths(lengths: Sequence[tuple[int, int]], times: Sequence[float]) -> Affine:
    """The affine service time nearest to measurements of requests alone, by least squares of the relative error.

    What did not vary gets no coefficient.

    Args:
        lengths: tokens of the prompt, and tokens generated; at least one pair.
        times: measured for each, s.
    """
    columns = np.array(lengths, dtype=np.float64)
    varied = np.ptp(columns, axis=0) > 0
    y = np.asarray(times, dtype=np.float64)
    design = np.column_stack([np.ones(len(y)), columns[:, varied]]) / y[:, None]
    found = np.zeros(3)
    found[[True, *varied]] = np.linalg.lstsq(design, np.ones(len(y)), rcond=None)[0]
    return Affine(*found.tolist())


class Online:
    """Expects as many tokens as prompts of about that length had in the mean: within a factor of two."""

    def __init__(self, times: Affine) -> None:
        """`times` says how long lengths take."""
        self._times = times
        self._means: dict[int, tuple[int, float]] = {}  # by class of the prompt: how many, and their mean

    def size(self, lengths: Lengths) -> float:
        """The limit bounds what is expected, and stands for it where nothing was seen."""
        return self._times.at(lengths.prompt, self.expected(lengths))

    def expected(self, lengths: Lengths) -> float:
        """How many tokens."""
        _, mean = self._means.get(lengths.prompt.bit_length()) or self._means.get(-1) or (0, float(lengths.limit))
        return min(mean, lengths.limit)

    def observe(self, lengths: Lengths, generated: int) -> None:
        """Move the mean of such prompts, and that of all."""
        for key in (lengths.prompt.bit_length(), -1):
            count, mean = self._means.get(key, (0, 0.0))
            self._means[key] = count + 1, mean + (generated - mean) / min(count + 1, _MEMORY)


class Learned:
    """Expects what a linear model reads from the prompt: which tokens stand in it, and how many.

    Appendix C.1 with a far smaller model than BERT: the loss is L1 too, of the logarithm, whose median is the same;
    each weight goes down the loss in steps that shrink with the errors it had part in (AdaGrad), a request at a time,
    and those of a prompt's tokens together move what is expected as far as one alone. While that was lately no nearer
    than the mean, as where prompts tell nothing, the mean is expected.
    """

    def __init__(self, times: Affine) -> None:
        """`times` says how long lengths take."""
        self._times = times
        self._mean = Online(times)
        self._weights = [0.0] * (_FEATURES + 2)
        self._errors = [0] * (_FEATURES + 2)
        self._seen = 0
        self._gain = 0.0  # how much nearer than the mean, in logarithms

    def size(self, lengths: Lengths) -> float:
        """The limit bounds what is expected, and stands for it where nothing was seen."""
        if self._gain <= 0.0:
            return self._mean.size(lengths)
        expected = expm1(self._read(_features(lengths)))
        return self._times.at(lengths.prompt, min(max(expected, 0.0), lengths.limit))

    def observe(self, lengths: Lengths, generated: int) -> None:
        """A step down the loss; the first request sets the level."""
        features, wanted = _features(lengths), log1p(generated)
        if not self._seen:
            self._weights[-1] = wanted
        self._seen += 1
        error = self._read(features) - wanted
        gain = abs(log1p(self._mean.expected(lengths)) - wanted) - abs(error)
        self._gain += (gain - self._gain) / min(self._seen, _MEMORY)
        self._mean.observe(lengths, generated)
        if not error:
            return
        for index, value in features:
            self._errors[index] += 1
            self._weights[index] -= copysign(_STEP * value / sqrt(self._errors[index]), error)

    def _read(self, features: Sequence[tuple[int, float]]) -> float:
        return sum([self._weights[index] * value for index, value in features])


def _features(lengths: Lengths) -> list[tuple[int, float]]:
    """Which tokens there are, each a share of the root of how many; the prompt's length in octaves; and 1."""
    present = {token % _FEATURES for token in lengths.tokens[:_READ]}
    share = 1.0 / sqrt(max(len(present), 1))
    return [*((token, share) for token in present), (_FEATURES, log1p(lengths.prompt) / 8.0), (_FEATURES + 1, 1.0)]
