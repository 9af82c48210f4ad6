"""The server and its peers on the same GPU and the same network, under Poisson arrivals over HTTP from this machine."""

import base64
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.records import Recorder
from benchmarks.support.harness import Server, answers, command_line, free_port
from loadgen.client import RunLog
from loadgen.live_run import LoadTarget
from loadgen.processes import process_count, run_load_in_processes
from loadgen.progress import Progress
from loadgen.report import RunObjective, make_report, outcome_from_records
from loadgen.schedule import Schedule, make_schedule
from policies.cpus import available_cpus
from policies.profile import Profile

TIMEOUT = "timeout:3"  # MLPerf's server batches for 3 ms
LOADS = 0.3, 0.6, 0.85  # of the best throughput of our server
OURS = "Batchwright"
PEERS = "LitServe", "mosec", "FastAPI batcher"
_GRAPHS, _EAGER = "captured graphs", "eager"
_MODULES = {"LitServe": "gpu_litserve_server", "mosec": "gpu_mosec_server", "FastAPI batcher": "gpu_fastapi_server"}
_PIXELS = 224 * 224 * 3
_FIRST_RATE, _FACTOR = 2000.0, 1.6  # 1/s; the offered rate grows by this factor until it is not answered
_CELL, _RAMP_CELL = 3.0, 2.0  # s
_SPAWN = 3.0  # s that a cell takes besides
KEPT = 0.95  # share of the offered rate that an answered cell reaches
_GIVE_UP = 2.0  # s that a client waits; an overloaded server has as many connections open as come in this time
_START = 45.0  # s in which a server has to be ready
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Deployment:
    """What all servers serve.

    Attributes:
        model: of torchvision, with random weights.
        device: of serve-model.
        largest: batch size.
        optimise: of serve-model.
    """

    model: str
    device: str
    largest: int
    optimise: str


def start(command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Start a process, with as many open files as allowed, that ends when this process does, however that ends."""
    libc, (_, files) = ctypes.CDLL(None), resource.getrlimit(resource.RLIMIT_NOFILE)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    return subprocess.Popen(
        command,
        env=os.environ | dict(environment or {}),
        preexec_fn=prepare,  # noqa: PLW1509  (no other thread holds a lock that it needs)
        **options,
    )


def stop(process: "subprocess.Popen[Any]") -> None:
    """Kill a process with all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


class ServerProcess:
    """A server as a process, with its log; `close` kills it with all that it has started.

    Attributes:
        process: the process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._began = time.monotonic()
        self._name = command[2]  # of python -m MODULE
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (it is closed with the process)
        self.process = start(command, environment, stdout=self._log, stderr=self._log)

    def await_ready(self, request: urllib.request.Request, until: float) -> None:
        """Wait until it answers a request.

        Raises:
            RuntimeError: it ended, or does not answer `_START` s after its start, or at an instant, s of
                time.monotonic; with the end of its log.
        """
        until = min(until, self._began + _START)
        while not answers(request, timeout=5.0):
            if self.process.poll() is not None or time.monotonic() > until:
                self._log.seek(0)
                raise RuntimeError(f"{self._name} was not ready: {self._log.read()[-1000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        """Kill it."""
        stop(self.process)
        self._log.close()


class _Timed(Progress):
    """Notes when the load began, s of time.monotonic."""

    began = 0.0

    def show(self, elapsed: float, log: RunLog) -> None:
        if elapsed > 0:
            self.began = time.monotonic() - elapsed


def measure_cell(pid: int, target: LoadTarget, rate: float, seconds: float, slo_ms: float | None) -> dict[str, Any]:
    """Offer a rate and return the report, the instants between which requests were sent, and the CPU time."""
    schedule: Schedule = make_schedule("poisson", rate, seconds, 1)
    log, progress = RunLog(), _Timed(schedule, "", quiet=True)
    before = _cpu_seconds(pid)
    count = process_count("auto", schedule, max(1, available_cpus() // 2))
    run_load_in_processes(target, schedule, progress, log, count)
    used = {each: cpu - before.get(each, 0.0) for each, cpu in _cpu_seconds(pid).items()}
    log.records.sort(key=lambda record: record.scheduled)
    objective = RunObjective() if slo_ms is None else RunObjective(slo_ms / 1e3)
    report = make_report(outcome_from_records(log.records), schedule.duration, objective)
    keys = "scheduled", "ok", "errors", "mean_ms", "p50_ms", "p95_ms", "p99_ms", "throughput_hz", "mean_batch_size"
    return {
        "rate": rate,
        "begin": progress.began,
        "end": progress.began + seconds,
        **{key: report[key] for key in (*keys, "send_lag_p99_ms", "slo_attainment")},  # type: ignore[literal-required]
        "cpu_s": sum(used.values()),
        "busiest_process": max(used.values(), default=0.0) / seconds,
    }


def _cpu_seconds(pid: int) -> dict[int, float]:
    """CPU time of a process and those that it has started, by their ids, s."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                found[each.pid] = times.user + times.system
    return found


def slo_ms(profile: Profile) -> float:
    """Three times the service time of the largest batch, ms."""
    return 3e3 * profile.service_times[-1]


class Rates:
    """The rates of the cells, of which the best throughput of our server is the measure.

    Attributes:
        best: that throughput, 1/s; None before it is known.
    """

    best: float | None = None

    def loads(self) -> list[float]:
        """The rates of the cells, 1/s."""
        return [load * (self.best or _FIRST_RATE) for load in LOADS]


def measure_server(
    deployment: Deployment,
    profile: Path,
    policies: Iterable[tuple[str, Path]],
    recorder: Recorder,
    rates: Rates,
    until: float,
) -> None:
    """Measure our server: growing rates up to its limit, then three rates with each policy; one that fails is left out.

    A server takes a policy file at its start only. So it starts once for each, and the first one serves
    the other policies, too.

    Args:
        deployment: the model.
        profile: its profile file.
        policies: names and policy files; one that is not ready yet blocks when its turn comes.
        recorder: of the cells.
        rates: its best throughput is set.
        until: end of this part, s of time.monotonic.
    """
    known = Profile.load(profile)

    def measure(name: str, spec: str) -> None:
        with _our_server(deployment, profile, spec, until) as server:
            target = LoadTarget(server.url, pixels=True, give_up_after=_GIVE_UP, precise=True)
            others = []
            if rates.best is None:
                _find_limit(server, target, known, recorder, rates, until)
                others = [policy for policy in ("greedy", TIMEOUT) if policy != name]
            for policy in (name, *others):
                if policy != name:
                    server.set_policy(deployment.model, policy)
                for rate in rates.loads():
                    if time.monotonic() + _CELL + _SPAWN > until:
                        raise TimeoutError(f"the cells from {policy} at {rate:.0f}/s on were left out")
                    cell = measure_cell(server.process.pid, target, rate, _CELL, slo_ms(known))
                    recorder.add("cell", server=OURS, network=_network(deployment), policy=policy, **cell)

    for name, path in policies:
        recorder.part(f"{OURS}, {name}", until, partial(measure, name, str(path)))
    if rates.best is None:  # else it was measured with the first of the others
        recorder.part(f"{OURS}, greedy", until, partial(measure, "greedy", "greedy"))


def _find_limit(
    server: Server, target: LoadTarget, known: Profile, recorder: Recorder, rates: Rates, until: float
) -> None:
    rate, best = min(_FIRST_RATE, 0.4 * known.capacity), 0.0
    while time.monotonic() + _RAMP_CELL + _SPAWN < until:
        cell = measure_cell(server.process.pid, target, rate, _RAMP_CELL, None)
        recorder.add("limit", **cell)
        best = max(best, cell["throughput_hz"] or 0.0)
        if (cell["throughput_hz"] or 0.0) < KEPT * rate:
            break
        rate *= _FACTOR
    rates.best = best or None


@contextlib.contextmanager
def _our_server(deployment: Deployment, profile: Path, policy: str, until: float) -> Iterator[Server]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--device", deployment.device, "--weights", "random", "--profile", str(profile), "--policy", policy]
    flags += ["--port", str(port), "--queue-capacity", "16384", "--optimise", deployment.optimise]
    with contextlib.closing(ServerProcess([*command_line("serve-model"), deployment.model, *flags])) as process:
        process.await_ready(urllib.request.Request(f"{url}/v2/health/ready"), until)
        yield Server(url, process.process)


def _network(deployment: Deployment) -> str:
    return _EAGER if deployment.optimise == "none" else _GRAPHS


def measure_peers(deployment: Deployment, recorder: Recorder, rates: Rates, until: float) -> None:
    """Measure the peers with captured graphs at three rates, then without at the middle one, while there is time.

    All of them start together, so that their imports and captures overlap. The first one is measured when all are ready
    or have failed.
    """
    for optimise, chosen in ((deployment.optimise, rates.loads()), ("none", rates.loads()[1:2])):
        served = replace(deployment, optimise=optimise)
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            peers = {name: stack.enter_context(contextlib.closing(_Peer(name, served, Path(folder)))) for name in PEERS}
            for peer in peers.values():
                with contextlib.suppress(RuntimeError):  # it is reported when it is its turn
                    peer.await_ready(peer.request, until)
            for name, peer in peers.items():
                measure = partial(_measure_peer, name, peer, served, chosen, recorder, until)
                recorder.part(f"{name}, {_network(served)}", until, measure)
                peer.close()


class _Peer(ServerProcess):
    """A peer with the network of benchmarks/peer_servers/gpu_network.py.

    Attributes:
        url: that takes an image.
        body: a file with an image as this peer takes it.
        request: with that body.
    """

    def __init__(self, name: str, deployment: Deployment, folder: Path) -> None:
        port = free_port()
        module, encoded = f"benchmarks.peer_servers.{_MODULES[name]}", name == "LitServe"
        self.url = f"http://127.0.0.1:{port}/{'inference' if name == 'mosec' else 'predict'}"
        pixels = b"".join(bytes([value % 251]) * (3 * 28) for value in range(_PIXELS // (3 * 28)))
        self.body = folder / ("image.json" if encoded else "image.bin")
        self.body.write_bytes(json.dumps({"image": base64.b64encode(pixels).decode()}).encode() if encoded else pixels)
        kind = "application/json" if encoded else "application/octet-stream"
        self.request = urllib.request.Request(self.url, self.body.read_bytes(), {"Content-Type": kind})
        environment = {f"PEER_{key.upper()}": str(value) for key, value in asdict(deployment).items()}
        super().__init__([sys.executable, "-m", module, "--port", str(port)], environment)


def _measure_peer(
    name: str, peer: _Peer, deployment: Deployment, chosen: Sequence[float], recorder: Recorder, until: float
) -> None:
    peer.await_ready(peer.request, until)
    target = LoadTarget(peer.url, give_up_after=_GIVE_UP, precise=True, bodies=[peer.body])
    for rate in chosen:
        if time.monotonic() + _CELL + _SPAWN > until:
            raise TimeoutError(f"the cells from {rate:.0f}/s on were left out")
        cell = measure_cell(peer.process.pid, target, rate, _CELL, None)
        recorder.add("cell", server=name, network=_network(deployment), policy="its own", **cell)
        if (cell["throughput_hz"] or 0.0) < KEPT * rate:
            return  # a higher rate would say no more
