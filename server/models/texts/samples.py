"""Inputs and outputs of text models. Without torch."""

from collections.abc import Sequence
from dataclasses import dataclass

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


class DecodeState:
    """State of a sample between two decode steps; opaque outside the backend."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Output of a generative model: token ids, including the end token."""

    tokens: Sequence[int]
