"""Mistakes that people make on the command line: each is one line that says what is wrong, the value and the remedy."""

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from loadgen.cli import main as generate_load
from policies.cli import main as solve_policy
from profiler.cli import main as profile_model
from server.cli import main as serve_model

COMMANDS = {
    "serve-model": serve_model,
    "profile-model": profile_model,
    "solve-policy": solve_policy,
    "generate-load": generate_load,
}
EMULATED = "serve-model googlenet --device emulated:googlenet-tesla-p4"
SIMULATED = "generate-load --simulate googlenet-tesla-p4"
GREEDY = f"{SIMULATED} --policy greedy --rate 10 --duration 1"
MISTAKES = {
    "serve-model": "no models given: name at least one",
    "serve-model googlenett": "no torchvision classification model 'googlenett'; there is googlenet",
    "serve-model googlenet --policy greddy": "unknown policy 'greddy': choose one of greedy",
    "serve-model googlenet --device gpu": "no device 'gpu'; give auto, cpu, cuda:N or emulated:PROFILE",
    "serve-model googlenet --device cuda:9": "no CUDA device 9 among the .*; give ",
    "serve-model googlenet --device emulated:p4": "no profile 'p4' .*: give a file, or one of googlenet-h200",
    "serve-model m=nofile.py:Model": "no file '.*nofile.py'; give NAME=FILE.py:CLASS",
    "serve-model m=model.py:Model": "has no class 'Model' derived from batchwright.Model; give ",
    "serve-model m=model.py": "is given without a class; give .*model.py:CLASS",
    "serve-model m=broken.py:M": "line 1: ModuleNotFoundError: No module named 'nosuch'",
    "serve-model m=nofile.onnx": "no file '.*nofile.onnx'; give NAME=FILE.onnx",
    "serve-model m=nofile.pt2": "no file '.*nofile.pt2'; give NAME=FILE.pt2",
    "serve-model m=oip:localhost:8000/m": "not the URL of a model; give NAME=oip:http://HOST:PORT/MODEL",
    "serve-model googlenet --weights none.pth": "no weights file 'none.pth'; give pretrained, auto, random",
    f"{EMULATED} --port 80000": "--port: should be less than or equal to 65535, not '80000'",
    f"{EMULATED} --port TAKEN": "cannot listen on .*: .*in use; choose another --host or --port",
    f"{EMULATED} --host 300.0.0.1": "cannot listen on 300.0.0.1:.*; choose another --host or --port",
    f"{EMULATED} --prot 8000": r"No such option: --prot .*--port",
    f"{EMULATED} --slo-p95-ms 5ms": "--slo-p95-ms: should be a valid number, not '5ms'",
    f"{EMULATED} --slo-p95-ms -5": "--slo-p95-ms: should be greater than 0, not '-5'",
    f"{EMULATED} --gateways many": "--gateways: give auto, or a number from 0 to 64, not 'many'",
    f"{EMULATED} --optimise fast": "--optimise: should be 'auto', 'none' or 'compile', not 'fast'",
    f"{EMULATED} --config nofile.yaml": "no configuration file 'nofile.yaml': give the path of a YAML file",
    f"{EMULATED} --config bad.yaml": "the configuration 'bad.yaml' cannot be read: .*line 2",
    f"{EMULATED} --profile bad.json": "profile 'bad.json' is malformed: Invalid JSON.*; correct the file",
    f"{EMULATED} --policy nofile.json": "no policy file 'nofile.json' .*: write one with solve-policy --output",
    f"{EMULATED} --policy bad.json": "policy file 'bad.json' is malformed: Invalid JSON.*; solve it again",
    f"{EMULATED} --policy smdp:w2": "w2 has no value; write smdp:w2=VALUE",
    f"{EMULATED} --policy resnet50=greedy": "for 'resnet50', which is not served; name one of googlenet",
    f"{EMULATED} --api-key-file nokeys": "the key file 'nokeys' cannot be read: .*; give a text file",
    f"{EMULATED} --tls-cert a.pem": "only one of --tls-cert and --tls-key is given; give both, or neither",
    f"{EMULATED} --max-batch-size 64": r"--max-batch-size 64 is outside 1\.\.32.*; choose one of those",
    "profile-model googlenet --output nofolder/x.json": "cannot write --output 'nofolder/x.json' .*; choose another",
    "profile-model googlenet --max-batch-size 0": "'--max-batch-size': Input should be greater",
    "solve-policy googlenet-tesla-p4": "give either --arrival-rate PER_SECOND or --load RHO",
    "solve-policy googlenet-tesla-p4 --load 1.5": "load 1.5 is 1 or more: .*; lower the rate, .* plan",
    "solve-policy googlenet-tesla-p4 --load 0.5 --slo-share 10": "--slo-share '10' is not a valid bound; give MS:SHARE",
    "solve-policy googlenet-tesla-p4 --load 0.5 --slo-p95-ms 0.1": "no policy keeps a share .*; raise the bound",
    "solve-policy resnet50-t4-fp16 --load 0.5 --w2 1": "--w2 1 weighs power, .* no energies; give 0, or a profile",
    "generate-load": "give the URL of a server, or --simulate PROFILE",
    "generate-load 127.0.0.1:1 --rate 1 --duration 1": "'127.0.0.1:1' is no URL; write http://HOST:PORT",
    "generate-load http://127.0.0.1:1 --rate 1 --duration 1": "no server responds at .*; start one with serve-model",
    f"{SIMULATED} --rate 10 --duration 1": "--simulate needs --policy SPEC",
    f"{GREEDY} --rate -1": "--rate is -1; give a number above 0",
    f"{GREEDY} --arrivals poison": "unknown arrivals 'poison': choose poisson, constant",
    f"{GREEDY} --arrivals trace:nofile.csv": "no trace file 'nofile.csv': give a CSV file with a TIMESTAMP column",
    f"{GREEDY} --plot x.bmp": r"unknown plot format '.bmp' \(--plot x.bmp\); give .pdf, .png, .svg",
    f"{GREEDY} --sizes uniform:1:20": "has no lengths; simulate longest, or one with length_service_time_s",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with some broken files; serve-model must not end the tests' process."""
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.yaml").write_text("models: [googlenet\n")
    (tmp_path / "model.py").write_text("class M: pass\n")
    (tmp_path / "broken.py").write_text("import nosuch\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr("server.cli.exit_on_sigterm", lambda: None)
    monkeypatch.setenv("BATCHWRIGHT_GATEWAYS", "0")  # auto would start processes on a larger machine


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = line.replace("TAKEN", str(taken.getsockname()[1])).split()
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as caught:
            COMMANDS[words[0]]()
    error = capsys.readouterr().err
    assert caught.value.code == 2, error
    assert error.startswith(f"{words[0]}: ")
    assert error.count("\n") == 1
    assert len(error) < 600
    assert re.search(MISTAKES[line], error), error
