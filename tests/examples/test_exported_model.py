"""The exported program and the ONNX file: both answer as the torch model they were made from."""

import runpy
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples.exported_model.make_model import Pair
from tests.support import example
from tests.support.triton import infer


def run_command(command: Sequence[str], **options: Any) -> Any:
    """As subprocess.run, but a Python script runs in this process: the exporters take seconds to import."""
    if command[0] != sys.executable:
        return subprocess.run(command, check=options.pop("check"), **options)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(sys, "argv", [*command[1:]])
        return runpy.run_path(command[1], run_name="__main__")


@pytest.mark.skipif(
    not all(map(find_spec, ("onnxruntime", "onnxscript"))), reason="onnxruntime or onnxscript is not installed"
)
def test_both_files_answer_as_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "subprocess", SimpleNamespace(run=run_command))
    torch.manual_seed(0)
    model = Pair().eval()
    a, b = np.random.default_rng(1).normal(size=(2, 20, 8)).astype(np.float32)
    with torch.inference_mode():
        expected = {name: value.numpy() for name, value in model(torch.from_numpy(a), torch.from_numpy(b)).items()}
    with example.running_example("exported_model", tmp_path) as running:
        assert running.call()["outputs"].keys() == expected.keys()
        answers = [infer(running.server.url, name, a=a, b=b) for name in ("program", "onnx")]
    for answer in answers:
        assert answer.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(answer[name], value, atol=1e-5)
