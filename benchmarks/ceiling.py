"""The gateway's ceiling: one server process, an emulated device of a microsecond, wrk with 32 kept-alive connections.

Open Inference Protocol, one 150,528-byte picture a call, classification output. Needs Debian's wrk.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.serving import save, serving

_LUA = """
local file = io.open("{body}", "rb")
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Inference-Header-Content-Length"] = "{length}"
"""


def _files(folder: Path) -> tuple[Path, Path]:
    """A profile of one microsecond a batch, and wrk's script with the body."""
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


def main() -> None:
    """Print and record requests a second, and the CPU time of an idle server."""
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    with tempfile.TemporaryDirectory() as name:
        profile, script = _files(Path(name))
        with serving("googlenet", "--device", f"emulated:{profile}", "--policy", "greedy") as server:
            idle = server.cpu_seconds()
            subprocess.run(["sleep", "10"], check=True)
            idle = (server.cpu_seconds() - idle) / 10
            url = f"{server.url}/v2/models/googlenet/infer"
            command = ["wrk", "-t1", "-c32", "-d15s", "--latency", "-s", str(script), url]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = float(re.findall(r"Requests/sec:\s+([\d.]+)", text)[0])
    bad = re.findall(r"Non-2xx or 3xx responses: (\d+)", text)
    save("ceiling", {"requests_per_s": rate, "not_200": int(bad[0]) if bad else 0, "idle_cpu_share": idle})
    print(text, f"idle CPU: {100 * idle:.2f} per cent of a core", sep="\n")


if __name__ == "__main__":
    main()
