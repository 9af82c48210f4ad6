"""Whether a text model's network answers here as it does by itself: transformers has more kinds than are known here."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.types import SpecError
from server.models.text import Text
from server.models.text_codec import TextCodec
from server.models.text_networks import Generator, TextNet, classify, generate

_PROMPTS = (3, 9, 1, 6)  # tokens
_GENERATED = 4
_TOLERANCE = 1e-3  # of the largest logit: sums in another order differ by far less, mistakes by more


def check_answers(name: str, codec: TextCodec, net: TextNet) -> None:
    """Give it the longest text alone, and a few of mixed lengths together.

    Raises:
        SpecError: texts in a batch are not answered as alone.
        Exception: whatever the network raises.
    """
    rng = np.random.default_rng(0)

    def text(length: int, limit: int) -> Text:
        ids = rng.integers(0, codec.vocabulary, length)
        ids[ids == codec.pad] = (codec.pad + 1) % codec.vocabulary  # which some do not count as a position
        return Text(ids.tolist(), limit, forced=codec.generates)

    mixed = [text(min(n, codec.most_tokens), min(_GENERATED, codec.most_new_tokens)) for n in _PROMPTS]
    with torch.inference_mode():
        if isinstance(net, Generator):
            shared = codec.most_new_tokens - 1 if net.start is None else 0  # positions of what is generated
            generate(net, [text(codec.most_tokens + shared, 1)], None)
            same = _generates_the_same(net, mixed)
        else:
            classify(net, [text(codec.most_tokens, 0)])
            same = _near(np.stack(classify(net, mixed)), np.concatenate([classify(net, [each]) for each in mixed]))
    if not same:
        raise SpecError(
            f"{name}: a {type(getattr(net, 'net', net)).__name__} answers otherwise in a batch than by itself; "
            "docs/texts.md says which networks can be served"
        )


def _generates_the_same(generator: Generator, texts: list[Text]) -> bool:
    """Whether the logits by iterations with a cache are those of the network that is given all at once."""
    steps: list[Tensor] = []
    hook = generator.net.register_forward_hook(lambda _, __, output: steps.append(output.logits[:, -1].clone()))
    try:
        outputs = generate(generator, texts, None)
    finally:
        hook.remove()
    together = torch.stack(steps, 1)
    rows = zip(together, texts, outputs, strict=True)
    return all(_near(row.numpy(), _at_once(generator, text, output.tokens).numpy()) for row, text, output in rows)


def _at_once(generator: Generator, text: Text, tokens: list[int]) -> Tensor:
    """The logits that each of the generated tokens was taken by, [tokens, vocabulary]."""
    net, before = generator.net, tokens[:-1]
    if generator.start is None:
        logits: Tensor = net(input_ids=torch.tensor([[*text.tokens, *before]])).logits
        return logits[0, -len(tokens) :]
    if generator.positions is not None:
        generator.positions.rows = torch.arange(len(tokens))[None]
    prompt, begun = torch.tensor([text.tokens]), torch.tensor([[generator.start, *before]])
    logits = net(input_ids=prompt, decoder_input_ids=begun).logits
    return logits[0]


def _near(some: Any, others: Any) -> bool:
    return bool(np.abs(some - others).max() <= _TOLERANCE * np.abs(others).max())
