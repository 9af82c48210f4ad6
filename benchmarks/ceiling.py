"""Maximum throughput of the gateway: one server process, a device of 1 us a batch, wrk with 32 connections.

A call has one 150,528-byte image by the Open Inference Protocol and the classification output. The server, the
baseline of benchmarks/servers/bare_fastapi.py, and a server with a model of four floats are measured in turns. Needs
Debian's wrk.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.support.calls import HttpCall, floats_call, image_call
from benchmarks.support.harness import (
    ROOT,
    argument_parser,
    instant_profile,
    save_record,
    serving,
    serving_bare_fastapi,
)
from benchmarks.support.wrk import is_installed, run_wrk


def _rate(call: HttpCall) -> dict[str, float]:
    run = run_wrk(call, 32, 10.0)
    return {"requests_per_s": run.requests_per_s, "not_200": run.not_200}


def main() -> None:
    """Print and record calls a second of the servers, their ratios, and the CPU time when idle."""
    argument_parser(__doc__).parse_args()
    if not is_installed():
        print("skipped: wrk is not installed (apt-get install wrk)")
        return
    with tempfile.TemporaryDirectory() as name:
        profile = instant_profile(Path(name))
        ours, baseline, floats = [], [], []
        arguments = ("--device", f"emulated:{profile}", "--policy", "greedy")
        source = ROOT / "benchmarks" / "servers" / "float_models.py"
        with (
            serving("googlenet", *arguments) as server,
            serving(f"floats={source}:FourFloats", *arguments) as tensor_server,
            serving_bare_fastapi(str(profile)) as bare,
        ):
            idle = server.cpu_seconds()
            time.sleep(10)
            idle = (server.cpu_seconds() - idle) / 10
            for _ in range(3):
                baseline.append(_rate(image_call(f"{bare.url}/v2/models/googlenet/infer")))
                ours.append(_rate(image_call(f"{server.url}/v2/models/googlenet/infer")))
                floats.append(_rate(floats_call(f"{tensor_server.url}/v2/models/floats/infer", 4)))
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
