"""Maximum throughput of the gateway: one server process, a device of 1 us a batch, wrk with 32 connections.

A call has one 150,528-byte image by the Open Inference Protocol and the classification output. The server and the
baseline of benchmarks/servers/bare_fastapi.py are measured in turns. Needs Debian's wrk.
"""

import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.support.harness import argument_parser, save_record, serving, serving_bare_fastapi

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
    (folder / "body").write_bytes(document + pixels)
    script = folder / "post.lua"
    script.write_text(_LUA.format(body=folder / "body", length=len(document)))
    return profile, script


def _wrk(url: str, script: Path) -> dict[str, float]:
    command = ["wrk", "-t1", "-c32", "-d10s", "--latency", "-s", str(script), f"{url}/v2/models/googlenet/infer"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bad = re.findall(r"Non-2xx or 3xx responses: (\d+)", text)
    rate = float(re.findall(r"Requests/sec:\s+([\d.]+)", text)[0])
    return {"requests_per_s": rate, "not_200": int(bad[0]) if bad else 0}


def main() -> None:
    """Print and record calls a second of both servers, their ratio, and the CPU time when idle."""
    argument_parser(__doc__).parse_args()
    if shutil.which("wrk") is None:
        print("skipped: wrk is not installed (apt-get install wrk)")
        return
    with tempfile.TemporaryDirectory() as name:
        profile, script = _files(Path(name))
        ours, baseline = [], []
        arguments = ("googlenet", "--device", f"emulated:{profile}", "--policy", "greedy")
        with (
            serving(*arguments) as server,
            serving_bare_fastapi(str(profile)) as bare,
        ):
            idle = server.cpu_seconds()
            time.sleep(10)
            idle = (server.cpu_seconds() - idle) / 10
            for _ in range(3):
                baseline.append(_wrk(bare.url, script))
                ours.append(_wrk(server.url, script))
    ratio = median(a["requests_per_s"] / b["requests_per_s"] for a, b in zip(ours, baseline, strict=True))
    record = {"ours": ours, "bare": baseline, "idle_cpu_share": idle, "median_ratio": ratio}
    save_record("ceiling", record)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
