"""The sentence encoder: answers are those of its network, however long the sentence was padded."""

from pathlib import Path

import numpy as np
import torch

from examples.sentence_encoder.encoder import LENGTHS, Encoder, tokenize
from tests.support.example import running_example
from tests.support.triton import infer

SENTENCES = ["One word", "the quick brown fox jumps over the lazy dog and runs away", "word " * 100]


def test_the_example_answers_as_its_network(tmp_path: Path) -> None:
    model = Encoder()
    model.load("cpu")
    ids = [tokenize(sentence) for sentence in SENTENCES]
    with torch.inference_mode():
        expected = [model.run(torch.from_numpy(each[None]))["embedding"][0].numpy() for each in ids]
    with running_example("sentence_encoder", tmp_path) as example:
        assert len(example.call()["outputs"]["embedding"]) == 64
        for sentence, each, vector in zip(SENTENCES, ids, expected, strict=True):
            rendered = example.call(data=sentence)["outputs"]["embedding"]
            np.testing.assert_allclose(rendered, vector, atol=1e-4)
            twice = infer(example.server.url, "encoder", ids=np.stack([each, each]))["embedding"]
            np.testing.assert_allclose(twice, [vector, vector], atol=1e-6)
        assert example.call(data="...") == {"error": "the model cannot decode the body: the text has no words"}


def test_padding_changes_no_embedding() -> None:
    model = Encoder()
    model.load("cpu")
    ids = tokenize(SENTENCES[0])
    assert len(ids) == LENGTHS[0]
    with torch.inference_mode():
        short, long = (
            model.run(torch.from_numpy(np.pad(ids, (0, length - len(ids)))[None]))["embedding"]
            for length in LENGTHS[:2]
        )
    torch.testing.assert_close(short, long)
    assert len(tokenize(SENTENCES[2])) == LENGTHS[-1]
