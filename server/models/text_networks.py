"""Greedy generation, iteration by iteration: rows with unequal progress share a batch, and each may leave or join.

A row's keys and values are the last ones of its cache: shorter rows are padded on the left and masked, and positions
count from the row's own first token, so that every row sees what it would see alone. What an encoder gave is padded
on the right.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from server.errors import NotFiniteError
from server.models.text import Generated, Text, Unfinished

_Part = tuple["Decoding", list[int]]  # neighbours of a batch that come from one other, and their rows there


@dataclass(frozen=True, slots=True, eq=False)
class Generator:
    """A network that generates.

    Attributes:
        net: a causal language model, or an encoder with a decoder.
        ends: ids that end a text.
        start: the id that a decoder begins with; None where there is no encoder.
        positions: of the decoder, where they cannot be given to `net`.
        never: ids that are not generated.
    """

    net: Any
    ends: frozenset[int]
    start: int | None
    positions: "RowPositions | None" = None
    never: Sequence[int] = ()


TextNet = Generator | Any  # what is no Generator classifies


class RowPositions(nn.Module):
    """Position embeddings in the place of a decoder's own, which are of the cache's length and so alike for all rows.

    Attributes:
        rows: the positions that are embedded next, int64 [n, new].
    """

    def __init__(self, table: nn.Embedding) -> None:
        """`table` holds what each position is embedded as."""
        super().__init__()
        self.table = table
        self.rows = torch.zeros(1, 1, dtype=torch.int64)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """[n, new, width]."""
        return embedding(self.rows, self.table.weight)


@dataclass(slots=True, eq=False)
class Decoding:
    """Rows between two iterations.

    Attributes:
        texts: what was asked for, by row.
        generated: ids so far, by row.
        ended: of how many ids each row's text consists; 0 while it goes on.
        keys: how many keys of each row's cache count, int64 [n].
        cache: transformers' own; grows in place.
        memory: what the encoder gave, [n, source, width]; None where there is none.
        sources: how many tokens of each row of it count, int64 [n].
    """

    texts: list[Text]
    generated: list[list[int]]
    ended: list[int]
    keys: Tensor
    cache: Any
    memory: Tensor | None = None
    sources: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Row(Unfinished):
    """One text between two iterations: a row of a batch that stays where its iteration left it."""

    whole: Decoding
    index: int


def generate(generator: Generator, inputs: Sequence[Text | Row], iterations: int | None) -> list[Any]:
    """Run a batch for so many iterations, or until its longest text is done.

    An iteration adds one token to each row; a row that begins passes its whole prompt in it.

    Returns:
        For each row `Generated`, or `Row` as the input of its next iteration.

    Raises:
        NotFiniteError: a logit is not.
    """
    batch = _step(generator, inputs)
    done = 1
    while done != iterations and not all(batch.ended):
        _advance(generator, batch)
        done += 1
    return [Generated(batch.generated[row][:end]) if end else Row(batch, row) for row, end in enumerate(batch.ended)]


def classify(net: Any, texts: Sequence[Text]) -> list[Any]:
    """Logits, float32 [labels], for each text, padded to the longest of them.

    Some networks look for the padding among the ids themselves.
    """
    ids, counts = right_padded([text.tokens for text in texts], net.device, net.config.pad_token_id or 0)
    logits = net(input_ids=ids, attention_mask=first(counts, ids.shape[1])).logits
    if not torch.isfinite(logits).all():
        raise NotFiniteError("the model's output is not finite")
    return [row.copy() for row in logits.cpu().numpy()]


def right_padded(rows: Sequence[Sequence[int]], device: torch.device, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Ids, int64 [n, longest], and how many of each row count, int64 [n]."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *([filler] * (longest - len(row)))] for row in rows])
    return ids.to(device), torch.tensor([len(row) for row in rows]).to(device)


def first(counts: Tensor, longest: int) -> Tensor:
    """A mask, int64 [n, longest]: the first ones of each row count."""
    return (torch.arange(longest, device=counts.device) < counts[:, None]).long()


def _last(counts: Tensor, longest: int) -> Tensor:
    return first(counts, longest).flip(1)


def _step(generator: Generator, inputs: Sequence[Text | Row]) -> Decoding:
    """Everybody one iteration further, in one batch, in order."""
    fresh = [row for row in inputs if isinstance(row, Text)]
    going = [row for row in inputs if isinstance(row, Row)]
    begun, resumed = _rows(_begin(generator, fresh)), _rows(_resume(generator, going))
    return _joined([next(begun if isinstance(row, Text) else resumed) for row in inputs])


def _rows(batch: Decoding | None) -> Iterator[Row]:
    return iter(() if batch is None else [Row(batch, row) for row in range(len(batch.texts))])


def _begin(generator: Generator, texts: list[Text]) -> Decoding | None:
    """Pass the prompts; the first token of each comes out."""
    if not texts:
        return None
    ids, counts = right_padded([text.tokens for text in texts], generator.net.device)
    batch = Decoding(texts, [[] for _ in texts], [0] * len(texts), counts, DynamicCache())
    if generator.start is None:
        mask = _last(counts, ids.shape[1])
        shifted = torch.zeros_like(ids)
        shifted[mask.bool()] = ids[first(counts, ids.shape[1]).bool()]
        _forward(generator, batch, shifted, mask)
        return batch
    mask = first(counts, ids.shape[1])
    batch.memory = generator.net.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
    batch.cache, batch.sources = EncoderDecoderCache(batch.cache, DynamicCache()), counts
    batch.keys = torch.ones_like(counts)
    _forward(generator, batch, torch.full_like(counts, generator.start)[:, None], batch.keys[:, None])
    return batch


def _resume(generator: Generator, rows: list[Row]) -> Decoding | None:
    """One iteration more for those who have begun."""
    if not rows:
        return None
    batch = _joined(rows)
    _advance(generator, batch)
    return batch


def _advance(generator: Generator, batch: Decoding) -> None:
    """One token more for each row; also for those that are done, whose batch goes on."""
    batch.keys = batch.keys + 1
    last = torch.tensor([[tokens[-1]] for tokens in batch.generated]).to(batch.keys.device)
    _forward(generator, batch, last, _last(batch.keys, batch.cache.get_seq_length() + 1))


def _forward(generator: Generator, batch: Decoding, ids: Tensor, mask: Tensor) -> None:
    """Pass `ids`, int64 [n, new], and keep the likeliest token; `mask`, int64 [n, keys], is of all keys."""
    shared = {"past_key_values": batch.cache, "use_cache": True}
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if generator.positions is not None:
        generator.positions.rows = positions
    if batch.memory is None or batch.sources is None:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
    else:
        inputs = {
            "encoder_outputs": BaseModelOutput(last_hidden_state=batch.memory),
            "attention_mask": first(batch.sources, batch.memory.shape[1]),
            "decoder_input_ids": ids,
            "decoder_attention_mask": mask,
        }
    logits = generator.net(**inputs, **shared).logits[:, -1]
    if not torch.isfinite(logits).all():
        raise NotFiniteError("the model's output is not finite")
    logits[:, generator.never] = -torch.inf
    for row, token in enumerate(logits.argmax(-1).tolist()):
        text, tokens = batch.texts[row], batch.generated[row]
        tokens.append(token)
        if not batch.ended[row] and (len(tokens) == text.limit or (token in generator.ends and not text.forced)):
            batch.ended[row] = len(tokens)


def _joined(rows: Sequence[Row]) -> Decoding:
    """The rows in order as one batch; what they come from stays as it is, so that a failed batch can be tried again."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: id(row.whole))]
    parts = [(group[0].whole, [row.index for row in group]) for group in groups]
    whole, indices = parts[0]
    if len(parts) == 1 and indices == [*range(len(whole.texts))]:
        cache, keys, memory, sources = _again(whole.cache), whole.keys, whole.memory, whole.sources
    else:
        keys = torch.cat([whole.keys[indices] for whole, indices in parts])
        cache, memory, sources = _side_by_side(parts, int(keys.max()))
    return Decoding(
        [row.whole.texts[row.index] for row in rows],
        [[*row.whole.generated[row.index]] for row in rows],
        [row.whole.ended[row.index] for row in rows],
        keys,
        cache,
        memory,
        sources,
    )


def _again(cache: Any) -> Any:
    """Another cache of the same tensors, which are never written: a cache that grows gets new ones."""
    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(_again(cache.self_attention_cache), _again(cache.cross_attention_cache))
    again = copy(cache)
    again.layers = [copy(layer) for layer in cache.layers]
    return again


def _side_by_side(parts: Sequence[_Part], longest: int) -> tuple[Any, Tensor | None, Tensor | None]:
    """The cache, with room for `longest` keys a row, the encoder's output, and how much of it counts."""
    whole, _ = parts[0]
    if whole.memory is None or whole.sources is None:
        return _merged([(part.cache, rows) for part, rows in parts], longest, left=True), None, None
    sources = torch.cat([part.sources[rows] for part, rows in parts if part.sources is not None])
    source = int(sources.max())
    memory = _stacked([part.memory[rows] for part, rows in parts if part.memory is not None], source, left=False)
    own = _merged([(part.cache.self_attention_cache, rows) for part, rows in parts], longest, left=True)
    cross = _merged([(part.cache.cross_attention_cache, rows) for part, rows in parts], source, left=False)
    return EncoderDecoderCache(own, cross), memory, sources


def _merged(caches: Sequence[tuple[Any, list[int]]], length: int, *, left: bool) -> DynamicCache:
    layers = zip(*([layer[:2] for layer in cache] for cache, _ in caches), strict=True)
    rows = [indices for _, indices in caches]
    return DynamicCache(
        [
            tuple(
                _stacked(
                    [layer[which][chosen] for layer, chosen in zip(of_layer, rows, strict=True)], length, left=left
                )
                for which in (0, 1)
            )
            for of_layer in layers
        ]
    )


def _stacked(parts: Sequence[Tensor], length: int, *, left: bool) -> Tensor:
    """[..., length, width] each, cut or filled up with zeros at that side, one after another."""
    fitted = []
    for part in parts:
        missing = length - part.shape[-2]
        part = part[..., -length:, :] if left else part[..., :length, :]  # noqa: PLW2901
        fitted.append(pad(part, (0, 0, max(missing, 0), 0) if left else (0, 0, 0, max(missing, 0))))
    return torch.cat(fitted)
