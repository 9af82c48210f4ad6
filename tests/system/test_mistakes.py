"""Mistakes on the command line and in calls: each is one line that says what is wrong, the value and the remedy."""

import errno
import io
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.harness import serving
from loadgen.cli import main as generate_load
from policies.command_line.cli import main as solve_policy
from profiler.cli import main as profile_model
from server.cli import main as serve_model
from tests.support.http_client import fetch

COMMANDS = {
    "serve-model": serve_model,
    "profile-model": profile_model,
    "solve-policy": solve_policy,
    "generate-load": generate_load,
}
EMULATED = "serve-model googlenet --device emulated:googlenet-tesla-p4"
SIMULATED = "generate-load --simulate googlenet-tesla-p4"
GREEDY = f"{SIMULATED} --policy greedy --rate 10 --duration 1"
PROFILED = "profile-model m --device emulated:googlenet-tesla-p4 --quick --max-batch-size 1"
SOLVED = "solve-policy googlenet-tesla-p4 --load 0.5"
ON_CPU = "serve-model squeezenet1_1 --device cpu --log-level error"
OWN = "serve-model m=shapes.py:{} --device cpu --log-level error"
MISTAKES = {
    "serve-model": "no models given: name at least one",
    "serve-model googlenett": "no torchvision classification model 'googlenett'; there is googlenet",
    "serve-model googlenet --policy greddy": "unknown policy 'greddy': choose one of greedy",
    "serve-model googlenet --device gpu": "no device 'gpu'; give auto, cpu, cuda:N or emulated:PROFILE",
    "serve-model googlenet --device cuda:9": "no CUDA device 9: this machine has no driver of a GPU; give cpu or auto",
    "serve-model googlenet --device emulated:p4": "no profile 'p4' .*: give a readable file, or one of googlenet-h100",
    "serve-model m=nofile.py:Model": "no file '.*nofile.py'; give NAME=FILE.py:CLASS",
    "serve-model m=model.py:Model": "has no class 'Model' derived from batchwright.Model; give ",
    "serve-model m=model.py": "is given without a class; give .*model.py:CLASS",
    "serve-model m=broken.py:M": "line 1: ModuleNotFoundError: No module named 'nosuch'",
    "serve-model m=nofile.onnx": "no file '.*nofile.onnx'; give NAME=FILE.onnx",
    "serve-model m=nofile.pt2": "no file '.*nofile.pt2'; give NAME=FILE.pt2",
    "serve-model m=oip:localhost:8000/m": "not the URL of a model; give NAME=oip:http://HOST:PORT/MODEL",
    "serve-model googlenet --weights none.pth": "no weights file 'none.pth'; give pretrained, auto, random",
    ON_CPU: r"no weights for squeezenet1_1: the download failed \(.*\); put https://.* into .*, or give",
    f"{ON_CPU} --weights bad.json": "weights 'bad.json' cannot be read .*; give a readable file of model.state_dict",
    f"{ON_CPU} --weights other.pth": "weights 'other.pth' do not fit squeezenet1_1: Missing .*; give a state dict of",
    f"{ON_CPU} --weights damaged.pth": r"'damaged.pth' cannot be read \(.*\); give a readable file",
    OWN.format("Wide"): r"output y of shape \[1, 3\]; the batch takes \[1, 2\]$",
    OWN.format("Misnamed"): "the model returned no output y$",
    OWN.format("Double"): "the model returned output y as float64; its datatype is FP32$",
    OWN.format("Picky"): "KeyError: 'not in the table'; .* give it a real sample by --sample or samples()",
    OWN.format("Flat"): "class Flat needs `outputs`, such as .*, not {'y': 2}",
    OWN.format("Pairs") + " --sample three.json": r"x has the shape \[3\], the model takes \[2\]; give one",
    OWN.format("Pairs") + " --sample locked.json": r"'locked.json' \(Permission denied\); give a readable",
    f"{EMULATED} --port 80000": "--port: should be less than or equal to 65535, not '80000'",
    f"{EMULATED} --port TAKEN": "cannot listen on .*: .*in use; choose another --host or --port",
    f"{EMULATED} --host 300.0.0.1": "cannot listen on 300.0.0.1:.*; choose another --host or --port",
    f"{EMULATED} --prot 8000": r"No such option: --prot .*--port",
    f"{EMULATED} --slo-p95-ms 5ms": "--slo-p95-ms: should be a valid number, not '5ms'",
    f"{EMULATED} --slo-p95-ms -5": "--slo-p95-ms: should be greater than 0, not '-5'",
    f"{EMULATED} --optimise fast": "--optimise: should be 'auto', 'eager' or 'none', not 'fast'",
    f"{EMULATED} --config nofile.yaml": "no configuration file 'nofile.yaml': give the path of a YAML file",
    f"{EMULATED} --config bad.yaml": "the configuration 'bad.yaml' cannot be read: .*line 2.*; give a readable YAML",
    f"{EMULATED} --config locked.yaml": "configuration 'locked.yaml' cannot be read: Permission denied; give a",
    f"{EMULATED} --profile locked.json": r"no profile 'locked.json' \(Permission denied\): give a readable file, or",
    f"{EMULATED} --profile bad.json": "profile 'bad.json' is malformed: Invalid JSON.*; correct the file",
    f"{EMULATED} --policy nofile.json": "no policy file 'nofile.json' .*, or write one with solve-policy --output",
    f"{EMULATED} --policy locked.json": r"no policy file 'locked.json' \(Permission denied\): give a readable file, or",
    f"{EMULATED} --policy bad.json": "policy file 'bad.json' is malformed: Invalid JSON.*; solve it again",
    f"{EMULATED} --policy smdp:w2": "w2 has no value; write smdp:w2=VALUE",
    f"{EMULATED} --policy resnet50=greedy": "for 'resnet50', which is not served; name one of googlenet",
    f"{EMULATED} --api-key-file nokeys": "the key file 'nokeys' cannot be read: .*; give a text file",
    f"{EMULATED} --api-key-file locked": "the key file 'locked' cannot be read: Permission denied; give a text file",
    f"{EMULATED} --tls-cert a.pem --tls-key b.pem": "the TLS certificate 'a.pem' cannot be read: .*; give a readable",
    f"{EMULATED} --tls-cert a.pem": "only one of --tls-cert and --tls-key is given; give both, or neither",
    f"{EMULATED} --max-batch-size 64": r"--max-batch-size 64 is outside 1\.\.32.*; choose one of those",
    "profile-model googlenet --output nofolder/x.json": "cannot write --output 'nofolder/x.json' .*; choose another",
    f"{PROFILED} --output locked/x.json": r"cannot write --output 'locked/x.json' \(Permission .*; choose",
    f"{PROFILED} --output /dev/full": r"cannot write --output '/dev/full' \(No space left on device\); choose",
    "profile-model googlenet --max-batch-size 0": "'--max-batch-size': Input should be greater",
    "solve-policy googlenet-tesla-p4": "give either --arrival-rate PER_SECOND or --load RHO",
    "solve-policy googlenet-tesla-p4 --load 1.5": "load 1.5 is 1 or more: .*; lower the rate, .* plan",
    f"{SOLVED} --slo-share 10": "--slo-share '10' is not a valid bound; give MS:SHARE",
    f"{SOLVED} --slo-p95-ms 0.1": "no policy keeps a share .*; raise the bound",
    f"{SOLVED} --w1 0": "--w1 0 does not limit response times; give a positive weight",
    f"{SOLVED} --method rvi --epsilon 0": "--epsilon 0 is invalid; give a positive number such as 0.01",
    f"{SOLVED} --output /dev/full": r"cannot write --output '/dev/full' \(No space left on device\); choose another",
    f"{SOLVED} --output locked/x.json": r"cannot write --output 'locked/x.json' \(Permission denied\); choose another",
    "solve-policy resnet50-t4-fp16 --load 0.5 --power-cap-w 9": "is in W, .* saves busy_time; give resource_cap",
    "generate-load": "give the URL of a server, or --simulate PROFILE",
    "generate-load 127.0.0.1:1 --rate 1 --duration 1": "'127.0.0.1:1' is no URL; write http://HOST:PORT",
    "generate-load http://127.0.0.1:1 --rate 1 --duration 1": "no server responds at .*; start one with serve-model",
    f"{SIMULATED} --rate 10 --duration 1": "--simulate needs --policy SPEC",
    f"{GREEDY} --rate -1": "--rate is -1; give a number above 0",
    f"{GREEDY} --arrivals poison": "unknown arrivals 'poison': choose poisson, constant",
    f"{GREEDY} --arrivals trace:nofile.csv": "no trace file 'nofile.csv' .*: give a readable CSV file with a TIMESTAMP",
    f"{GREEDY} --arrivals trace:locked.csv": r"no trace file 'locked.csv' \(Permission denied\): give a readable CSV",
    f"{GREEDY} --report /dev/full": r"cannot write --report '/dev/full' \(No space left on device\); choose another",
    f"{GREEDY} --plot x.bmp": r"unknown plot format '.bmp' \(--plot x.bmp\); give .pdf, .png, .svg",
    f"{GREEDY} --sizes uniform:1:20": "has no lengths; simulate longest, or one with length_service_time_s",
}


MODELS = """
from batchwright import Model, Tensor


class Pairs(Model):
    inputs = {"x": Tensor("FP32", [2])}
    outputs = {"y": Tensor("FP32", [2])}

    def run(self, x):
        return {"y": x}


class Wide(Pairs):
    def run(self, x):
        return {"y": x.repeat(3, 1)[:, :3]}


class Misnamed(Pairs):
    def run(self, x):
        return {"x": x}


class Double(Pairs):
    def run(self, x):
        return {"y": x.astype("float64")}


class Picky(Pairs):
    def run(self, x):
        raise KeyError("not in the table")


class Flat(Pairs):
    outputs = {"y": 2}
"""
KEYS = f"user predict {sha256(b'user').hexdigest()}\nroot admin {sha256(b'root').hexdigest()}\n"
USER, ROOT, UNKNOWN = ({"Authorization": f"Bearer {key}"} for key in ("user", "root", "unknown"))
PAIRS, POLICY = "POST /v2/models/pairs/infer", "PUT /admin/models/googlenet/policy"


def tensor(shape: str, data: str, name: str = "x", datatype: str = "FP32") -> str:
    return f'{{"inputs": [{{"name": "{name}", "datatype": "{datatype}", "shape": {shape}, "data": {data}}}]}}'


CALLS: list[tuple[Mapping[str, str], str, str, int, str]] = [  # headers, call, body, status and error
    ({}, "POST /predict/googlenet", "", 401, "the route needs an API key; send it as Authorization: Bearer KEY"),
    (UNKNOWN, "GET /v2", "", 401, "the key is unknown; check it, or have the server's operator add it"),
    (ROOT, "GET /v2", "", 403, "key root has the scope admin, the route needs predict; use another key"),
    (USER, POLICY, "", 403, "key user has the scope predict, the route needs admin; use another key"),
    (USER, "POST /predict/resnet", "", 404, "no model 'resnet'; the server has googlenet, pairs"),
    (USER, "POST /predict", "", 400, "several models are loaded; name one in the path: googlenet, pairs"),
    (USER, "GET /v2/models/pairs/versions/7", "", 404, "no version '7' of the model; there is 1"),
    (USER, "GET /v2/model", "", 404, "Not Found: GET '/v2/model'; /docs lists the routes"),
    (USER, "GET /predict/pairs", "", 405, "Method Not Allowed: GET '/predict/pairs'; /docs lists the routes"),
    (USER, "POST /predict/googlenet", "hello", 400, "5 bytes that start with b'hell' are not a JPEG or PNG; send a"),
    (USER, "POST /predict/pairs", '{"x": [1]}', 400, r"the body is {'x': \[1\]}; send {\"inputs\": {...}} with x"),
    (USER, "POST /predict/pairs", '{"inputs": {"x": [1]}}', 400, r"input x .*\[1\].*\[2\]"),
    (
        USER,
        PAIRS,
        tensor("[1, 3]", "[1, 2, 3]"),
        400,
        r"input x: the shape is \[1, 3\]; .* takes `x` as FP32 \[-1, 2\]",
    ),
    (USER, PAIRS, tensor("[1, 2]", "[1, 2, 3]"), 400, r"`data` \(3\) does not fit shape \[1, 2\]; nest it so, or send"),
    (
        USER,
        PAIRS,
        tensor("[1, 2]", "[1, 2]", "z"),
        400,
        r"the input's name is 'z'; the model takes `x` as FP32 \[-1, 2\]",
    ),
    (
        USER,
        PAIRS,
        tensor("[1, 2]", "[1, 2]", "x", "INT64"),
        400,
        "the datatype is 'INT64'; the model takes `x` as FP32",
    ),
    (USER, PAIRS, "{", 400, r"not valid JSON \(.*column 2.*\); send an object with `inputs`"),
    (USER | {"Content-Length": str(10**8)}, PAIRS, "", 413, "the body has 100000000 bytes, the limit is .*; send "),
    (USER | {"Content-Encoding": "br"}, PAIRS, "{}", 415, "Content-Encoding is 'br'; send gzip, deflate or identity"),
    (USER | {"X-Timeout-Ms": "soon"}, PAIRS, "{}", 400, "X-Timeout-Ms is 'soon'; send the milliseconds that"),
    (ROOT, POLICY, '{"policy": "greddy"}', 400, "unknown policy 'greddy': choose one of greedy, "),
    (ROOT, POLICY, '{"policy": "static:99"}', 400, r"policy 'static:99': 99 is not a whole number within 1\.\.32"),
    (
        ROOT,
        POLICY,
        '{"policy": "mine.json"}',
        400,
        "the policy 'mine.json' is a file, .*; start the server with it, or",
    ),
    (ROOT, POLICY, "greedy", 400, r'not a valid policy change \(Invalid JSON.*\); send {"policy": "SPEC"}'),
    (ROOT, "PUT /admin/devices/7", '{"serving": false}', 404, "there is no device 7; there are 1, counted from 0"),
    (ROOT, "PUT /admin/devices/one", '{"serving": false}', 400, "path.index is 'one'; it should be a valid integer"),
]
LOADS = {  # on the same server
    "": "requires an API key that it knows; give --api-key KEY, or set BATCHWRIGHT_API_KEY",
    "--api-key root": "rejects this API key; give --api-key KEY, or set BATCHWRIGHT_API_KEY",
    "--api-key user --model resnet": r"has no model 'resnet' that is ready \(ready: googlenet, pairs\); choose one",
    "--api-key user --model googlenet --image locked.png": r"'locked.png' \(Permission denied\); give --image an image",
    "--api-key user --model pairs --sample three.json": r"x has the shape \[3\], the model takes \[2\]; give one",
    "--api-key user --model googlenet --compare greedy": "--compare needs one of scope admin: give --api-key KEY",
}


def without_rights(function: Callable[..., Any]) -> Callable[..., Any]:
    """Open files as `function` does, but none whose name begins with "locked", nor one in such a folder."""

    def opened(file: Any, *arguments: Any, **named: Any) -> Any:
        if "/locked" in f"/{file}":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return function(file, *arguments, **named)

    return opened


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with broken files and files without rights; no network, and no GPU.

    serve-model must not end the tests' process.
    """
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.yaml").write_text("models: [googlenet\n")
    (tmp_path / "model.py").write_text("class M: pass\n")
    (tmp_path / "broken.py").write_text("import nosuch\n")
    (tmp_path / "shapes.py").write_text(MODELS)
    (tmp_path / "three.json").write_text('{"inputs": {"x": [1, 2, 3]}}')
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "locked").mkdir()
    for name in ("locked.yaml", "locked.png"):
        (tmp_path / name).touch()
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    (tmp_path / "damaged.pth").write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    functions: dict[str, Callable[..., Any]] = {"builtins.open": open, "io.open": io.open, "os.open": os.open}
    for name, function in functions.items():
        monkeypatch.setattr(name, without_rights(function))  # since root has the rights to all files
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # no network, in workers neither
    monkeypatch.setattr("server.backends.real_device._DRIVERS", ())
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr("server.cli.exit_on_sigterm", lambda: None)
    monkeypatch.setenv("BATCHWRIGHT_PORT", "0")  # some mistakes are found only after the port is bound
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs a command line, and returns its error, which is one line."""

    def run(line: str) -> str:
        words = line.split()
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as caught:
            COMMANDS[words[0]]()
        error = capsys.readouterr().err
        assert caught.value.code == 2, error
        assert error.startswith(f"{words[0]}: ")
        assert error.count("\n") == 1, error
        assert len(error) < 600
        return error

    return run


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(line: str, error_of: Callable[[str], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert re.search(MISTAKES[line], error_of(line.replace("TAKEN", str(taken.getsockname()[1]))))


def test_a_mistake_in_a_call_is_one_line_with_the_remedy(tmp_path: Path, error_of: Callable[[str], str]) -> None:
    models = ("googlenet", f"pairs={tmp_path}/shapes.py:Pairs", "--device", "emulated:googlenet-tesla-p4")
    with serving(*models, "--policy", "greedy", "--api-key-file", f"{tmp_path}/keys") as server:
        for headers, call, body, status, message in CALLS:
            method, path = call.split()
            response = fetch(server.url, path, body.encode() or None, method, headers)
            error = response.json["error"]
            assert (response.status, bool(re.search(message, error))) == (status, True), (call, body, error)
            assert "\n" not in error
            assert len(error) < 300
        for flags, message in LOADS.items():
            assert re.search(message, error_of(f"generate-load {server.url} --rate 1 --duration 1 {flags}"))
