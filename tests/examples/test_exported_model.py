"""The exported program and the ONNX file: both answer as the torch model they were made from."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.exported_model.make_model import Pair
from tests.support.example import running_example
from tests.support.triton import infer


@pytest.mark.skipif(
    not all(map(find_spec, ("onnxruntime", "onnxscript"))), reason="onnxruntime or onnxscript is not installed"
)
def test_both_files_answer_as_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pair().eval()
    a, b = np.random.default_rng(1).normal(size=(2, 20, 8)).astype(np.float32)
    with torch.inference_mode():
        expected = {name: value.numpy() for name, value in model(torch.from_numpy(a), torch.from_numpy(b)).items()}
    with running_example("exported_model", tmp_path) as example:
        assert example.call()["outputs"].keys() == expected.keys()
        answers = [infer(example.server.url, name, a=a, b=b) for name in ("program", "onnx")]
    for answer in answers:
        assert answer.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(answer[name], value, atol=1e-5)
