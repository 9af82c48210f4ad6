"""A sentence encoder: a Transformer of two layers in torch, with a tokenizer of its own."""

import re
import zlib

import numpy as np
import torch
from torch import nn

from batchwright import Model, Tensor

VOCABULARY = 5000
WIDTH = 64
LENGTHS = (8, 16, 32, 64)  # sentences are padded to one of these, so that few shapes occur


def tokenize(text):
    """Token ids of a text, int64 [length]: the hash of each word, padded with 0."""
    words = re.findall(r"\w+", text.lower())[: LENGTHS[-1]]
    length = next(length for length in LENGTHS if length >= len(words))
    ids = np.zeros(length, np.int64)
    ids[: len(words)] = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
    return ids


class Network(nn.Module):
    """Token ids [n, length] to unit vectors [n, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTHS[-1], WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)

    def forward(self, ids):
        padding = ids == 0
        hidden = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        hidden = self.layers(hidden, src_key_padding_mask=padding)
        words = (~padding).unsqueeze(2)
        return nn.functional.normalize((hidden * words).sum(dim=1) / words.sum(dim=1), dim=1)


class Encoder(Model):
    """Embeddings of sentences."""

    inputs = {"ids": Tensor("INT64", [-1])}
    outputs = {"embedding": Tensor("FP32", [WIDTH])}
    torch = True  # run takes and returns tensors on the device

    def load(self, device):
        torch.manual_seed(0)  # random weights; a trained model calls load_state_dict here
        self.network = Network().eval().to(device)

    def run(self, ids):
        return {"embedding": self.network(ids)}

    def samples(self):
        return [{"ids": tokenize("the quick brown fox jumps over the lazy dog")}]

    def decode(self, body, content_type):
        ids = tokenize(body.decode())
        if not ids.any():
            raise ValueError("the text has no words")
        return {"ids": ids}

    def render(self, outputs):
        return {"embedding": outputs["embedding"].round(4)}
