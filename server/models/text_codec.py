"""Text models: token ids and JSON texts to samples, generated tokens to answers. Without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from policies.profile import Profile
from server.errors import BadInputError, TooLargeError, quote
from server.json_body import parse_object
from server.models.model import Codec, Inputs
from server.models.signature import Tensor, TensorSpec
from server.models.text import Text
from server.models.text_lengths import Sizes, sizes_of

DEFAULT_NEW_TOKENS = 32
_SYNTHETIC_PROMPT = 16  # tokens
_LETTERS = 16  # characters a token, at most: longer texts are not even tokenized
_ESCAPED = 12  # bytes of JSON a character, at most
_ID_BYTES = 40  # of a token id in a list
_MANY_IDS = 20_000  # reading more takes a millisecond
_IDS, _LIMIT, _FORCED = "input_ids", "max_new_tokens", "ignore_eos"


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


@dataclass(frozen=True)  # slots would break super()
class TextCodec(Codec):
    """Texts as token ids, one text a sample; logits or generated tokens as output.

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

    json_body: ClassVar[str | None] = 'an object with "text"'
    backend: ClassVar[Literal["images", "texts"]] = "texts"

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
    def lengths(self) -> tuple[int, ...]:
        """The lengths at which a profile is measured, ascending to the longest."""
        powers = (4**n for n in range(16))
        return tuple(sorted({*(n for n in powers if n < self.longest), self.middle, self.longest}))

    @property
    def classifies(self) -> bool:
        """Whether outputs are logits."""
        return not self.generates

    @property
    def max_body(self) -> tuple[int, str] | None:
        """Bytes of JSON that a text within the limits can take."""
        return _ESCAPED * _LETTERS * self.most_tokens + 1024, "send a shorter text"

    @property
    def input(self) -> TensorSpec:
        """Token ids padded at the end; for a generator also the limit on generated tokens of each sample."""
        limits = TensorSpec(_LIMIT, {"INT32": (), "INT64": ()})
        beside = (limits,) if self.generates else ()
        # a classifier reads the parameters too, to reject them
        return TensorSpec(_IDS, {"INT64": (-1,), "INT32": (-1,)}, beside, (_LIMIT, _FORCED))

    def output(self, labels: int) -> TensorSpec:
        """Token ids padded at the end, or logits."""
        return TensorSpec("output_ids", {"INT64": (-1,)}) if self.generates else super().output(labels)

    def from_body(self, body: bytes) -> Inputs:
        """The sample of {"text": ..., "max_new_tokens": n, "ignore_eos": false}.

        Raises:
            TooLargeError: the body is larger than a text within the limits can make it.
            BadInputError: it is no such document, or out of bounds.
        """
        most, remedy = self.max_body or (0, "")
        if len(body) > most:
            raise TooLargeError(f"the body has {len(body)} bytes, over {most}; {remedy}")
        document = parse_object(body, "body", 'an object with "text"')
        if type(document.get("text")) is not str:
            raise BadInputError(f'the body is {quote(document)}; send an object with "text"')
        strange = sorted(document.keys() - {"text", _LIMIT, _FORCED})
        if strange:
            raise BadInputError(f"unknown key {strange[0]!r}; send text, {_LIMIT} and {_FORCED}")
        text = self.read(document["text"], *_generation_parameters(document))
        return Inputs(1, lambda: [text])

    def from_tensor(self, tensor: Tensor, beside: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Inputs:
        """The samples of a tensor of token ids.

        Raises:
            BadInputError: one of them is out of bounds, or a parameter is.
        """
        ids = tensor.data
        if not isinstance(ids, np.ndarray):
            raise BadInputError(f"the model takes token ids, not a raw body; send {self.input}")
        limit, forced = _generation_parameters(parameters)
        own = beside.get(_LIMIT)

        def texts() -> list[Text]:
            limits = [limit] * len(ids) if own is None else np.asarray(own.data).tolist()
            return [self.sample(self.unpadded(row), most, forced) for row, most in zip(ids, limits, strict=True)]

        return Inputs(len(ids), texts, memory=_ID_BYTES * ids.size, slow=ids.size > _MANY_IDS)

    def render(self, output: Any, labels: Sequence[str]) -> dict[str, Any]:
        """The generated text, or the most probable classes."""
        if not self.generates:
            return super().render(output, labels)
        return {"text": self.words(output.tokens), "new_tokens": len(output.tokens)}

    def stack(self, outputs: Sequence[Any]) -> NDArray[Any]:
        """int64 [samples, longest] of generated tokens, or float32 [samples, classes] logits."""
        return self.padded([output.tokens for output in outputs]) if self.generates else super().stack(outputs)

    def size_predictor(self, profile: Profile, guess: str) -> Sizes:
        """Predicts service times from lengths; see `sizes_of`."""
        return sizes_of(profile, self.generates, guess)

    def complete(self, profile: Profile) -> Profile:
        """The profile with `generates` as the model has it."""
        return profile if profile.generates == self.generates else replace(profile, generates=self.generates)

    def synthetic_samples(self, count: int, rng: np.random.Generator) -> list[Any]:
        """Texts of the middle length."""
        return list(self.synthetic_of_length(count, self.middle, rng))

    @property
    def _synthetic_prompt(self) -> int:
        """Tokens of the prompts that a generator is measured with."""
        return min(_SYNTHETIC_PROMPT, self.most_tokens)

    @property
    def middle_length(self) -> str:
        """The length of `synthetic_samples`."""
        if self.generates:
            return f"{self.middle} generated tokens after a prompt of {self._synthetic_prompt}"
        return f"{self.middle} tokens"

    def parameters(self) -> dict[str, Any]:
        """Limits on lengths, and the padding token."""
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

    def synthetic_of_length(self, count: int, length: int, rng: np.random.Generator) -> list[Text]:
        """Random samples of one length, in the sense of `longest`."""
        prompt = self._synthetic_prompt if self.generates else length
        ids = rng.integers(0, self.vocabulary, (count, prompt)).tolist()
        return [Text(tokens, length if self.generates else 0, forced=self.generates) for tokens in ids]


def _generation_parameters(fields: Mapping[str, Any]) -> tuple[int | None, bool]:
    """The limit on generated tokens, or None, and whether the end token is ignored."""
    limit, forced = fields.get(_LIMIT), fields.get(_FORCED)
    if not (limit is None or type(limit) is int):
        raise BadInputError(f"{_LIMIT} is {quote(limit)}; send an integer")
    if not (forced is None or type(forced) is bool):
        raise BadInputError(f"{_FORCED} is {quote(forced)}; send true or false")
    return limit, bool(forced)
