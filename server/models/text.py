"""Inputs and outputs of text models, and how many tokens a batch of them has. Without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.sizing.size_models import Lengths


@dataclass(frozen=True, slots=True)
class TextSample:
    """Input of a text model.

    Attributes:
        tokens: token ids of the prompt, at least one.
        max_new_tokens: maximum number of generated tokens; 0 for a classifier.
        ignore_eos: whether exactly `max_new_tokens` are generated: an end token does not end the output.
    """

    tokens: Sequence[int]
    max_new_tokens: int = 0
    ignore_eos: bool = False

    @property
    def lengths(self) -> Lengths:
        """The lengths that are known before the sample runs."""
        return Lengths(len(self.tokens), self.max_new_tokens, self.tokens)

    @property
    def decode_steps(self) -> int:
        """Maximum number of decode steps; each is a stage."""
        return max(1, self.max_new_tokens)


class DecodeState:
    """State of a sample between two decode steps; opaque outside the backend."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Output of a generative model: token ids, including the end token."""

    tokens: Sequence[int]


def generated_lengths(outputs: Sequence[Any]) -> list[int]:
    """The number of tokens of each finished output."""
    return [len(output.tokens) for output in outputs if isinstance(output, GeneratedTokens)]


def count_tokens(inputs: Sequence[Any], outputs: Sequence[Any], decode_steps: int | None) -> tuple[int, int]:
    """The number of tokens that a batch needs, and that the device computes; the difference is padding.

    Prompts are padded to the longest. A batch that runs to its end (`decode_steps` is None) generates as many tokens
    for each row as for the longest.
    """
    prompts = [len(sample.tokens) for sample in inputs if isinstance(sample, TextSample)]
    if decode_steps is None:
        generated = generated_lengths(outputs)
    else:
        generated = [decode_steps for output in outputs if isinstance(output, GeneratedTokens | DecodeState)]
    return sum(map(sum, (prompts, generated))), sum(len(n) * max(n, default=0) for n in (prompts, generated))
