"""Text generation: a small decoder in torch, which continues a prompt byte by byte."""

import numpy as np
import torch
from torch import nn

from batchwright import BadInput, Model, Tensor

VOCABULARY = 256  # a token is a byte
WIDTH = 64
LONGEST = 256  # tokens of a prompt
NEW = 16  # tokens that are generated


class Decoder(nn.Module):
    """Tokens [n, length] to the scores of each next token [n, length, VOCABULARY]."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST + NEW, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.tokens(tokens) + self.positions.weight[: len(causal)], mask=causal))


class Generation(Model):
    """Continues a prompt by NEW tokens, each the most probable one."""

    inputs = {"prompt": Tensor("INT64", [-1], pad=-1)}
    outputs = {"continuation": Tensor("INT64", [NEW])}
    lengths = [4, 64, LONGEST]
    torch = True  # run takes and returns tensors on the device

    def load(self, device):
        torch.manual_seed(0)  # random weights; a trained model calls load_state_dict here
        self.network = Decoder().eval().to(device)

    def run(self, prompt):
        if prompt.max() >= VOCABULARY:
            raise BadInput(f"a token is {prompt.max()}; send 0 to {VOCABULARY - 1}")
        ends = (prompt >= 0).sum(dim=1, keepdim=True).clamp(min=1)  # the prompts are padded to the longest
        tokens = nn.functional.pad(prompt.clamp(min=0), (0, NEW))
        for step in range(NEW):  # what is right of a token does not change its scores
            scores = self.network(tokens).argmax(dim=2)
            tokens.scatter_(1, ends + step, scores.gather(1, ends + step - 1))
        return {"continuation": tokens.gather(1, ends + torch.arange(NEW, device=tokens.device))}

    def decode(self, body, content_type):
        if not body:
            raise ValueError("the prompt is empty")
        return {"prompt": np.frombuffer(body, np.uint8).astype(np.int64)}

    def render(self, outputs):
        return {"text": bytes(outputs["continuation"].tolist()).decode(errors="replace")}
