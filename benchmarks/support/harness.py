"""Shared by the benchmark scripts: servers, the project's commands, records, tables, figures, command lines."""

import argparse
import io
import json
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import psutil
import scipy
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
_RESEARCH = ROOT / "research"
FIGURES = ROOT / "docs" / "figures"
TRACE = ROOT.parent / "shared" / "data" / "azure-llm-2023-conv.csv"  # Azure/AzurePublicDataset
_PORTS = (10_000, 32_768)  # below those of outgoing connections, by Linux's default
MODULES = {
    "serve-model": "server.cli",
    "generate-load": "loadgen.cli",
    "profile-model": "profiler.cli",
    "solve-policy": "policies.command_line.cli",
}


# Servers


@dataclass(frozen=True)
class Server:
    """A running server process."""

    url: str
    process: "subprocess.Popen[bytes]"

    def samples(self, name: str) -> list[Sample]:
        """The samples of one metric."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples if sample.name == name]

    def metric(self, name: str) -> dict[str, float]:
        """The values of one metric by their labels as text, such as `{model="m"}`."""
        return {_labels(sample): sample.value for sample in self.samples(name)}

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of one metric by one of its labels, summed over the others."""
        values: dict[str, float] = {}
        for sample in self.samples(name):
            values[sample.labels[label]] = values.get(sample.labels[label], 0.0) + sample.value
        return values

    def total(self, name: str) -> float:
        """The sum of a metric over all labels."""
        return sum(sample.value for sample in self.samples(name))

    def set_policy(self, model: str, spec: str) -> None:
        """Swap the policy of a model while it serves."""
        url, body = f"{self.url}/admin/models/{model}/policy", json.dumps({"policy": spec}).encode()
        urllib.request.urlopen(urllib.request.Request(url, body, method="PUT"), timeout=30).close()

    def cpu_seconds(self) -> float:
        """User and system time of the process so far, s."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


def _labels(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
    return f"{{{labels}}}" if labels else ""


def start_process(command: Sequence[str], stderr: int, files: int | None = None) -> "subprocess.Popen[bytes]":
    """Start a process; the tests put their own function in the place of this one.

    Args:
        command: the command line.
        stderr: descriptor of the process's standard error.
        files: its limit of open files; None: that of this process.
    """

    def limit_files() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    return subprocess.Popen(command, stderr=stderr, preexec_fn=limit_files)  # noqa: PLW1509


def run_process(command: Sequence[str], within: float | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a process until it ends; return its exit code and its output. Tests replace it, as they do `start_process`.

    Args:
        command: the command line.
        within: time after which subprocess.TimeoutExpired is raised, s; None: no limit.
    """
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=within)


@contextmanager
def running(
    *command: str,
    ready_within: float = 120.0,
    tls: ssl.SSLContext | None = None,
    files: int | None = None,
    port: int | None = None,
) -> Iterator[Server]:
    """Run a server's command line until it is ready; send it SIGTERM at the end.

    Args:
        command: the command line, without --port.
        ready_within: start-up time after which the run fails, s.
        tls: client context for a server that speaks TLS; None: plain HTTP.
        files: the server's limit of open files; None: this process's own limit.
        port: the server's port; None: a free one.

    Raises:
        RuntimeError: the server ended or was not ready in time; the message contains its log.
    """
    port = port or free_port()
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"

    with tempfile.TemporaryFile("w+") as log:
        process = start_process([*command, "--port", str(port)], log.fileno(), files)
        try:
            _await_ready(process, f"{url}/v2/health/ready", ready_within, log, tls)
            yield Server(url, process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def serving(*arguments: str, ready_within: float = 120.0) -> AbstractContextManager[Server]:
    """Run serve-model with these arguments."""
    return running(*command_line("serve-model"), *arguments, ready_within=ready_within)


def serving_bare_fastapi(profile: str) -> AbstractContextManager[Server]:
    """Run the baseline, benchmarks/servers/bare_fastapi.py, on a profile."""
    return running(sys.executable, "-m", "benchmarks.servers.bare_fastapi", "--profile", profile)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now; none that the system may give to a connection meanwhile."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(*_PORTS)))
            return int(probe.getsockname()[1])


def _await_ready(
    process: "subprocess.Popen[bytes]", url: str, ready_within: float, log: IO[str], tls: ssl.SSLContext | None
) -> None:
    with suppress(TimeoutError):
        wait_until(lambda: process.poll() is not None or answers(url, tls=tls), ready_within, 0.05)
        if process.poll() is None:
            return
    process.kill()
    log.seek(0)
    raise RuntimeError(f"the server did not become ready within {ready_within:g} s: {log.read()}")


def answers(target: str | urllib.request.Request, timeout: float = 1.0, tls: ssl.SSLContext | None = None) -> bool:
    """Whether a request gets a response with a status below 400 within `timeout`, s."""
    try:
        with urllib.request.urlopen(target, timeout=timeout, context=tls):
            return True
    except (urllib.error.URLError, OSError):
        return False


def wait_until(condition: Callable[[], bool], within: float, interval: float = 0.2) -> float:
    """Poll a condition until it is true; return how long that took, s.

    Raises:
        TimeoutError: it is still false after `within`, s.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + within:
            raise TimeoutError(f"the condition is still false after {within:g} s")
        time.sleep(interval)
    return time.monotonic() - began


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 per cent interval by Student's t; 0 for one value."""
    if len(values) < 2:
        return float(np.mean(values)), 0.0
    factor = scipy.special.stdtrit(len(values) - 1, 0.975)
    return float(np.mean(values)), float(factor * np.std(values, ddof=1) / len(values) ** 0.5)


def median_of_histogram(samples: Iterable[Sample]) -> float | None:
    """The median of a Prometheus histogram's _bucket samples, interpolated within its bucket; None when empty."""
    buckets = sorted((float(sample.labels["le"]), sample.value) for sample in samples)
    if not buckets or not buckets[-1][1]:
        return None
    half, low, below = buckets[-1][1] / 2, 0.0, 0.0
    for high, count in buckets:
        if count >= half:
            return low + (high - low) * (half - below) / (count - below)
        low, below = high, count
    return None


# The project's commands


def command_line(command: str) -> list[str]:
    """The command line of one of the project's commands, installed or not."""
    return [sys.executable, "-m", MODULES[command]]


def run_json(command: str, *arguments: str, within: float | None = None) -> Any:
    """Run one of the project's commands with --json, and return its parsed output.

    Args:
        command: its name, such as solve-policy.
        arguments: without --json.
        within: time after which subprocess.TimeoutExpired is raised, s; None: no limit.

    Raises:
        RuntimeError: the command failed.
    """
    done = run_process([*command_line(command), *arguments, "--json"], within)
    if done.returncode:
        raise RuntimeError(f"{command} {' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout)


def start_load(url: str, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """Start generate-load with --json in the background; its report goes to the process's stdout, a pipe.

    Args:
        url: the server's.
        arguments: of generate-load.
        options: of subprocess.Popen.
    """
    line = [*command_line("generate-load"), url, *arguments, "--json"]
    return subprocess.Popen(line, **{"stdout": subprocess.PIPE, "text": True, **options})


def measure_and_simulate(
    url: str, profile: str, arguments: Sequence[str], live: Sequence[str] = ()
) -> tuple[list[Any], list[Any]]:
    """Reports of generate-load --compare by policy, of a server and of the simulator on the same arrivals.

    Args:
        url: the server's.
        profile: for --simulate.
        arguments: arrivals, --slo-ms and --compare flags.
        live: further flags for the server alone.
    """
    measured = run_json("generate-load", url, *live, *arguments)["rows"]
    return measured, run_json("generate-load", "--simulate", profile, *arguments)["rows"]


def measure_profile(model: str, path: Path, *flags: str) -> None:
    """Write the profile of a model without energies, by profile-model --quick."""
    run_json("profile-model", model, *flags, "--quick", "--energy-time", "0", "--output", str(path))


def instant_profile(folder: Path) -> Path:
    """Write the profile of a device that takes 1 us for each batch of at most 32; return its path."""
    path = folder / "instant.json"
    sizes = {"batch_size": [1, 32], "service_time_s": [1e-6, 1e-6]}
    path.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "instant", **sizes}))
    return path


@contextmanager
def temporary_cache() -> Iterator[Path]:
    """A folder that is the commands' cache too, so that no profile of an earlier run is used."""
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        yield Path(name)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object a line, such as generate-load --output writes."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# Images


def synthetic_image(rng: np.random.Generator, grid: int, side: int, image_format: str, **options: Any) -> bytes:
    """A smooth encoded image: random colours on a coarse grid, enlarged.

    Args:
        rng: draws the colours.
        grid: cells in each direction.
        side: width and height, pixels.
        image_format: JPEG or PNG.
        options: of the encoder.
    """
    coarse = Image.fromarray(rng.integers(0, 256, (grid, grid, 3), np.uint8))
    buffer = io.BytesIO()
    coarse.resize((side, side), Image.Resampling.BICUBIC).save(buffer, image_format, **options)
    return buffer.getvalue()


def small_jpeg() -> bytes:
    """A JPEG of about 1 KB, so that the client's bandwidth is no limit."""
    return synthetic_image(np.random.default_rng(0), 4, 48, "JPEG", quality=70)


# Records, tables, figures


def record_file(file: str) -> Path:
    """Where the file of a record is: in the records of research/ if its script is there, else of benchmarks/."""
    script = _RESEARCH / Path(file).with_suffix(".py")
    return (_RESEARCH / "records" if script.is_file() else RECORDS) / file


def load_record(name: str) -> Any:
    """A record made before; an empty dictionary where there is none."""
    path = record_file(f"{name}.json")
    return json.loads(path.read_text()) if path.is_file() else {}


def save_record(name: str, record: Any) -> None:
    """Write a record as NAME.json."""
    record_file(f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def save_table(name: str, title: str, text: str) -> None:
    """Print a record's table, and write it as NAME.md."""
    record_file(f"{name}.md").write_text(f"# {title}\n\n{text}")
    print(text)


def fill_record(name: str, cells: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Measure the cells that the record lacks, saving it after each, and return it; delete the record to start over."""
    record: dict[str, Any] = load_record(name)
    for key, measure in cells.items():
        if key not in record:
            print(f"measuring {key}", flush=True)
            record[key] = measure()
            save_record(name, record)
    return record


def measure_parts(name: str, description: str | None, parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Parse a command line that names parts of a record, measure these anew, save after each, and return the record.

    Args:
        name: the record's.
        description: of the script, for --help.
        parts: functions that measure them; without a name on the command line all, with "draw" none.
    """
    parser = argument_parser(description)
    names = f"{', '.join(parts)}; draw: measure nothing, only draw the figures"
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to measure (default: all): {names}")
    chosen = parser.parse_args().parts
    if unknown := set(chosen) - {*parts, "draw"}:
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {names}")
    record: dict[str, Any] = load_record(name)
    for part in [part for part in chosen or parts if part != "draw"]:
        began = time.monotonic()
        record[part] = parts[part]()
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
        save_record(name, record)
    return record


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], right_aligned: Collection[int] = frozenset()
) -> str:
    """A Markdown table; `right_aligned` are indices of columns."""
    ruler = ["---:" if column in right_aligned else "---" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, ruler, *rows))


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, inches; without pyplot, which needs a display and keeps global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def finish_axes(axes: "Axes", legend: Mapping[str, Any] | None = None) -> None:
    """Draw a light grid and no box; with `legend`, a legend with these options of Axes.legend."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend is not None:
        axes.legend(**{"frameon": False, **legend})


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the resolution of the documentation's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


# Command lines


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_trace_argument(parser: argparse.ArgumentParser) -> None:
    """Add --trace, the path of the trace of conversations."""
    parser.add_argument("--trace", type=Path, default=TRACE, help="azure-llm-2023-conv.csv (default: %(default)s)")


def require_trace(path: Path) -> None:
    """End the script with a message if there is no trace at this path."""
    if not path.is_file():
        sys.exit(f"no trace at {path}: download azure-llm-2023-conv.csv (Azure/AzurePublicDataset) to this path")
