"""Samples and outputs of text models. Without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.sizing.size_models import Lengths


@dataclass(frozen=True, slots=True)
class Text:
    """One sample.

    Attributes:
        tokens: ids of the prompt, at least one.
        limit: at most so many are generated; 0 where the model generates nothing.
        forced: exactly so many are: the end token does not end it.
    """

    tokens: Sequence[int]
    limit: int = 0
    forced: bool = False

    @property
    def lengths(self) -> Lengths:
        """What is known of it before it runs."""
        return Lengths(len(self.tokens), self.limit, self.tokens)

    @property
    def iterations(self) -> int:
        """Of the model, at most; a stage is an iteration."""
        return max(1, self.limit)


class Unfinished:
    """What stands for a text between two iterations; the device knows what it is."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Generated:
    """A generating model's answer: ids, the end token included."""

    tokens: Sequence[int]


def generated(outputs: Sequence[Any]) -> list[int]:
    """Of each answer among the outputs how many tokens it has."""
    return [len(output.tokens) for output in outputs if isinstance(output, Generated)]


def tokens_of(inputs: Sequence[Any], outputs: Sequence[Any], iterations: int | None) -> tuple[int, int]:
    """How many tokens a batch needs, and how many the device computes: the rest is padding.

    Prompts are padded to the longest; a batch that runs to its end generates as many for each row as for the longest.
    """
    prompts = [len(text.tokens) for text in inputs if isinstance(text, Text)]
    if iterations is None:
        tokens = generated(outputs)
    else:
        tokens = [iterations for output in outputs if isinstance(output, Generated | Unfinished)]
    return sum(map(sum, (prompts, tokens))), sum(len(n) * max(n, default=0) for n in (prompts, tokens))
