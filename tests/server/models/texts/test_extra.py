"""Without the extra `text`: image models work, and the error of a text model names what to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# One process imports what all jobs need, which takes more than a second, and forks for each. All of them end by _exit,
# since the deletion of torch's modules takes half a second.
PROGRAM = """
import os, sys
from importlib import import_module
sys.modules["transformers"] = None
import numpy as np, torch
import profiler.cli, server.cli
from profiler import first_profile
from server.app import serving
from server.backends.executor import Batch
from server.backends.loading import make_device
from server.models.sources import source_of

def serve_image():
    torchvision_source = import_module("server.models.images.torchvision_source")
    torchvision_source._CALIBRATION_IMAGES = 2  # which take most of the loading
    model = source_of("squeezenet1_1").load("net", "random", 1, 1)
    device = make_device([model], torch.device("cpu"))
    print(device.serve(Batch("net", [np.zeros((224, 224, 3), np.uint8)]))[0].shape)
    sys.exit(0)

jobs = {"server": server.cli.main, "profiler": profiler.cli.main, "image": serve_image}
for name, job in jobs.items():
    if not (pid := os.fork()):
        for descriptor in (1, 2):
            os.dup2(os.open(f"{name}.{descriptor}", os.O_WRONLY | os.O_CREAT), descriptor)
        try:
            job()
        except SystemExit as end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
    with open(f"{name}.code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
os._exit(0)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the exit code, the standard output and the standard error of each job."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-c", PROGRAM, "m=text-generator", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, timeout=120, env=environment, cwd=folder)
    return folder


@pytest.mark.parametrize("command", ["server", "profiler"])
def test_the_error_of_a_command_names_what_to_install(command: str, results: Path) -> None:
    assert (results / f"{command}.code").read_text() == "2"
    lines = [line for line in (results / f"{command}.2").read_text().splitlines() if "load average" not in line]
    assert len(lines) == 1
    assert "m is a text model and needs transformers; install the extra text: pip install transformers" in lines[0]


def test_image_models_are_served_without_it(results: Path) -> None:
    code, out, err = ((results / f"image.{each}").read_text() for each in ("code", "1", "2"))
    assert (code, out) == ("0", "(1000,)\n"), err
