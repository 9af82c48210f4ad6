"""Write one torch model as an exported program, pair.pt2, and as an ONNX file, pair.onnx.

Usage: python make_model.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from torch import nn


class Pair(nn.Module):
    """How similar two vectors are: two inputs [n, 8], two outputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, a, b):
        a, b = self.layers(a), self.layers(b)
        return {"similarity": nn.functional.cosine_similarity(a, b), "difference": a - b}


def main(folder):
    """Export the model; its batch dimension is dynamic, and named alike for both inputs."""
    torch.manual_seed(0)  # random weights; a trained model calls load_state_dict here
    model, example = Pair().eval(), (torch.zeros(2, 8), torch.zeros(2, 8))
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(model, example, dynamic_shapes={"a": {0: batch}, "b": {0: batch}})
    torch.export.save(program, folder / "pair.pt2")
    names = ["similarity", "difference"]
    torch.onnx.export(program, (), folder / "pair.onnx", output_names=names, external_data=False)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
