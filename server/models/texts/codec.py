"""The codec of text models: token ids or JSON texts in, generated tokens or predictions out. Without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from policies.profile import Profile
from server.errors import BadInputError, TooLargeError, quote
from server.json_body import parse_object
from server.models.form import Form, FormField
from server.models.model import Codec, Inputs
from server.models.signature import Signature, Tensor, TensorSpec
from server.models.texts.samples import TextSample
from server.models.texts.size_predictor import TextSizePredictor, make_size_predictor

DEFAULT_MAX_NEW_TOKENS = 32
_SYNTHETIC_PROMPT = 16  # tokens
_MAX_CHARACTERS = 16  # per token; longer texts are rejected before they are tokenized
_MAX_ESCAPED = 12  # bytes of JSON per character, as \uXXXX\uXXXX
_TOKEN_MEMORY = 40  # bytes of a token id in a list
_MANY_TOKENS = 20_000  # reading more takes over a millisecond
_IDS, _MAX_NEW_TOKENS, _IGNORE_EOS = "input_ids", "max_new_tokens", "ignore_eos"


class Tokenizer(Protocol):
    """Converts text to token ids and back. Thread-safe."""

    def encode(self, text: str) -> list[int]:
        """Token ids, with the model's special tokens."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        ...


class ByteTokenizer:
    """A tokenizer for models without one: an id is a byte of UTF-8 plus 3. 0 is padding, 1 the end token, 2 unused.

    Attributes:
        vocab_size: number of ids.
    """

    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        """One id per byte."""
        return [byte + 3 for byte in text.encode(errors="replace")]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes; invalid UTF-8 becomes a replacement character."""
        return bytes(token - 3 for token in tokens if 3 <= token < self.vocab_size).decode(errors="replace")


@dataclass(frozen=True)  # slots would break super()
class TextCodec(Codec):
    """Token ids, one text per sample; logits or generated tokens as output.

    Attributes:
        vocab_size: number of token ids.
        max_prompt_tokens: maximum length of a prompt.
        max_new_tokens: maximum number of generated tokens per request; 0 for a classifier.
        pad_token_id: fills shorter rows; -1, which is no token, if the model has none.
        tokenizer: None if the model has none and takes only token ids.
    """

    vocab_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    pad_token_id: int
    tokenizer: Tokenizer | None

    @property
    def json_body(self) -> bool:
        """Whether the body of POST /predict is JSON: always."""
        return True

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens."""
        return self.max_new_tokens > 0

    @property
    def _max_length(self) -> int:
        """Maximum of the length that determines service times: generated tokens, or those of a classifier's prompt."""
        return self.max_new_tokens or self.max_prompt_tokens

    @property
    def _middle_length(self) -> int:
        return (self._max_length + 1) // 2

    @property
    def lengths(self) -> tuple[int, ...]:
        """Powers of 4, half the maximum and the maximum."""
        powers = (4**n for n in range(16))
        return tuple(sorted({*(n for n in powers if n < self._max_length), self._middle_length, self._max_length}))

    @property
    def max_body(self) -> tuple[int, str] | None:
        """Maximum size of the JSON of a text within the limits."""
        return self._max_body, "send a shorter text"

    @property
    def _max_body(self) -> int:
        return _MAX_ESCAPED * _MAX_CHARACTERS * self.max_prompt_tokens + 1024

    def signature(self, labels: int) -> Signature:
        """Token ids padded at the end, for a generator optionally also each sample's max_new_tokens; ids or logits."""
        ids = TensorSpec(_IDS, {"INT64": (-1,), "INT32": (-1,)})
        parameters = (_MAX_NEW_TOKENS, _IGNORE_EOS)  # a classifier reads them too, in order to reject them
        if not self.generates:
            return Signature((ids,), (TensorSpec("logits", {"FP32": (labels,)}),), parameters)
        limits = TensorSpec(_MAX_NEW_TOKENS, {"INT32": (), "INT64": ()}, optional=True)
        return Signature((ids, limits), (TensorSpec("output_ids", {"INT64": (-1,)}),), parameters)

    def from_body(self, body: bytes, _: str) -> Inputs:
        """Read {"text": ..., "max_new_tokens": n, "ignore_eos": false}, of which only the text is required.

        Raises:
            TooLargeError: the body exceeds `max_body`.
            BadInputError: the document is malformed, or a value is out of bounds.
        """
        if len(body) > self._max_body:
            raise TooLargeError(f"the body has {len(body)} bytes, over {self._max_body}; send a shorter text")
        expected = 'an object with "text"'
        document = parse_object(body, "body", expected)
        if type(document.get("text")) is not str:
            raise BadInputError(f"the body is {quote(document)}; send {expected}")
        unknown = sorted(document.keys() - {"text", _MAX_NEW_TOKENS, _IGNORE_EOS})
        if unknown:
            raise BadInputError(f"unknown key {unknown[0]!r}; send text, {_MAX_NEW_TOKENS} and {_IGNORE_EOS}")
        limit, ignore_eos = _generation_parameters(document)
        sample = self._make_sample(self._tokenize(document["text"]), limit, ignore_eos)
        return Inputs(1, lambda: [sample])

    def from_tensors(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Inputs:
        """Read samples from a tensor of token ids, [samples, longest].

        Raises:
            BadInputError: a token id or parameter is out of bounds.
        """
        ids = tensors[_IDS].data
        if not isinstance(ids, np.ndarray):
            raise BadInputError(f"the model takes token ids, not a raw body; send {self.signature(0).inputs[0]}")
        limit, ignore_eos = _generation_parameters(parameters)
        own = tensors.get(_MAX_NEW_TOKENS)

        def read() -> list[TextSample]:
            limits = [limit] * len(ids) if own is None else np.asarray(own.data).tolist()
            return [
                self._make_sample(self.strip_padding(row), most, ignore_eos)
                for row, most in zip(ids, limits, strict=True)
            ]

        return Inputs(len(ids), read, memory=_TOKEN_MEMORY * ids.size, slow=ids.size > _MANY_TOKENS)

    def render(self, output: Any, labels: Sequence[str]) -> dict[str, Any]:
        """The generated text, or the most probable classes."""
        if not self.generates:
            return super().render(output, labels)
        assert self.tokenizer is not None  # else `from_body` raised
        return {"text": self.tokenizer.decode(output.tokens), "new_tokens": len(output.tokens)}

    def stack(self, outputs: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Generated tokens, int64 [samples, longest], or logits, float32 [samples, classes]."""
        if not self.generates:
            return super().stack(outputs)
        return {"output_ids": self.pad_rows([output.tokens for output in outputs])}

    def make_size_predictor(self, profile: Profile, guess: str) -> TextSizePredictor:
        """Make a predictor of service times from lengths."""
        return make_size_predictor(profile, self.generates, guess)

    @property
    def _synthetic_prompt(self) -> int:
        """Prompt length of a generator's synthetic samples, tokens."""
        return min(_SYNTHETIC_PROMPT, self.max_prompt_tokens)

    @property
    def synthetic_length_note(self) -> str:
        """The default length of `synthetic_samples`, in words."""
        if self.generates:
            return f"{self._middle_length} generated tokens after a prompt of {self._synthetic_prompt}"
        return f"{self._middle_length} tokens"

    def metadata_parameters(self) -> dict[str, Any]:
        """Limits on lengths, the vocabulary's size and the padding token."""
        limits = {
            "max_tokens": self.max_prompt_tokens,
            "vocabulary": self.vocab_size,
            "pad_token_id": self.pad_token_id,
        }
        return limits | ({"max_new_tokens": self.max_new_tokens} if self.generates else {})

    def _tokenize(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise BadInputError("the model has no tokenizer; send token ids by the Open Inference Protocol")
        most = _MAX_CHARACTERS * self.max_prompt_tokens
        if len(text) > most:
            raise BadInputError(f"the text has {len(text)} characters, over {most}; send a shorter text")
        return self.tokenizer.encode(text)

    def _make_sample(self, tokens: Sequence[int], limit: int | None, ignore_eos: bool) -> TextSample:
        """Make a sample from token ids without padding, with a limit on generated tokens or the default.

        Raises:
            BadInputError: a value is out of bounds.
        """
        self._check_length(len(tokens))
        invalid = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if invalid is not None:
            raise BadInputError(f"token id {invalid} is outside the vocabulary; send 0 to {self.vocab_size - 1}")
        return TextSample(tokens, self._checked_limit(limit), ignore_eos)

    def _check_length(self, tokens: int) -> None:
        if not 1 <= tokens <= self.max_prompt_tokens:
            raise BadInputError(f"the text has {tokens} tokens; send 1 to {self.max_prompt_tokens}")

    def _checked_limit(self, limit: int | None) -> int:
        if not self.generates:
            if limit is not None:
                raise BadInputError(f"max_new_tokens is {limit}, but the model is a classifier; leave it out")
            return 0
        if limit is None:
            return min(DEFAULT_MAX_NEW_TOKENS, self.max_new_tokens)
        if not 1 <= limit <= self.max_new_tokens:
            raise BadInputError(f"max_new_tokens is {limit}; send 1 to {self.max_new_tokens}")
        return limit

    def strip_padding(self, row: NDArray[np.int64]) -> list[int]:
        """The token ids of a row, int64 [longest], without the padding at its end.

        Raises:
            BadInputError: the prompt is empty or too long.
        """
        kept = np.flatnonzero(row != self.pad_token_id)
        count = int(kept[-1]) + 1 if kept.size else 0
        self._check_length(count)
        ids: list[int] = row[:count].tolist()
        return ids

    def pad_rows(self, rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """The rows as int64 [n, longest], padded at the end."""
        ids = np.full((len(rows), max(map(len, rows))), self.pad_token_id, np.int64)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = tokens
        return ids

    def synthetic_samples(self, count: int, rng: np.random.Generator, length: int | None = None) -> list[Any]:
        """Make samples of random tokens; a generator generates exactly `length` tokens."""
        length = length or self._middle_length
        prompt = self._synthetic_prompt if self.generates else length
        ids = rng.integers(0, self.vocab_size, (count, prompt)).tolist()
        return [TextSample(tokens, length if self.generates else 0, ignore_eos=self.generates) for tokens in ids]

    def form(self) -> Form:
        """A text, for a generator also the limit on generated tokens."""
        text = FormField("text", "text", f"at most {self.max_prompt_tokens} tokens", "Hello")
        if not self.generates:
            return Form((text,))
        default = min(DEFAULT_MAX_NEW_TOKENS, self.max_new_tokens)
        return Form((text, FormField(_MAX_NEW_TOKENS, "number", f"1 to {self.max_new_tokens}", str(default))))


def _generation_parameters(fields: Mapping[str, Any]) -> tuple[int | None, bool]:
    """The limit on generated tokens, None if absent, and whether end tokens are ignored."""
    limit, ignore_eos = fields.get(_MAX_NEW_TOKENS), fields.get(_IGNORE_EOS)
    if not (limit is None or type(limit) is int):
        raise BadInputError(f"{_MAX_NEW_TOKENS} is {quote(limit)}; send an integer")
    if not (ignore_eos is None or type(ignore_eos) is bool):
        raise BadInputError(f"{_IGNORE_EOS} is {quote(ignore_eos)}; send true or false")
    return limit, bool(ignore_eos)
