"""Inference of text networks: classification, and greedy generation by decode steps with continuous batching.

Rows with different progress share a batch, and each may leave or join between two decode steps. A row's keys and
values are the last ones of its cache: shorter rows are padded on the left and masked, and positions count from the
row's own first token, so that a row's output does not depend on its batch. An encoder's output is padded on the right.
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
from server.models.texts.samples import DecodeState, GeneratedTokens, TextSample

_Part = tuple["DecodeBatch", list[int]]  # rows of a merged batch: the batch they come from, and their indices


@dataclass(frozen=True, slots=True, eq=False)
class GenerativeNet:
    """A network that generates tokens.

    Attributes:
        net: a causal language model, or an encoder-decoder model.
        eos_token_ids: tokens that end an output.
        decoder_start_token_id: first token of a decoder; None without an encoder.
        cache_argument: name of the argument of `net` for keys and values; transformers renamed it in 5.24, one kind of
            network at a time.
        positions: the decoder's position embeddings, if `net` takes no positions.
        suppressed_token_ids: tokens that are never generated.
    """

    net: Any
    eos_token_ids: frozenset[int]
    decoder_start_token_id: int | None
    cache_argument: str
    positions: "RowPositions | None" = None
    suppressed_token_ids: Sequence[int] = ()


TextNet = GenerativeNet | Any  # any other network is a classifier


class RowPositions(nn.Module):
    """Position embeddings by row; those of the decoder derive one position for all rows from the cache's length.

    Attributes:
        position_ids: the positions to embed next, int64 [n, new].
    """

    def __init__(self, table: nn.Embedding) -> None:
        """`table` has the embedding of each position."""
        super().__init__()
        self.table = table
        self.position_ids = torch.zeros(1, 1, dtype=torch.int64)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """The embeddings of `position_ids`, [n, new, width]."""
        return embedding(self.position_ids, self.table.weight)


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """A batch between two decode steps.

    Attributes:
        samples: inputs, by row.
        tokens: generated token ids, by row.
        output_lengths: number of tokens in each row's finished output; 0 while the row is not finished.
        cache_lengths: number of valid positions in each row's cache, int64 [n].
        cache: keys and values as transformers keeps them; grows in place.
        encoder_output: [n, source, width]; None without an encoder.
        encoder_lengths: number of valid positions in each row of `encoder_output`, int64 [n].
    """

    samples: list[TextSample]
    tokens: list[list[int]]
    output_lengths: list[int]
    cache_lengths: Tensor
    cache: Any
    encoder_output: Tensor | None = None
    encoder_lengths: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRow(DecodeState):
    """One sample between two decode steps: a row of the batch of its last step."""

    batch: DecodeBatch
    index: int


def place(net: TextNet, device: torch.device) -> None:
    """Move a network to the device."""
    (net.net if isinstance(net, GenerativeNet) else net).to(device)


def serve(net: TextNet, inputs: Sequence[Any], steps: int | None) -> list[Any]:
    """For each sample its logits, float32 [labels], or what `generate` returns."""
    return generate(net, inputs, steps) if isinstance(net, GenerativeNet) else classify(net, inputs)


def generate(net: GenerativeNet, inputs: Sequence[TextSample | DecodeRow], steps: int | None) -> list[Any]:
    """Run a batch for a number of decode steps, or until all its rows are finished.

    A decode step adds one token to each row; the first step of a new sample is its prefill.

    Returns:
        For each input `GeneratedTokens`, or the `DecodeRow` to continue with.

    Raises:
        NotFiniteError: a logit is not finite.
    """
    batch = _first_step(net, inputs)
    done = 1
    while done != steps and not all(batch.output_lengths):
        _decode(net, batch)
        done += 1
    return [
        GeneratedTokens(batch.tokens[row][:length]) if length else DecodeRow(batch, row)
        for row, length in enumerate(batch.output_lengths)
    ]


def classify(net: Any, samples: Sequence[TextSample]) -> list[Any]:
    """Logits, float32 [labels], for each sample, in one batch padded to the longest prompt.

    Raises:
        NotFiniteError: a logit is not finite.
    """
    # some networks find the padding by its token id rather than by the mask
    ids, lengths = pad_right([sample.tokens for sample in samples], net.device, net.config.pad_token_id or 0)
    logits = net(input_ids=ids, attention_mask=prefix_mask(lengths, ids.shape[1])).logits
    if not torch.isfinite(logits).all():
        raise NotFiniteError("the model's output is not finite")
    return [row.copy() for row in logits.cpu().numpy()]


def pad_right(rows: Sequence[Sequence[int]], device: torch.device, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids, int64 [n, longest], and the length of each row, int64 [n]."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *([filler] * (longest - len(row)))] for row in rows])
    return ids.to(device), torch.tensor([len(row) for row in rows]).to(device)


def prefix_mask(lengths: Tensor, longest: int) -> Tensor:
    """A mask, int64 [n, longest], of the first `lengths` positions of each row."""
    return (torch.arange(longest, device=lengths.device) < lengths[:, None]).long()


def _suffix_mask(lengths: Tensor, longest: int) -> Tensor:
    return prefix_mask(lengths, longest).flip(1)


def _first_step(net: GenerativeNet, inputs: Sequence[TextSample | DecodeRow]) -> DecodeBatch:
    """Run one decode step for each input, and merge the rows in the order of `inputs` into one batch."""
    new = [row for row in inputs if isinstance(row, TextSample)]
    resumed = [row for row in inputs if isinstance(row, DecodeRow)]
    prefilled, decoded = _rows(_prefill(net, new)), _rows(_resume(net, resumed))
    return _merge_rows([next(prefilled if isinstance(row, TextSample) else decoded) for row in inputs])


def _rows(batch: DecodeBatch | None) -> Iterator[DecodeRow]:
    return iter(() if batch is None else [DecodeRow(batch, row) for row in range(len(batch.samples))])


def _prefill(net: GenerativeNet, samples: list[TextSample]) -> DecodeBatch | None:
    """Process the prompts, which generates the first token of each row."""
    if not samples:
        return None
    ids, lengths = pad_right([sample.tokens for sample in samples], net.net.device)
    batch = DecodeBatch(samples, [[] for _ in samples], [0] * len(samples), lengths, DynamicCache())
    if net.decoder_start_token_id is None:
        mask = _suffix_mask(lengths, ids.shape[1])
        shifted = torch.zeros_like(ids)
        shifted[mask.bool()] = ids[prefix_mask(lengths, ids.shape[1]).bool()]
        _forward(net, batch, shifted, mask)
        return batch
    mask = prefix_mask(lengths, ids.shape[1])
    batch.encoder_output = net.net.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
    batch.cache, batch.encoder_lengths = EncoderDecoderCache(batch.cache, DynamicCache()), lengths
    batch.cache_lengths = torch.ones_like(lengths)
    start = torch.full_like(lengths, net.decoder_start_token_id)[:, None]
    _forward(net, batch, start, batch.cache_lengths[:, None])
    return batch


def _resume(net: GenerativeNet, rows: list[DecodeRow]) -> DecodeBatch | None:
    """Merge suspended rows into one batch, and run a decode step."""
    if not rows:
        return None
    batch = _merge_rows(rows)
    _decode(net, batch)
    return batch


def _decode(net: GenerativeNet, batch: DecodeBatch) -> None:
    """Run one decode step for all rows; finished rows are computed too until their batch ends."""
    batch.cache_lengths = batch.cache_lengths + 1
    last = torch.tensor([[tokens[-1]] for tokens in batch.tokens]).to(batch.cache_lengths.device)
    _forward(net, batch, last, _suffix_mask(batch.cache_lengths, batch.cache.get_seq_length() + 1))


def _forward(net: GenerativeNet, batch: DecodeBatch, ids: Tensor, mask: Tensor) -> None:
    """Process `ids`, int64 [n, new], and append the most likely token to each row.

    Args:
        net: the network.
        batch: the batch, whose cache grows by the new positions.
        ids: new tokens, int64 [n, new].
        mask: valid positions of the cache and of `ids`, int64 [n, cached + new].
    """
    shared = {net.cache_argument: batch.cache, "use_cache": True}
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if net.positions is not None:
        net.positions.position_ids = positions
    if batch.encoder_output is None or batch.encoder_lengths is None:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
    else:
        inputs = {
            "encoder_outputs": BaseModelOutput(last_hidden_state=batch.encoder_output),
            "attention_mask": prefix_mask(batch.encoder_lengths, batch.encoder_output.shape[1]),
            "decoder_input_ids": ids,
            "decoder_attention_mask": mask,
        }
    logits = net.net(**inputs, **shared).logits[:, -1]
    if not torch.isfinite(logits).all():
        raise NotFiniteError("the model's output is not finite")
    logits[:, net.suppressed_token_ids] = -torch.inf
    for row, token in enumerate(logits.argmax(-1).tolist()):
        sample, tokens = batch.samples[row], batch.tokens[row]
        tokens.append(token)
        is_last = len(tokens) == sample.max_new_tokens or (token in net.eos_token_ids and not sample.ignore_eos)
        if is_last and not batch.output_lengths[row]:
            batch.output_lengths[row] = len(tokens)


def _merge_rows(rows: Sequence[DecodeRow]) -> DecodeBatch:
    """Merge rows, in order, into one batch; their batches are unchanged, so that a failed batch can be retried."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: id(row.batch))]
    parts = [(group[0].batch, [row.index for row in group]) for group in groups]
    batch, indices = parts[0]
    if len(parts) == 1 and indices == [*range(len(batch.samples))]:
        cache_lengths, cache = batch.cache_lengths, _copy_cache(batch.cache)
        encoder_output, encoder_lengths = batch.encoder_output, batch.encoder_lengths
    else:
        cache_lengths = torch.cat([part.cache_lengths[indices] for part, indices in parts])
        cache, encoder_output, encoder_lengths = _merge_states(parts, int(cache_lengths.max()))
    return DecodeBatch(
        [row.batch.samples[row.index] for row in rows],
        [[*row.batch.tokens[row.index]] for row in rows],
        [row.batch.output_lengths[row.index] for row in rows],
        cache_lengths,
        cache,
        encoder_output,
        encoder_lengths,
    )


def _copy_cache(cache: Any) -> Any:
    """A copy that shares the tensors: a cache grows by replacing its tensors, never by writing into them."""
    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(_copy_cache(cache.self_attention_cache), _copy_cache(cache.cross_attention_cache))
    copied = copy(cache)
    copied.layers = [copy(layer) for layer in cache.layers]
    return copied


def _merge_states(parts: Sequence[_Part], longest: int) -> tuple[Any, Tensor | None, Tensor | None]:
    """The merged cache of `longest` positions, the encoder's output, and its valid lengths."""
    first, _ = parts[0]
    if first.encoder_output is None or first.encoder_lengths is None:
        return _merge_caches([(batch.cache, rows) for batch, rows in parts], longest, left=True), None, None
    lengths = torch.cat([batch.encoder_lengths[rows] for batch, rows in parts if batch.encoder_lengths is not None])
    source = int(lengths.max())
    outputs = [batch.encoder_output[rows] for batch, rows in parts if batch.encoder_output is not None]
    own = _merge_caches([(batch.cache.self_attention_cache, rows) for batch, rows in parts], longest, left=True)
    cross = _merge_caches([(batch.cache.cross_attention_cache, rows) for batch, rows in parts], source, left=False)
    return EncoderDecoderCache(own, cross), _concatenate(outputs, source, left=False), lengths


def _merge_caches(caches: Sequence[tuple[Any, list[int]]], length: int, *, left: bool) -> DynamicCache:
    layers = zip(*([layer[:2] for layer in cache] for cache, _ in caches), strict=True)  # keys and values, by cache
    rows = [indices for _, indices in caches]

    def merged(tensors: Sequence[Tensor]) -> Tensor:
        return _concatenate([tensor[chosen] for tensor, chosen in zip(tensors, rows, strict=True)], length, left=left)

    return DynamicCache([tuple(merged(tensors) for tensors in zip(*layer, strict=True)) for layer in layers])


def _concatenate(parts: Sequence[Tensor], length: int, *, left: bool) -> Tensor:
    """Concatenate parts, [n, ..., any length, width], each cut or zero-padded on the left or right to `length`."""
    fitted = []
    for part in parts:
        missing = max(length - part.shape[-2], 0)
        cut = part[..., -length:, :] if left else part[..., :length, :]
        fitted.append(pad(cut, (0, 0, missing, 0) if left else (0, 0, 0, missing)))
    return torch.cat(fitted)
