"""Texts as the gateway and the dispatcher know them: the sample, its codec, and a tokenizer of bytes. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from policies.sizing.size_models import Lengths
from server.errors import BadInputError

DEFAULT_NEW_TOKENS = 32
_MADE_UP_PROMPT = 16  # tokens
_LETTERS = 16  # characters a token, at most: longer texts are not even tokenized
_ESCAPED = 12  # bytes of JSON a character, at most


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


class Tokenizer(Protocol):
    """From letters to ids and back. Thread-safe."""

    def encode(self, text: str) -> list[int]:
        """Ids, with whatever the model wants around them."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without what is no text."""
        ...


class ByteTokenizer:
    """For models that have none: an id is a byte of UTF-8 plus 3; 0 pads, 1 ends, 2 is not used.

    Attributes:
        vocabulary: how many ids there are.
    """

    vocabulary = 259

    def encode(self, text: str) -> list[int]:
        """One id for each byte."""
        return [byte + 3 for byte in text.encode(errors="replace")]

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes' text; what is no UTF-8 becomes a replacement character."""
        return bytes(token - 3 for token in tokens if 3 <= token < self.vocabulary).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Turns what a client sends into one sample.

    Attributes:
        vocabulary: how many ids the model knows.
        most_tokens: of a prompt.
        most_new_tokens: that a request may ask for; 0: the model classifies.
        pad: the id that fills up what is shorter; -1, which is no token, where the model names none.
        tokenizer: None where the model came without one: then it takes ids only.
    """

    vocabulary: int
    most_tokens: int
    most_new_tokens: int
    pad: int
    tokenizer: Tokenizer | None

    @property
    def generates(self) -> bool:
        """Whether tokens come out, rather than logits."""
        return self.most_new_tokens > 0

    @property
    def longest(self) -> int:
        """The greatest length by which a profile tells service times: tokens in, or out where the model generates."""
        return self.most_new_tokens or self.most_tokens

    @property
    def middle(self) -> int:
        """The length by which a profile tells service times where it does not ask for one."""
        return (self.longest + 1) // 2

    @property
    def ladder(self) -> tuple[int, ...]:
        """The lengths at which a profile is measured, ascending to the longest."""
        powers = (4**n for n in range(16))
        return tuple(sorted({*(n for n in powers if n < self.longest), self.middle, self.longest}))

    @property
    def most_bytes(self) -> int:
        """Of a JSON call that may hold a text within bounds."""
        return _ESCAPED * _LETTERS * self.most_tokens + 1024

    @property
    def made_up_prompt(self) -> int:
        """Tokens of the prompts that a generator is measured with."""
        return min(_MADE_UP_PROMPT, self.most_tokens)

    def bounds(self) -> dict[str, int]:
        """What a client should know, beside shapes."""
        lengths = {"max_tokens": self.most_tokens, "vocabulary": self.vocabulary, "pad_token_id": self.pad}
        return lengths | ({"max_new_tokens": self.most_new_tokens} if self.generates else {})

    def read(self, text: str, limit: int | None = None, forced: bool = False) -> Text:
        """One sample from a text; no limit stands for `DEFAULT_NEW_TOKENS`.

        Raises:
            BadInputError: too long, no token of it, a limit out of bounds, or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise BadInputError("this model came without a tokenizer; send token ids by the Open Inference Protocol")
        if len(text) > _LETTERS * self.most_tokens:
            raise BadInputError(f"the text has {len(text)} characters, over {_LETTERS * self.most_tokens}; shorten it")
        return self.sample(self.tokenizer.encode(text), limit, forced)

    def sample(self, tokens: Sequence[int], limit: int | None = None, forced: bool = False) -> Text:
        """One sample from its ids, without padding.

        Raises:
            BadInputError: as `read`, or an id is none of the vocabulary.
        """
        self._check_length(len(tokens))
        strange = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if strange is not None:
            raise BadInputError(f"token id {strange} is outside the vocabulary; send 0 to {self.vocabulary - 1}")
        return Text(tokens, self._limit(limit), forced)

    def _check_length(self, tokens: int) -> None:
        if not 1 <= tokens <= self.most_tokens:
            raise BadInputError(f"the text has {tokens} tokens; send 1 to {self.most_tokens}")

    def _limit(self, limit: int | None) -> int:
        if not self.generates:
            if limit is not None:
                raise BadInputError(f"max_new_tokens is {limit}, but this model classifies; leave it out")
            return 0
        if limit is None:
            return min(DEFAULT_NEW_TOKENS, self.most_new_tokens)
        if not 1 <= limit <= self.most_new_tokens:
            raise BadInputError(f"max_new_tokens is {limit}; send 1 to {self.most_new_tokens}")
        return limit

    def unpadded(self, row: NDArray[np.int64]) -> list[int]:
        """The ids of one row, int64 [longest], without the padding at its end.

        Raises:
            BadInputError: too many are left, or none.
        """
        kept = np.flatnonzero(row != self.pad)
        count = int(kept[-1]) + 1 if kept.size else 0
        self._check_length(count)
        ids: list[int] = row[:count].tolist()
        return ids

    def padded(self, rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """int64 [n, longest], filled up at the end."""
        ids = np.full((len(rows), max(map(len, rows))), self.pad, np.int64)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = tokens
        return ids

    def words(self, tokens: Sequence[int]) -> str:
        """The text of generated ids, where there is a tokenizer."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(tokens)

    def made_up(self, count: int, length: int, rng: np.random.Generator) -> list[Text]:
        """Random samples of one length, in the sense of `longest`."""
        prompt = self.made_up_prompt if self.generates else length
        ids = rng.integers(0, self.vocabulary, (count, prompt)).tolist()
        return [Text(tokens, length if self.generates else 0, forced=self.generates) for tokens in ids]


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
