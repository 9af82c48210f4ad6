"""On a machine with a GPU: check and measure all that this project publishes about one, in one call of at most 470 s.

One process measures the device alone: idle power, implementations of the network, outputs against the CPU's, service
times and energies. Then the server is measured over HTTP, and its peers on the same network. Another process samples
the GPU's sensors meanwhile; energies are integrated from its file afterwards. Every record is appended to a file as it
comes, so that whatever stops the call, what was measured is kept: `make gpu-page` makes tables and figures of it.

With --second, a call of 240 s continues the records: ViT-L/16 at loads where the GPU is the limit and not Python. If
the first call has no service times of its first model, it is that model again without fused convolutions and cuDNN's
search, up to batches of 32. The records of the first call are taken from --out or, if it is empty, from
benchmarks/records/gpu.

Without a GPU it prints a message, and the exit code is 0.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

from benchmarks.gpu import live
from benchmarks.gpu.page import calls, profile_of, write_page
from benchmarks.gpu.records import RECORDS as JSONL
from benchmarks.gpu.records import Recorder, read_records
from benchmarks.support.harness import RECORDS, ROOT, argument_parser, command_line
from policies.profile import Profile
from server.energy.nvml import NvmlError, read_driver
from server.errors import one_line

# by whether the call is a rehearsal on the CPU
MODELS = {False: ("resnet50", "googlenet"), True: ("resnet18", "squeezenet1_1")}
SECOND = {False: "vit_l_16", True: "vit_b_32"}
LARGEST = {False: 128, True: 4}
SAFE_BATCH_SIZE = 32  # of the second call, if the first one failed
PARTS = {  # end of each part, s, in a call of 470 s and in one of 240 s, which end with the page
    False: {
        "idle": 30,
        "implementations": 52,
        "outputs": 77,
        "times": 135,
        "energies": 205,
        "server": 315,
        "peers": 425,
        "closing": 445,
    },
    True: {
        "idle": 30,
        "implementations": 38,
        "outputs": 45,
        "times": 70,
        "energies": 102,
        "server": 210,
        "closing": 220,
    },
}
BUDGETS = {False: 470.0, True: 240.0}  # s
_STALLED = 20.0  # s after the end of its part at which the first implementation has to be measured
_DEVICE_GRACE = 3.0  # s that the device's process may exceed its last part
_AWAITED, _AWAITED_LAST = 15.0, 40.0  # s that a first policy is waited for, and that the cells of the last take
_REFERENCES = {False: 128, True: 8}  # samples whose outputs are compared, in the first call and in the second
_CONTEXT = "import time, torch; torch.zeros(1, device='cuda:0'); time.sleep(600)"
_CLOSING = 24.0  # s at most of the idle time at the end
_SOLVED_LOADS = 4  # loads for which policies are solved
_FASTEST = 9000.0  # requests a second that one Python process is not expected to exceed


def find_gpu() -> str | None:
    """The first GPU's name; None without one. No context is opened, which would draw power."""
    with suppress(ImportError, NvmlError):
        gpus = read_driver().gpus
        return gpus[0] if gpus else None
    return None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect the numbers."""
    found = {"python": platform.python_version()}
    with suppress(ImportError, NvmlError):
        found["driver"] = read_driver().version
    for name in ("torch", "torchvision", "numpy", "uvicorn", "fastapi", "mosec", "litserve", "batchwright"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@dataclass
class Solver:
    """A policy that is solved for a profile in a process of its own, with one thread.

    Attributes:
        name: of the policy.
        path: of the policy file, which is there when it has ended.
        process: its process.
        began: s of time.monotonic.
    """

    name: str
    path: Path
    process: Any
    began: float

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self.process.poll() is not None

    def result(self, until: float, recorder: Recorder) -> Path | None:
        """The policy file; None, and a record of it, if it has failed or takes longer than until an instant."""
        while not self.ended and time.monotonic() < until:
            time.sleep(0.1)
        seconds = round(time.monotonic() - self.began, 1)
        if not self.ended:
            live.stop(self.process)
            recorder.add("policy", name=self.name, seconds=seconds, failed="it takes too long")
            return None
        error = self.process.communicate()[1]
        if self.process.returncode:
            recorder.add("policy", name=self.name, seconds=seconds, failed=error.strip()[-300:])
            return None
        recorder.add("policy", name=self.name, seconds=seconds, document=json.loads(self.path.read_text()))
        return self.path


def start_solvers(profile: Path, folder: Path) -> list[Solver]:
    """Solve the two policies that are compared, for loads up to what one process can serve."""
    known = Profile.load(profile)
    highest = min(0.9, _FASTEST / known.capacity)
    common = [str(profile), "--rates", f"{highest / _SOLVED_LOADS:.4f}:{highest:.4f}:{_SOLVED_LOADS}", "--json"]
    objectives = {f"smdp:slo_p95_ms={live.slo_ms(known):.4g}": ["--slo-p95-ms", f"{live.slo_ms(known):.4g}"]}
    weight = power_weight(known)
    if weight is not None:
        objectives = {f"smdp:w2={weight:.4g}": ["--w2", f"{weight:.4g}"], **objectives}
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    found = list[Solver]()
    for name, flags in objectives.items():
        path = folder / f"{len(found)}.policy.json"
        line = [*command_line("solve-policy"), *common, *flags, "--output", str(path)]
        process = live.start(line, environment, stdout=DEVNULL, stderr=PIPE, text=True)
        found.append(Solver(name, path, process, time.monotonic()))
    return found


def power_weight(profile: Profile) -> float | None:
    """The w2 at which the power above idle of a batch of 16 weighs as much as its service time, ms per W."""
    if profile.energies is None:
        return None
    index = min(16, profile.max_batch_size) - 1
    seconds, joules = profile.service_times[index], profile.energies[index]
    return 1e3 * seconds * seconds / joules if joules > 0 else None


class GpuCall:
    """One call: its parts one after the other."""

    def __init__(self, chosen: argparse.Namespace, folder: Path, scratch: Path) -> None:
        self._began = chosen.began
        self._second = chosen.second
        self._folder, self._scratch, self._rehearse = folder, scratch, chosen.rehearse
        self._recorder = Recorder(folder)
        scale = chosen.budget_s / BUDGETS[chosen.second]
        self._until = {part: self._began + scale * end for part, end in PARTS[chosen.second].items()}
        known = read_records(folder)
        self._samples = folder / f"samples-{1 + sum(record['kind'] == 'call' for record in known)}.csv"
        self._eager = chosen.second and not any(
            record["kind"] == "times" and record["model"] == chosen.models[0] for record in known
        )
        self._models = [*chosen.models]
        self._largest = chosen.max_batch_size
        if chosen.second:
            self._models = [chosen.models[0] if self._eager else chosen.second_model]
            self._largest = min(self._largest, SAFE_BATCH_SIZE) if self._eager else self._largest
        self._solvers: list[Solver] = []
        self._unsolvable = False
        self._rates = live.Rates()

    def run(self, device: str) -> None:
        """Run all parts; `device` is the GPU's name."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        self._recorder.add(
            "call", device=device, date=today, models=self._models, rehearsal=self._rehearse, eager=self._eager,
            versions=versions(), began=self._began, samples=self._samples.name,
        )  # fmt: skip
        options = ["--rehearse"] if self._rehearse else []
        sampler = [sys.executable, "-m", "benchmarks.gpu.sampler", "--file", str(self._samples)]
        sampling = live.start([*sampler, "--until", f"{self._until['closing'] + 2:.1f}", *options])
        try:
            self._part("device", "energies", self._device)
            self._part("server", "server", self._server)
            if not self._second:
                self._part("peers", "peers", self._measure_peers)
            self._part("closing idle", "closing", self._idle)
        finally:
            for solver in self._solvers:
                live.stop(solver.process)
            if sampling.poll() is not None:
                self._recorder.add("part", name="sampler", seconds=0.0, failed=f"it ended with code {sampling.poll()}")
            live.stop(sampling)

    def _part(self, name: str, end: str, run: Any) -> None:
        self._recorder.part(name, self._until[end], run)

    def _device(self) -> None:
        """Run the process that measures without a server; again, without what can take long, if it stalls at that."""
        try:
            self._run_device()
        except _StalledError as error:
            self._recorder.add("part", name="device", seconds=0.0, failed=str(error))
            self._eager = True
            self._run_device()
        finally:
            self._solve(ended=True)

    def _run_device(self) -> None:
        parts = {name: end for name, end in self._until.items() if name not in {"server", "peers", "closing"}}
        call = {
            "models": self._models, "largest": self._largest, "references": _REFERENCES[self._second],
            "eager": self._eager, "rehearse": self._rehearse, "until": parts,
        }  # fmt: skip
        line = [sys.executable, "-m", "benchmarks.gpu.device", "--out", str(self._folder), "--call", json.dumps(call)]
        process, stalled = live.start(line), self._until["implementations"] + _STALLED
        try:
            while process.poll() is None:
                if time.monotonic() > self._until["energies"] + _DEVICE_GRACE:
                    raise TimeoutError("it did not end")
                if not self._eager and stalled < time.monotonic() < stalled + 1.0 and not self._has("implementation"):
                    raise _StalledError("no implementation was measured in time; all networks run as they are")
                self._solve()
                time.sleep(0.2)
        finally:
            live.stop(process)
        if process.returncode:
            raise RuntimeError(f"it ended with code {process.returncode}")

    def _has(self, kind: str) -> bool:
        return any(record["kind"] == kind and record["time"] > self._began for record in read_records(self._folder))

    def _solve(self, ended: bool = False) -> None:
        """Start the solvers once, with what was measured of the first model; what fails is recorded."""
        if self._solvers or self._unsolvable or not (ended or self._has("measured")):
            return
        try:
            profile = profile_of([*calls(read_records(self._folder))][-1], self._folder, self._models[0])
            if profile is not None:
                self._profile_path().write_text(profile.to_json())
                self._solvers = start_solvers(self._profile_path(), self._scratch)
        except Exception as error:  # noqa: BLE001  (the windows of other models go on)
            self._unsolvable = True
            self._recorder.add("policy", name="all", seconds=0.0, failed=f"{type(error).__name__}: {one_line(error)}")

    def _profile_path(self) -> Path:
        return self._scratch / f"{self._models[0]}.profile.json"

    def _deployment(self) -> live.Deployment:
        device = "cpu" if self._rehearse else "cuda:0"
        return live.Deployment(self._models[0], device, self._largest, "eager" if self._eager else "auto")

    def _server(self) -> None:
        if not self._profile_path().is_file():
            raise RuntimeError("there is no profile")
        deployment, until = self._deployment(), self._until["server"]
        policies = self._policies(until)
        live.measure_server(deployment, self._profile_path(), policies, self._recorder, self._rates, until)

    def _policies(self, until: float) -> Iterator[tuple[str, Path]]:
        """The solved policies by name, each when it is asked for; what is not solved in time is left out.

        If none is solved soon, the first server has none of them, which takes more time than there is for another one.
        """
        waited = time.monotonic() + _AWAITED
        while self._solvers and not any(solver.ended for solver in self._solvers) and time.monotonic() < waited:
            time.sleep(0.1)
        for solver in sorted(self._solvers, key=lambda each: not each.ended):
            path = solver.result(until - _AWAITED_LAST if self._rates.best else waited, self._recorder)
            if path is not None:
                yield solver.name, path

    def _measure_peers(self) -> None:
        live.measure_peers(self._deployment(), self._recorder, self._rates, self._until["peers"])

    def _idle(self) -> None:
        """Measure idle power with a context open, as at the beginning."""
        holder = None if self._rehearse else live.start([sys.executable, "-c", _CONTEXT])
        end = min(time.monotonic() + _CLOSING, self._until["closing"])
        began = (time.monotonic() + end) / 2  # power falls slowly after a load
        time.sleep(max(0.0, end - time.monotonic()))
        if holder is not None:
            live.stop(holder)
        if end - 0.2 > began:
            self._recorder.add("idle", begin=began, end=end - 0.2)


class _StalledError(Exception):
    pass


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--second", action="store_true", help="the second call")
    parser.add_argument("--budget-s", type=float, help="time of the call, s (default: 470, and 240 of the second)")
    parser.add_argument("--out", type=Path, default=RECORDS / "gpu", help="folder of the records: %(default)s")
    parser.add_argument("--models", nargs="+", help=f"default: {' '.join(MODELS[False])}")
    parser.add_argument("--second-model", help=f"default: {SECOND[False]}")
    parser.add_argument("--max-batch-size", type=int, help=f"default: {LARGEST[False]}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small models and a synthetic counter")
    parser.add_argument(
        "--began", type=float, default=time.monotonic(), help="when the call began, s of time.monotonic (default: now)"
    )
    chosen = parser.parse_args(arguments)
    chosen.budget_s = chosen.budget_s or BUDGETS[chosen.second]
    chosen.models = chosen.models or [*MODELS[chosen.rehearse]]
    chosen.second_model = chosen.second_model or SECOND[chosen.rehearse]
    chosen.max_batch_size = chosen.max_batch_size or LARGEST[chosen.rehearse]
    return chosen


def continue_from(earlier: Path, folder: Path) -> None:
    """Copy the records of an earlier call, which may lie in the checkout, to a folder that has none."""
    if earlier.resolve() == folder.resolve() or (folder / JSONL).exists():
        return
    for path in (*earlier.glob(JSONL), *earlier.glob("samples-*.csv")):
        shutil.copy(path, folder)


def main() -> None:
    """Run a call."""
    chosen = parse()
    gpu = "a rehearsal" if chosen.rehearse else find_gpu()
    if gpu is None:
        print("nothing to measure: NVIDIA's driver has no GPU, or is not installed; give --rehearse to run on the CPU")
        return
    folder: Path = chosen.out
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.second:
        continue_from(RECORDS / "gpu", folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch  # nothing that was measured before is used
        GpuCall(chosen, folder, Path(scratch)).run(gpu)
    write_page(folder)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
