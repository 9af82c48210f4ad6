"""Text generation: continuations are those of the network, whatever prompts share the batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from batchwright import BadInput
from examples.generation.generation import LONGEST, NEW, Generation
from tests.support.example import running_example
from tests.support.triton import infer

PROMPTS = [b"The server launches", b"a", b"The policy decides when. " * 8]


@pytest.fixture(scope="module")
def model() -> Generation:
    made = Generation()
    made.load("cpu")
    return made


def continuation(model: Generation, *prompts: bytes) -> NDArray[np.int64]:
    """The tokens that follow each prompt of a batch, int64 [prompts, NEW]."""
    rows = [torch.tensor([*prompt]) for prompt in prompts]
    with torch.inference_mode():
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        return np.asarray(model.run(padded)["continuation"])


def test_a_prompt_is_continued_as_alone_beside_longer_and_shorter_ones(model: Generation) -> None:
    alone = np.concatenate([continuation(model, prompt) for prompt in PROMPTS])
    np.testing.assert_array_equal(continuation(model, *PROMPTS), alone)
    assert alone.shape == (len(PROMPTS), NEW)


def test_a_continuation_can_itself_be_continued(model: Generation) -> None:
    (first,) = continuation(model, PROMPTS[0])
    (rest,) = continuation(model, PROMPTS[0] + bytes(first[:5].tolist()))
    np.testing.assert_array_equal(rest[: NEW - 5], first[5:])


def test_a_token_outside_the_vocabulary_is_bad_input(model: Generation) -> None:
    with pytest.raises(BadInput, match="a token is 256; send 0 to 255"):
        model.run(torch.tensor([[256]]))


def test_the_example_answers_as_its_network(model: Generation, tmp_path: Path) -> None:
    with running_example("generation", tmp_path) as example:
        rendered = model.render({"continuation": continuation(model, PROMPTS[0])[0]})
        assert example.call()["outputs"] == rendered
        for prompt in PROMPTS[1:]:
            expected = model.render({"continuation": continuation(model, prompt)[0]})
            assert example.call(data=prompt.decode())["outputs"] == expected
        twice = infer(example.server.url, "generation", prompt=np.array([[*PROMPTS[0]]] * 2))["continuation"]
        np.testing.assert_array_equal(twice, continuation(model, PROMPTS[0], PROMPTS[0]))
        assert example.call(data="")["error"] == "the model cannot decode the body: the prompt is empty"
        assert example.call(data="x" * (LONGEST + 1))["error"] == (
            f"input prompt has the length {LONGEST + 1}, over the maximum {LONGEST}; send a shorter one"
        )
