"""Check that a text network computes the same in a batch as alone, which not every transformers network does."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.types import SpecError
from server.models.texts.codec import TextCodec
from server.models.texts.networks import GenerativeNet, TextNet, classify, generate
from server.models.texts.samples import TextSample

_PROMPTS = (3, 9, 1, 6)  # lengths, tokens
_GENERATED = 4  # tokens
_TOLERANCE = 1e-3  # of the largest logit: far above rounding errors of another summation order


def check_batching(name: str, codec: TextCodec, net: TextNet) -> None:
    """Run the longest sample alone, and a batch of samples of different lengths.

    Raises:
        SpecError: the outputs of a batch differ from those of its samples alone.
        Exception: any exception of the network.
    """
    rng = np.random.default_rng(0)

    def sample(length: int, limit: int) -> TextSample:
        ids = rng.integers(0, codec.vocab_size, length)
        ids[ids == codec.pad_token_id] = (codec.pad_token_id + 1) % codec.vocab_size  # some networks skip padding ids
        return TextSample(ids.tolist(), limit, ignore_eos=codec.generates)

    limit = min(_GENERATED, codec.max_new_tokens)
    mixed = [sample(min(length, codec.max_prompt_tokens), limit) for length in _PROMPTS]
    with torch.inference_mode():
        if isinstance(net, GenerativeNet):
            # a causal model's positions are shared by prompt and output
            output = codec.max_new_tokens - 1 if net.decoder_start_token_id is None else 0
            generate(net, [sample(codec.max_prompt_tokens + output, 1)], None)
            same = _generates_the_same(net, mixed)
        else:
            classify(net, [sample(codec.max_prompt_tokens, 0)])
            same = _close(np.stack(classify(net, mixed)), np.concatenate([classify(net, [each]) for each in mixed]))
    if not same:
        raise SpecError(
            f"{name}: the outputs of a {type(getattr(net, 'net', net)).__name__} in a batch differ from those alone; "
            "docs/texts.md lists the networks that can be served"
        )


def _generates_the_same(net: GenerativeNet, samples: list[TextSample]) -> bool:
    """Whether batched decode steps with a cache give the logits of one pass of each sample over all its tokens."""
    steps: list[Tensor] = []
    hook = net.net.register_forward_hook(lambda _, __, output: steps.append(output.logits[:, -1].clone()))
    try:
        outputs = generate(net, samples, None)
    finally:
        hook.remove()
    batched = torch.stack(steps, 1)
    rows = zip(batched, samples, outputs, strict=True)
    return all(_close(row.numpy(), _one_pass(net, sample, output.tokens).numpy()) for row, sample, output in rows)


def _one_pass(net: GenerativeNet, sample: TextSample, tokens: list[int]) -> Tensor:
    """The logits of each of the generated tokens, [tokens, vocabulary], from one pass without a cache."""
    previous = tokens[:-1]
    if net.decoder_start_token_id is None:
        logits: Tensor = net.net(input_ids=torch.tensor([[*sample.tokens, *previous]])).logits
        return logits[0, -len(tokens) :]
    if net.positions is not None:
        net.positions.position_ids = torch.arange(len(tokens))[None]
    prompt, decoded = torch.tensor([sample.tokens]), torch.tensor([[net.decoder_start_token_id, *previous]])
    logits = net.net(input_ids=prompt, decoder_input_ids=decoded).logits
    return logits[0]


def _close(a: Any, b: Any) -> bool:
    return bool(np.abs(a - b).max() <= _TOLERANCE * np.abs(b).max())
