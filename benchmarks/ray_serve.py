"""Ray Serve for real on this machine: replicas on emulated devices, killed, scaled and steered under load.

Ray is started as docs/ray-serve.md says, by `ray start` and `serve deploy`: with HAProxy, which Ray brings, asking
another replica when one dies; with HAProxy as it comes; and with Ray's own proxy. Ray listens on every address of the
machine: run this where nobody else is, such as in a network namespace with nothing but loopback (`unshare -n`).
"""

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.overload import picture
from benchmarks.serving import RECORDS, free_port, load, run_json, save
from deploy.expressions import DEPLOY

_ROOT = DEPLOY.parent
_CONFIG = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())
_BIN = Path(sys.executable).parent
_SETTINGS = {"max_batch_size": 2}  # 120 requests a second each: what two cores can send to three of them
_CALM, _KILLING, _BUSY = 60, 90, 200  # requests a second
_KILLS, _BETWEEN = 3, 15.0  # s
_HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
_AGAIN = {
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2**18),  # bytes; a larger call cannot be sent again
}
PROXIES: Mapping[str, Mapping[str, str]] = {"haproxy, asks again": _HAPROXY | _AGAIN, "haproxy": _HAPROXY, "ray": {}}


@dataclass(frozen=True)
class Cluster:
    """A running Ray of one machine.

    Attributes:
        dashboard: URL of Ray's own interface.
        url: of the application.
        folder: for files.
    """

    dashboard: str
    url: str
    folder: Path

    def deploy(self, user_config: Mapping[str, Any]) -> None:
        """The application of deploy/ray/serve.yaml, or its change, with this user_config."""
        config = copy.deepcopy(_CONFIG)
        config["http_options"] = {"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])}
        config["applications"][0]["args"] |= _SETTINGS
        config["applications"][0]["deployments"][0]["user_config"] = dict(user_config)
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        subprocess.run(
            [_BIN / "serve", "deploy", "--address", self.dashboard, file], check=True, cwd=_ROOT, capture_output=True
        )

    def application(self) -> Any:
        """What Ray says of it; an empty dictionary before it is there."""
        with urllib.request.urlopen(f"{self.dashboard}/api/serve/applications/", timeout=30) as answer:
            return json.load(answer)["applications"].get("batchwright", {})

    def replicas(self) -> dict[str, int]:
        """By name, the process ids of those that run."""
        deployment = self.application().get("deployments", {}).get("Batchwright", {})
        return {r["replica_id"]: r["pid"] for r in deployment.get("replicas", ()) if r["state"] == "RUNNING"}

    def policy(self) -> Any:
        """What /admin says of the policy of some replica."""
        with urllib.request.urlopen(f"{self.url}/admin/models/googlenet/policy", timeout=30) as answer:
            return json.load(answer)

    def answered(self) -> float:
        """How many requests were answered 200, by the sum of what /metrics says of the replicas."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(s.value for s in samples if s.name == "batchwright_requests_total" and s.labels["outcome"] == "ok")

    def predictions(self) -> int:
        """How many different predictions 50 calls with one picture get; 1 where every answer is right."""
        request = urllib.request.Request(f"{self.url}/predict", picture(), {"Content-Type": "image/jpeg"})
        told = set()
        for _ in range(50):
            with urllib.request.urlopen(request, timeout=30) as answer:
                told.add(json.dumps(json.load(answer)["predictions"]))
        return len(told)

    def load(self, rate: float, duration: float, what: str = "picture") -> Any:
        """What generate-load reports of so many requests a second, for so many s: of a picture of 1 KB, or pixels."""
        image = self.folder / "image.jpg"
        image.write_bytes(picture())
        body = ("--pixels",) if what == "pixels" else ("--image", str(image))
        report = run_json("generate-load", self.url, *body, "--rate", str(rate), "--duration", str(duration))
        shown = ("scheduled", "ok", "errors", "p50_ms", "p95_ms", "p99_ms", "mean_batch_size")
        return {key: report[key] for key in shown}


@contextmanager
def cluster(environment: Mapping[str, str]) -> Iterator[Cluster]:
    """Ray on this machine, ended with everything that it started."""
    port, dashboard = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(_BIN / "ray"), "start", "--head", "--block", "--port", str(free_port())]
        command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard), "--num-cpus", "4"]
        command += ["--object-store-memory", "100000000", "--temp-dir", folder]
        paths = {"PYTHONPATH": str(_ROOT), "PATH": f"{_BIN}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
        with (Path(folder) / "ray.log").open("w") as log:
            ray = subprocess.Popen(command, env={**os.environ, **paths, **environment}, stdout=log, stderr=log)
            here = Cluster(f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{port}", Path(folder))
            try:
                within(60, lambda: _answers(f"{here.dashboard}/api/version"))
                yield here
            finally:
                subprocess.run([_BIN / "serve", "shutdown", "-y", "--address", here.dashboard], check=False, timeout=90)
                ray.send_signal(signal.SIGTERM)
                ray.wait(timeout=90)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def within(seconds: float, holds: Callable[[], bool]) -> float:
    """How long it takes until it holds, s.

    Raises:
        TimeoutError: longer.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() > began + seconds:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.2)
    return time.monotonic() - began


def run(here: Cluster) -> dict[str, Any]:
    """All that is to be shown, in one cluster."""
    here.deploy({"policy": "auto", "slo_p95_ms": 300})
    started = within(120, lambda: len(here.replicas()) == 2 and _answers(f"{here.url}/v2/health/ready"))
    calm = here.load(_CALM, 20)
    return {
        "started_s": started,
        "calm": calm | {"counted": here.answered(), "predictions": here.predictions()},
        "objective": _objective(here),
        "killed": {what: _killed(here, what) for what in ("picture", "pixels")},
        "scaled": _scaled(here),
    }


def _objective(here: Cluster) -> dict[str, Any]:
    """Another objective under load, then one that cannot be had; the replicas are the same."""
    before, pids = here.policy(), here.replicas()
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(here.load, _CALM, 20)
        time.sleep(5)
        here.deploy({"policy": "auto", "slo_p95_ms": 60})
        took = within(30, lambda: here.policy()["parameters"]["slo_p95_ms"] == "60.0")
        time.sleep(3)
        here.deploy({"policy": "clever"})
        during = loading.result()
    within(30, lambda: here.application()["status"] == "RUNNING")
    return {
        "before": before["parameters"],
        "after": here.policy()["parameters"],  # the one before the one that was refused
        "took_s": took,
        "during": during,
        "then": here.load(_CALM, 10),
        "same_processes": here.replicas() == pids,
    }


def _killed(here: Cluster, what: str) -> dict[str, Any]:
    """SIGKILL for one replica of two, three times under load."""
    here.deploy({"policy": "auto", "slo_p95_ms": 300})
    back = []
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(here.load, _KILLING, _KILLS * _BETWEEN, what)
        for _ in range(_KILLS):
            time.sleep(_BETWEEN / 2)
            pid = min(here.replicas().values())
            os.kill(pid, signal.SIGKILL)
            back.append(within(60, partial(_replaced, here, pid)))
        during = loading.result()
    return {"kills": _KILLS, "during": during, "two_again_s": back}


def _replaced(here: Cluster, pid: int) -> bool:
    now = here.replicas().values()
    return len(now) >= 2 and pid not in now


def _scaled(here: Cluster) -> dict[str, Any]:
    """Load for more than two."""
    within(180, lambda: len(here.replicas()) == 2)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(here.load, _BUSY, 40)
        third = within(60, lambda: len(here.replicas()) == 3)
        during = loading.result()
    return {"third_s": third, "during": during}


def table(record: dict[str, Any]) -> str:
    """The record as Markdown; not answered: by the client's count, 500 or a connection that was closed."""
    lines = [
        "| proxy | phase | requests /s | sent | answered 200 | others | p50 ms | p95 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes = []
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
            lines.append(
                f"| {name} | {phase} | {rate} | {seen['scheduled']} | {seen['ok']} | {others} "
                f"| {seen['p50_ms']:.0f} | {seen['p95_ms']:.0f} |"
            )
        back = max(seconds for what in killed.values() for seconds in what["two_again_s"])
        notes.append(
            f"- {name}: the new objective decided after {objective['took_s']:.1f} s, in the same processes: "
            f"{objective['same_processes']}; a killed replica was replaced within {back:.1f} s; the third one served "
            f"after {scaled['third_s']:.1f} s; "
            f"metrics counted {cell['calm']['counted']:.0f} answers of {cell['calm']['ok']}."
        )
    return "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n"


def main() -> None:
    """Run with each proxy that stands not in the record yet."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    record = load("ray_serve")
    for name, environment in PROXIES.items():
        if name not in record:
            with cluster(environment) as here:
                record[name] = run(here)
            save("ray_serve", record)
    (RECORDS / "ray_serve.md").write_text(f"# Ray Serve, two replicas on emulated devices\n\n{table(record)}")
    print(table(record))


if __name__ == "__main__":
    main()
