"""Maximum throughput of the gateway: one server process, a device of 1 us a batch, wrk with 32 connections.

A call has one 150,528-byte image by the Open Inference Protocol and the classification output. The server, the
baseline of benchmarks/servers/bare_fastapi.py, and a server with a model of four floats are measured in turns. Needs
Debian's wrk.
"""

import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.support.harness import ROOT, argument_parser, save_record, serving, serving_bare_fastapi

_LUA = """
local file = io.open("{body}", "rb")
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Inference-Header-Content-Length"] = "{length}"
"""


def _files(folder: Path) -> tuple[Path, Path]:
    """Write a profile of 1 us a batch, and wrk's script with the body."""
    profile = folder / "instant.json"
    sizes = {"batch_size": [1, 32], "service_time_s": [1e-6, 1e-6]}
    profile.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "instant", **sizes}))
    pixels = bytes(range(256)) * 588
    size = {"binary_data_size": len(pixels)}
    entry = {"name": "image", "shape": [1, 224, 224, 3], "datatype": "UINT8", "parameters": size}
    outputs = [{"name": "logits", "parameters": {"classification": 1}}]
    document = json.dumps({"inputs": [entry], "outputs": outputs}).encode()
    return profile, _script(folder, "image", document, pixels)


def _script(folder: Path, name: str, document: bytes, tensors: bytes) -> Path:
    """Write wrk's script that sends this JSON with these tensors."""
    (folder / name).write_bytes(document + tensors)
    script = folder / f"{name}.lua"
    script.write_text(_LUA.format(body=folder / name, length=len(document)))
    return script


def _floats(folder: Path) -> Path:
    """Write wrk's script for the model of four floats."""
    entry = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    return _script(folder, "floats", json.dumps({"inputs": [entry], "outputs": outputs}).encode(), bytes(16))


def _wrk(url: str, script: Path, model: str = "googlenet") -> dict[str, float]:
    command = ["wrk", "-t1", "-c32", "-d10s", "--latency", "-s", str(script), f"{url}/v2/models/{model}/infer"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bad = re.findall(r"Non-2xx or 3xx responses: (\d+)", text)
    rate = float(re.findall(r"Requests/sec:\s+([\d.]+)", text)[0])
    return {"requests_per_s": rate, "not_200": int(bad[0]) if bad else 0}


def main() -> None:
    """Print and record calls a second of the servers, their ratios, and the CPU time when idle."""
    argument_parser(__doc__).parse_args()
    if shutil.which("wrk") is None:
        print("skipped: wrk is not installed (apt-get install wrk)")
        return
    with tempfile.TemporaryDirectory() as name:
        profile, script = _files(Path(name))
        ours, baseline, floats = [], [], []
        arguments = ("--device", f"emulated:{profile}", "--policy", "greedy")
        tensors, source = _floats(Path(name)), ROOT / "benchmarks" / "servers" / "four_floats.py"
        with (
            serving("googlenet", *arguments) as server,
            serving(f"floats={source}:FourFloats", *arguments) as tensor_server,
            serving_bare_fastapi(str(profile)) as bare,
        ):
            idle = server.cpu_seconds()
            time.sleep(10)
            idle = (server.cpu_seconds() - idle) / 10
            for _ in range(3):
                baseline.append(_wrk(bare.url, script))
                ours.append(_wrk(server.url, script))
                floats.append(_wrk(tensor_server.url, tensors, "floats"))
    ratio = median(a["requests_per_s"] / b["requests_per_s"] for a, b in zip(ours, baseline, strict=True))
    to_image = median(a["requests_per_s"] / b["requests_per_s"] for a, b in zip(floats, ours, strict=True))
    record = {
        "ours": ours,
        "bare": baseline,
        "four_floats": floats,
        "idle_cpu_share": idle,
        "median_ratio": ratio,
        "four_floats_to_image": to_image,
    }
    save_record("ceiling", record)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
