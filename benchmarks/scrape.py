"""Prometheus scrapes a server under load; checks that every query of deploy/ returns data and the numbers agree.

The server is benchmarks/servers/fault_injection.py, on an emulated device that is slower than its profile, so that it
drifts. The rules are deploy's with shortened windows (an hour becomes 20 s), so that offsets and burn rates have data.
A steady load comes first, and its report is compared with Prometheus's numbers. Then: a burst that is partly rejected,
a failing device, another policy, bad input, expired requests. Needs Debian's
`prometheus`.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.servers.fault_injection import order_fault
from benchmarks.support import harness
from deploy.expressions import DEPLOY, RULES, Expression, all_expressions
from policies.profile import load_profile

PROFILE = "googlenet-tesla-p4-x10"
BELIEVED = 0.8  # service times of the profile that the server starts with, over the device's
POLICY = "smdp:slo_p95_ms=120"
CAPACITY = 64  # requests that may wait
COMPARED = "smdp:slo_p95_ms=300"  # response times so long that the client's 2 ms hardly count
TOLERANCE = 0.02
SHORTENED = {"1d": 40, "3h": 30, "1h": 20, "15m": 5, "10m": 5, "5m": 10, "2m": 3, "1m": 5}  # s
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "10s", "$__interval": "1s", "$__range": "60s"}


def shortened(expression: str) -> str:
    """The expression with windows and offsets for a run of a minute and a half."""

    def short(found: re.Match[str]) -> str:
        return f"{found[1]}{SHORTENED[found[2]]}s"

    return re.sub(r"(\[|offset )(\d+[mhd])\b", short, expression)


def data_query(expression: Expression) -> str:
    """A query that returns data if the expression has data; for an alert, also where its condition is false."""
    text = shortened(expression.text)
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    if expression.kind == "alert":
        text = re.sub(r" (==|>=|>|<=|<) ", r" \1 bool ", text).replace(" unless ", " and ").replace("absent(", "(")
    return text


def configure(folder: Path, target: str) -> Path:
    """Write deploy's configuration with shortened rules, which scrapes the target every second; return its path."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] == "batchwright"]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "rules").mkdir()
    for path in RULES:
        content = yaml.safe_load(path.read_text())
        for rule in (rule for group in content["groups"] for rule in group["rules"]):
            rule["expr"] = shortened(rule["expr"])
            if "for" in rule:
                rule["for"] = f"{SHORTENED[rule['for']]}s"
        (folder / "rules" / path.name).write_text(yaml.safe_dump(content))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    return folder / "prometheus.yml"


@contextmanager
def prometheus(target: str) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the target; its data are deleted at the end."""
    with TemporaryDirectory() as name:
        folder, address = Path(name), f"127.0.0.1:{harness.free_port()}"
        files = [f"--config.file={configure(folder, target)}", f"--storage.tsdb.path={folder / 'data'}"]
        line = ["prometheus", *files, f"--web.listen-address={address}", "--log.level=warn"]
        process = subprocess.Popen(line)
        try:
            harness.wait_until(lambda: harness.answers(f"http://{address}/-/ready"), 30.0, 0.1)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def query(url: str, path: str, **parameters: str) -> list[Any]:
    """Prometheus's answer to a query: a list of series."""
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
        result: list[Any] = json.load(answer)["data"]["result"]
    return result


def value(url: str, expression: str) -> float:
    """The current value of an expression with one series."""
    return float(query(url, "query", query=expression)[0]["value"][1])


def predict(server: harness.Server, body: bytes, timeout_ms: int) -> int:
    """Send one image to /predict, and return the status."""
    return post(urllib.request.Request(f"{server.url}/predict", body, {"x-timeout-ms": str(timeout_ms)}))


def post(request: urllib.request.Request) -> int:
    """Send a request, and return the status of the answer or of the error."""
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def poison(server: harness.Server) -> int:
    """Send a sample on which the device fails, and return the status."""
    pixels = b"POISON".ljust(224 * 224 * 3, b"\x00")
    address = f"{server.url}/v2/models/googlenet/infer"
    return post(urllib.request.Request(address, pixels, {"inference-header-content-length": "0"}))


def incidents(server: harness.Server, orders: Path) -> dict[str, Any]:
    """Cause everything that the dashboards show, in 45 s; return the errors that the clients saw."""
    photograph = (resources.files("matplotlib") / "mpl-data" / "sample_data" / "grace_hopper.jpg").read_bytes()
    server.set_policy("googlenet", POLICY)
    load = harness.start_load(server.url, "--pixels", "--rate", "120", "--duration", "40", "--seed", "1")
    time.sleep(3)
    burst = harness.run_json(
        "generate-load", server.url, "--pixels", "--rate", "300", "--duration", "1", "--arrivals", "backlog"
    )
    time.sleep(8)
    order_fault(orders, "error:1")
    wrong = [predict(server, b"no picture", 1000), poison(server)]
    time.sleep(4)
    server.set_policy("googlenet", "greedy")
    report, _ = load.communicate(timeout=120)
    server.set_policy("googlenet", "static:32")
    late = [predict(server, photograph, 60) for _ in range(20)]  # one at a time, they wait for a batch of 32
    server.set_policy("googlenet", POLICY)
    time.sleep(3)
    errors = {"load": json.loads(report)["errors"], "burst": burst["errors"]}
    return errors | {"no picture, poison": wrong, "time-outs": sorted(set(late))}


def compare(url: str, report: dict[str, Any], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The load report beside Prometheus's numbers for the same requests."""
    energy = report["energy_per_request_mj"]
    waiting = sum(record["waiting_ms"] for record in records) / len(records)
    return [
        _row("requests answered", report["ok"], value(url, 'sum(batchwright_requests_total{outcome="ok"})')),
        _row("mean batch size", report["mean_batch_size"], _ratio(url, "batch_size_sum", "batch_size_count")),
        _row("energy per request, mJ", energy, 1e3 * _ratio(url, "energy_joules_total", "batch_size_sum")),
        _row("energy by the sensor, mJ", energy, 1e3 * _ratio(url, "device_energy_joules_total", "batch_size_sum")),
        _row("mean waiting time, ms", waiting, 1e3 * _ratio(url, "waiting_seconds_sum", "waiting_seconds_count")),
        # a client's response time includes the network and the client's own work
        _row(
            "mean response time, ms",
            report["mean_ms"],
            1e3 * _ratio(url, "response_seconds_sum", "response_seconds_count"),
        ),
    ]


def _ratio(url: str, dividend: str, divisor: str) -> float:
    return value(url, f"sum(batchwright_{dividend}) / sum(batchwright_{divisor})")


def _row(name: str, reported: float, exported: float) -> dict[str, Any]:
    difference = exported / reported - 1
    numbers = {"report": round(reported, 3), "prometheus": round(exported, 3), "difference": round(difference, 6)}
    return {"name": name, **numbers, "agrees": abs(difference) <= TOLERANCE}


def without_data(url: str, begin: float) -> list[str]:
    """Where the expressions are that returned no data in any second of the run."""
    span = {"start": str(begin), "end": str(time.time()), "step": "1s"}
    return [
        expression.where
        for expression in all_expressions()
        if not any(
            not isnan(float(sample[1]))
            for series in query(url, "query_range", query=data_query(expression), **span)
            for sample in series["values"]
        )
    ]


def fired(url: str, begin: float) -> list[str]:
    """The alerts that fired during the run, with their severity."""
    span = {"start": str(begin), "end": str(time.time()), "step": "1s"}
    series = query(url, "query_range", query='ALERTS{alertstate="firing"}', **span)
    return sorted({f"{each['metric']['alertname']} ({each['metric']['severity']})" for each in series})


def promtool(server: harness.Server) -> str:
    """The complaints of `promtool check metrics` about /metrics; empty if there are none."""
    text = urllib.request.urlopen(f"{server.url}/metrics", timeout=10).read()
    line = ["promtool", "check", "metrics"]
    done = subprocess.run(line, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return str(done.stdout.decode())


def run() -> dict[str, Any]:
    """Start Prometheus and a server, load the server, and return the record."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        orders, output, profile = folder / "orders", folder / "run.jsonl", folder / "believed.json"
        real = load_profile(PROFILE)
        believed = replace(real, service_times=tuple(BELIEVED * t for t in real.service_times))
        profile.write_text(believed.to_json())
        os.environ["DRILL_FILE"] = str(orders)
        device = ["--device", f"emulated:{PROFILE}", "--profile", str(profile), "--queue-capacity", str(CAPACITY)]
        command = [sys.executable, "-m", "benchmarks.servers.fault_injection", "googlenet", *device]
        with (
            harness.running(*command, "--policy", COMPARED) as server,
            prometheus(server.url.removeprefix("http://")) as url,
        ):
            began = time.time()
            load = ["--pixels", "--rate", "120", "--duration", "45", "--output", str(output)]
            report = harness.run_json("generate-load", server.url, *load)
            time.sleep(2)  # until the next scrape
            rows = compare(url, report, [answer for answer in harness.read_jsonl(output) if answer["status"] == 200])
            errors = incidents(server, orders)
            queries = {"asked": len(all_expressions()), "without_data": without_data(url, began)}
            alerts, complaints = fired(url, began), promtool(server)
    return {"comparison": rows, "queries": queries, "alerts": alerts, "promtool": complaints, "errors": errors}


def main() -> None:
    """Print and record the runs; exit code 1 if a query has no data, numbers disagree, or promtool complains."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--record", default="scrape", help="name of the record")
    chosen = parser.parse_args()
    record = run()
    harness.save_record(chosen.record, record)
    for row in record["comparison"]:
        print(f"{row['name']:40} {row['report']:12} {row['prometheus']:12} {row['difference']:+.3%} {row['agrees']}")
    print(json.dumps({key: record[key] for key in ("queries", "alerts", "promtool", "errors")}, indent=1))
    agree = all(row["agrees"] for row in record["comparison"])
    sys.exit(bool(record["queries"]["without_data"] or record["promtool"] or not agree))


if __name__ == "__main__":
    main()
