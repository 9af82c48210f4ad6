"""Without the extra `text`: image models work, and the error of a text model names what to install."""

import os
import subprocess
import sys

import pytest

BLOCKED = "import sys; sys.modules['transformers'] = None; "


def run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BLOCKED + code, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


@pytest.mark.parametrize("command", ["server", "profiler"])
def test_the_error_of_a_command_names_what_to_install(command: str) -> None:
    done = run(f"from {command}.cli import main; main()", "m=text-generator", "--device", "cpu")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "load average" not in line]
    assert len(lines) == 1
    assert 'm is a text model, which needs transformers; in the clone pip install ".[text]"' in lines[0]


def test_image_models_are_served_without_it() -> None:
    done = run(
        "import torch, numpy as np; from server.backends.executor import Batch; "
        "from server.backends.loading import make_device; from server.models.sources import source_of; "
        "model = source_of('squeezenet1_1').load('net', 'random', 1, 1); "
        "device = make_device([model], torch.device('cpu')); "
        "print(device.serve(Batch('net', [np.zeros((224, 224, 3), np.uint8)]))[0].shape)"
    )
    assert (done.returncode, done.stdout) == (0, "(1000,)\n"), done.stderr
