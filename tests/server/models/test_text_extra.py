"""Where the extra `text` is not installed: all else works, and who asks for a text model learns what to install."""

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
def test_a_command_says_what_to_install(command: str) -> None:
    done = run(f"from {command}.cli import main; main()", "m=text-generator", "--device", "cpu")
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if "load average" not in line]
    assert len(said) == 1
    assert 'm is a text model, which needs transformers; in the clone pip install ".[text]"' in said[0]


def test_pictures_are_served_without_it() -> None:
    done = run(
        "import torch, numpy as np; from server.backends.executor import Batch; "
        "from server.backends.loading import load, device_of; "
        "device = device_of(load({'net': 'squeezenet1_1'}, 'random', {'net': 1}), torch.device('cpu')); "
        "print(device.serve(Batch('net', [np.zeros((224, 224, 3), np.uint8)]))[0].shape)"
    )
    assert (done.returncode, done.stdout) == (0, "(1000,)\n"), done.stderr
