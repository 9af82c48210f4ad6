"""Our server in front of a real Triton, beside Triton's own dynamic batching, and Triton killed under load.

Triton is started by nvidia-pytriton, which needs an interpreter of its own (--triton-python). Its model is a Python
function whose batch of b takes 8 + 1.6 b ms, as an accelerator's would. One Triton serves it three times: without
dynamic batching, for our server, and with its own at two queue delays. All get the same Poisson arrivals from
generate-load, in turns. The sizes of batches are Triton's own counts.

Every answer through our server is compared with Triton's. The time that it adds is that of calls of one sample, sent to
both in turns. Then Triton gets SIGKILL three times under load, and is started again.
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support import harness

_TIMES = [8e-3 + 1.6e-3 * b for b in range(1, 33)]  # l(b), s
_LOAD = 0.7
_DELAYS = (0, 5)  # ms
_ROUNDS, _DURATION = 3, 14.0  # s
_CALLS = 300
_KILLS, _DOWN = 3, 2.0  # s until Triton is started again
_LENGTH = "Inference-Header-Content-Length"
_SEGMENTS = Path("/dev/shm")  # noqa: S108  (where Triton's Python backend keeps its buffers)


class Triton:
    """A Triton that can be killed and started again on the same ports.

    Attributes:
        url: of its HTTP interface.
    """

    def __init__(self, python: str, folder: Path) -> None:
        """Run by the interpreter `python`, with its files in `folder`."""
        self._python, self._folder = python, folder
        self._ports = [harness.free_port() for _ in range(3)]
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._segments = set(_SEGMENTS.glob("pytrtion*"))
        self.url = f"http://127.0.0.1:{self._ports[0]}"

    def start(self, delays: Sequence[int] = _DELAYS) -> None:
        """Start it with `plain` and a model for each delay, ms, and wait until all are ready."""
        script = Path(__file__).parent / "peer_servers" / "triton_server.py"
        names = ["plain", *(f"delay_{ms}" for ms in delays)]
        self._starts += 1
        line = [self._python, str(script), "--ports", *map(str, self._ports), "--delays-ms", *map(str, delays)]
        with (self._folder / "triton.log").open("a") as log:
            self._process = subprocess.Popen(
                [*line, "--workspace", str(self._folder / f"workspace-{self._starts}")],
                env=os.environ | {"SERVICE_TIMES": json.dumps(_TIMES), "PYTHONPATH": ""},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            harness.wait_until(lambda: all(map(self._is_ready, names)), 60.0, 0.01)
        except TimeoutError:
            self.kill()
            sys.exit(f"Triton is not ready after 60 s: {(self._folder / 'triton.log').read_text()[-2000:]}")

    def _is_ready(self, model: str) -> bool:
        return harness.answers(f"{self.url}/v2/models/{model}/ready")

    def kill(self) -> None:
        """Send SIGKILL to all its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        shutil.rmtree(self._folder / f"workspace-{self._starts}", ignore_errors=True)
        for segment in set(_SEGMENTS.glob("pytrtion*")) - self._segments:
            segment.unlink(missing_ok=True)

    def counts(self, model: str) -> tuple[float, float]:
        """Numbers of inferences and of executed batches so far."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self._ports[2]}/metrics", timeout=10).read().decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        values = {s.name.removesuffix("_total"): s.value for s in samples if s.labels.get("model") == model}
        return values["nv_inference_count"], values["nv_inference_exec_count"]


class Caller:
    """Calls a model over one connection, in binary tensors."""

    def __init__(self, url: str, model: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        self._path = f"/v2/models/{model}/infer"

    def __call__(self, x: NDArray[np.float32]) -> tuple[int, NDArray[np.float32] | None, dict[str, Any]]:
        """Status, outputs and the response's parameters."""
        tensor = {"name": "x", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
        outputs = [{"name": "y", "parameters": {"binary_data": True}}]
        head = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
        self._connection.request("POST", self._path, head + x.tobytes(), {_LENGTH: str(len(head))})
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            return response.status, None, {}
        length = int(response.headers[_LENGTH])
        facts = json.loads(body[:length]).get("parameters", {})
        return 200, np.frombuffer(body, np.float32, offset=length).reshape(x.shape), facts


@contextmanager
def ours(triton: Triton) -> Iterator[harness.Server]:
    """Our server in front of the model without dynamic batching, with the policy that it solves itself."""
    with harness.serving(f"plain=oip:{triton.url}/plain") as server:
        yield server


def same_answers(triton: Triton, server: harness.Server) -> dict[str, int]:
    """Calls of 1 to 32 samples to both; every output is compared."""
    rng, direct, through = np.random.default_rng(0), Caller(triton.url, "plain"), Caller(server.url, "plain")
    samples = wrong = 0
    for _ in range(_CALLS):
        x = rng.normal(size=(int(rng.integers(1, 33)), 4)).astype(np.float32)
        one, other = direct(x)[1], through(x)[1]
        samples += len(x)
        wrong += one is None or other is None or not np.array_equal(one, other) or not np.array_equal(one, 2 * x + 1)
    return {"calls": _CALLS, "samples": samples, "wrong_calls": int(wrong)}


def added_time(triton: Triton, server: harness.Server) -> dict[str, float]:
    """Medians over calls of one sample to Triton and through our server, in turns, ms."""
    direct, through, x = Caller(triton.url, "plain"), Caller(server.url, "plain"), np.ones((1, 4), np.float32)
    times: dict[str, list[float]] = {"direct_ms": [], "through_ms": [], "service_ms": []}
    for _ in range(_CALLS):
        began = time.perf_counter()
        direct(x)
        between = time.perf_counter()
        _, _, facts = through(x)
        times["through_ms"].append(1e3 * (time.perf_counter() - between))
        times["direct_ms"].append(1e3 * (between - began))
        times["service_ms"].append(facts["service_ms"])
    found = {name: median(each) for name, each in times.items()}
    added = {"batch_added_ms": found["service_ms"] - found["direct_ms"]}
    return found | added | {"call_added_ms": found["through_ms"] - found["direct_ms"]}


def under_load(triton: Triton, server: harness.Server, rounds: int, duration: float) -> dict[str, Any]:
    """The same arrivals for our server and for Triton's own batching, in turns."""
    targets = {"batchwright": (server.url, "plain")}
    targets |= {f"triton, delay {ms} ms": (triton.url, f"delay_{ms}") for ms in _DELAYS}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in targets}
    for seed in range(rounds):
        for name, (url, model) in targets.items():
            runs[name].append(_one_run(triton, url, model, seed, duration))
    keys = ("mean_ms", "p50_ms", "p95_ms", "p99_ms", "mean_batch_size")
    means = {name: {key: fmean(run[key] for run in each) for key in keys} for name, each in runs.items()}
    return {"arrival_rate_hz": _rate(), "load": _LOAD, "mean": means, "runs": runs}


def _rate() -> float:
    return _LOAD * max(b / seconds for b, seconds in enumerate(_TIMES, 1))


def _one_run(triton: Triton, url: str, model: str, seed: int, duration: float) -> dict[str, Any]:
    before = triton.counts(model)
    flags = ("--model", model, "--rate", str(_rate()), "--duration", str(duration), "--seed", str(seed))
    report = harness.run_json("generate-load", url, *flags)
    requests, batches = (now - then for now, then in zip(triton.counts(model), before, strict=True))
    shown = ("scheduled", "ok", "errors", "mean_ms", "p50_ms", "p95_ms", "p99_ms", "send_lag_p99_ms")
    return {key: report[key] for key in shown} | {"mean_batch_size": requests / batches}


def killed(triton: Triton, server: harness.Server, kills: int) -> dict[str, Any]:
    """SIGKILL to Triton under load, and a start a little later: what clients saw, and when the first one was answered.

    The times are from the instant at which Triton itself answers that it is ready.
    """
    stop, back, started = threading.Event(), list[float](), list[float]()
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.jsonl"
        flags = ("--model", "plain", "--rate", str(_rate()), "--duration", "600", "--output", str(output))
        load = harness.start_load(server.url, *flags)
        try:
            time.sleep(4.0)
            for _ in range(kills):
                triton.kill()
                time.sleep(_DOWN)
                began = time.monotonic()
                answered = threading.Thread(target=_until_answered, args=(server.url, back, stop))
                answered.start()
                triton.start(delays=())
                ready = time.monotonic()
                started.append(ready - began)
                answered.join(timeout=30.0)
                back[-1] -= ready
                time.sleep(4.0)
        finally:
            stop.set()
            load.send_signal(signal.SIGINT)
            load.communicate(timeout=60)
        seen.update(str(record["status"]) for record in harness.read_jsonl(output))
    return {
        "kills": kills,
        "statuses": dict(sorted(seen.items())),
        "triton_started_after_s": started,
        "answered_after_triton_was_ready_s": back,
        "server_alive": server.process.poll() is None,
    }


def _until_answered(url: str, instants: list[float], stop: threading.Event) -> None:
    """Append the instant of the first answer, s."""
    call, x = Caller(url, "plain"), np.ones((1, 4), np.float32)
    while not stop.wait(0.005):
        if call(x)[0] == 200:
            instants.append(time.monotonic())
            return


def main() -> None:
    """Measure all parts, print and record; exit code 1 if an answer is wrong or lost without a 503."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--triton-python", required=True, help="an interpreter with nvidia-pytriton")
    parser.add_argument("--trial", action="store_true", help="a short run that writes no record")
    chosen = parser.parse_args()
    rounds, duration, kills = (1, 5.0, 1) if chosen.trial else (_ROUNDS, _DURATION, _KILLS)
    record: dict[str, Any] = {}
    parts: dict[str, Callable[[Triton, harness.Server], Any]] = {
        "answers": same_answers,
        "added": added_time,
        "load": lambda triton, server: under_load(triton, server, rounds, duration),
        "killed": lambda triton, server: killed(triton, server, kills),
    }
    with harness.temporary_cache() as folder:
        triton = Triton(chosen.triton_python, folder)
        try:
            triton.start()
            with ours(triton) as server:
                for name, measure in parts.items():
                    record[name] = measure(triton, server)
        finally:
            triton.kill()
    print(json.dumps(record, indent=1))
    if not chosen.trial:
        harness.save_record("upstream", record)
    lost = set(record["killed"]["statuses"]) - {"200", "503", "interrupted"}
    sys.exit(1 if record["answers"]["wrong_calls"] or lost or not record["killed"]["server_alive"] else 0)


if __name__ == "__main__":
    main()
