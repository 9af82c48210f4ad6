"""Ray Serve on this machine: replicas on emulated devices that are killed, scaled and reconfigured under load.

Ray is started by `ray start` and `serve deploy` as in docs/other-servers.md, with three proxies: Ray's HAProxy with
retries at another replica, HAProxy with its default configuration, and Ray's own proxy. Ray listens on every address of
the machine: run this in a network namespace with only a loopback interface (`unshare -n`). Proxies that are in the
record are not measured again.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support import harness
from deploy.expressions import DEPLOY

_CONFIG = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())
_BIN = Path(sys.executable).parent
_SETTINGS = {"max_batch_size": 2}  # 120 requests/s a replica, so that two cores can load three of them
_CALM, _KILLING, _BUSY = 60, 90, 200  # requests a second
_KILLS, _BETWEEN = 3, 15.0  # s
_HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
_AGAIN = {
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2**18),  # bytes; a larger call cannot be retried
}
PROXIES: Mapping[str, Mapping[str, str]] = {"haproxy, asks again": _HAPROXY | _AGAIN, "haproxy": _HAPROXY, "ray": {}}


@dataclass(frozen=True)
class Cluster:
    """A running Ray of one machine.

    Attributes:
        dashboard: URL of Ray's own interface.
        url: the application's.
        folder: for temporary files.
    """

    dashboard: str
    url: str
    folder: Path

    def deploy(self, user_config: Mapping[str, Any]) -> None:
        """Deploy or update the application of deploy/ray/serve.yaml with this user_config."""
        config = copy.deepcopy(_CONFIG)
        config["http_options"] = {"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])}
        config["applications"][0]["args"] |= _SETTINGS
        config["applications"][0]["deployments"][0]["user_config"] = dict(user_config)
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        line = [str(_BIN / "serve"), "deploy", "--address", self.dashboard, str(file)]
        subprocess.run(line, check=True, cwd=harness.ROOT, capture_output=True)

    def application(self) -> Any:
        """The application's state in Ray's REST interface; an empty dictionary before it exists."""
        with urllib.request.urlopen(f"{self.dashboard}/api/serve/applications/", timeout=30) as answer:
            return json.load(answer)["applications"].get("batchwright", {})

    def replicas(self) -> dict[str, int]:
        """The process ids of running replicas, by name."""
        deployment = self.application().get("deployments", {}).get("Batchwright", {})
        return {r["replica_id"]: r["pid"] for r in deployment.get("replicas", ()) if r["state"] == "RUNNING"}

    def policy(self) -> Any:
        """The policy of some replica, from /admin."""
        with urllib.request.urlopen(f"{self.url}/admin/models/googlenet/policy", timeout=30) as answer:
            return json.load(answer)

    def answered(self) -> float:
        """Number of requests answered 200, summed over the replicas in /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(s.value for s in samples if s.name == "batchwright_requests_total" and s.labels["outcome"] == "ok")

    def predictions(self) -> int:
        """Number of different predictions in 50 calls with one image; 1 if every answer is right."""
        request = urllib.request.Request(f"{self.url}/predict", harness.small_jpeg(), {"Content-Type": "image/jpeg"})
        found = set()
        for _ in range(50):
            with urllib.request.urlopen(request, timeout=30) as answer:
                found.add(json.dumps(json.load(answer)["predictions"]))
        return len(found)

    def generate_load(self, rate: float, duration: float, what: str = "picture") -> Any:
        """Report of generate-load at `rate`, 1/s, for `duration`, s, with a JPEG of 1 KB or with "pixels"."""
        image = self.folder / "image.jpg"
        image.write_bytes(harness.small_jpeg())
        body = ("--pixels",) if what == "pixels" else ("--image", str(image))
        report = harness.run_json("generate-load", self.url, *body, "--rate", str(rate), "--duration", str(duration))
        shown = ("scheduled", "ok", "errors", "p50_ms", "p95_ms", "p99_ms", "mean_batch_size")
        return {key: report[key] for key in shown}


@contextmanager
def cluster(environment: Mapping[str, str]) -> Iterator[Cluster]:
    """Ray on this machine; at the end all its processes are terminated."""
    port, dashboard = harness.free_port(), harness.free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(_BIN / "ray"), "start", "--head", "--block", "--port", str(harness.free_port())]
        command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard), "--num-cpus", "4"]
        command += ["--object-store-memory", "100000000", "--temp-dir", folder]
        paths = {"PYTHONPATH": str(harness.ROOT), "PATH": f"{_BIN}:{os.environ['PATH']}"}
        with (Path(folder) / "ray.log").open("w") as log:
            ray = subprocess.Popen(
                command,
                env={**os.environ, **paths, "RAY_USAGE_STATS_ENABLED": "0", **environment},
                stdout=log,
                stderr=log,
            )
            here = Cluster(f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{port}", Path(folder))
            try:
                harness.wait_until(lambda: harness.answers(f"{here.dashboard}/api/version", timeout=5.0), 60)
                yield here
            finally:
                subprocess.run([_BIN / "serve", "shutdown", "-y", "--address", here.dashboard], check=False, timeout=90)
                ray.send_signal(signal.SIGTERM)
                ray.wait(timeout=90)


def run(environment: Mapping[str, str]) -> dict[str, Any]:
    """All phases, in one cluster."""
    with cluster(environment) as here:
        here.deploy({"policy": "auto", "slo_p95_ms": 300})
        ready = f"{here.url}/v2/health/ready"
        started = harness.wait_until(lambda: len(here.replicas()) == 2 and harness.answers(ready, 5.0), 120)
        calm = here.generate_load(_CALM, 20)
        return {
            "started_s": started,
            "calm": calm | {"counted": here.answered(), "predictions": here.predictions()},
            "objective": _objective(here),
            "killed": {what: _killed(here, what) for what in ("picture", "pixels")},
            "scaled": _scaled(here),
        }


def _objective(here: Cluster) -> dict[str, Any]:
    """Change the objective under load, then to an invalid one; the processes stay the same."""
    before, pids = here.policy(), here.replicas()
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(here.generate_load, _CALM, 20)
        time.sleep(5)
        here.deploy({"policy": "auto", "slo_p95_ms": 60})
        took = harness.wait_until(lambda: here.policy()["parameters"]["slo_p95_ms"] == "60.0", 30)
        time.sleep(3)
        here.deploy({"policy": "clever"})
        during = loading.result()
    harness.wait_until(lambda: here.application()["status"] == "RUNNING", 30)
    return {
        "before": before["parameters"],
        "after": here.policy()["parameters"],  # of the last valid objective
        "took_s": took,
        "during": during,
        "then": here.generate_load(_CALM, 10),
        "same_processes": here.replicas() == pids,
    }


def _killed(here: Cluster, what: str) -> dict[str, Any]:
    """Send SIGKILL to one replica of two, three times under load."""
    here.deploy({"policy": "auto", "slo_p95_ms": 300})
    back = []
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(here.generate_load, _KILLING, _KILLS * _BETWEEN, what)
        for _ in range(_KILLS):
            time.sleep(_BETWEEN / 2)
            pid = min(here.replicas().values())
            os.kill(pid, signal.SIGKILL)
            back.append(harness.wait_until(partial(_replaced, here, pid), 60))
        during = loading.result()
    return {"kills": _KILLS, "during": during, "two_again_s": back}


def _replaced(here: Cluster, pid: int) -> bool:
    now = here.replicas().values()
    return len(now) >= 2 and pid not in now


def _scaled(here: Cluster) -> dict[str, Any]:
    """Offer more load than two replicas can serve."""
    harness.wait_until(lambda: len(here.replicas()) == 2, 180)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(here.generate_load, _BUSY, 40)
        third = harness.wait_until(lambda: len(here.replicas()) == 3, 60)
        during = loading.result()
    return {"third_s": third, "during": during}


def table(record: dict[str, Any]) -> str:
    """The record as Markdown; "others" are, by the client's count, 500s and closed connections."""
    rows, notes = [], []
    for name, cell in record.items():
        objective, killed, scaled = cell["objective"], cell["killed"], cell["scaled"]
        phases = [
            ("calm", _CALM, cell["calm"]),
            ("objective changed, then a wrong one refused", _CALM, objective["during"]),
            ("after it", _CALM, objective["then"]),
            *((f"{_KILLS} replicas killed, {what}", _KILLING, killed[what]["during"]) for what in killed),
            ("two replicas, then three", _BUSY, scaled["during"]),
        ]
        for phase, rate, seen in phases:
            others = ", ".join(f"{n} x {status}" for status, n in seen["errors"].items()) or "none"
            percentiles = f"{seen['p50_ms']:.0f}", f"{seen['p95_ms']:.0f}"
            rows.append((name, phase, rate, seen["scheduled"], seen["ok"], others, *percentiles))
        back = max(seconds for what in killed.values() for seconds in what["two_again_s"])
        notes.append(
            f"- {name}: the new objective decided after {objective['took_s']:.1f} s, in the same processes: "
            f"{objective['same_processes']}; a killed replica was replaced within {back:.1f} s; the third one served "
            f"after {scaled['third_s']:.1f} s; "
            f"metrics counted {cell['calm']['counted']:.0f} answers of {cell['calm']['ok']}."
        )
    head = ("proxy", "phase", "requests /s", "sent", "answered 200", "others", "p50 ms", "p95 ms")
    return harness.markdown_table(head, rows) + "\n\n" + "\n".join(notes) + "\n"


def main() -> None:
    """Fill the record proxy by proxy."""
    harness.argument_parser(__doc__).parse_args()
    cells = {name: partial(run, environment) for name, environment in PROXIES.items()}
    record = harness.fill_record("ray_serve", cells)
    harness.save_table("ray_serve", "Ray Serve, two replicas on emulated devices", table(record))


if __name__ == "__main__":
    main()
