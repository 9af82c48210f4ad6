"""On a machine with a GPU: correctness, kernels, profiles with energy, and throughput, in three runs of nine minutes.

A: tests marked gpu, the network's implementations by batch size, uploads. B: profiles of two models with energies.
C: policies on these profiles, without HTTP and through gateways. Without --stage a run takes the first stage that is
not complete in the records, so that three runs make all of them. A part that fails is repeated once by the next run.

Needs no network and no package beyond pyproject.toml's. Run as `make gpu`, or where the project is not installed as
`PYTHONPATH=.:FOLDER_OF_WHEELS python3 -m benchmarks.gpu`. Without a GPU it prints a message, and the exit code is 0.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.support.gpu_parts import Part, emit, is_done, python, read_record, run_parts, write_record
from benchmarks.support.gpu_tables import report
from benchmarks.support.harness import RECORDS, ROOT, argument_parser
from policies.profile import Profile, parse_profile
from policies.types import SpecError

MODELS = "resnet50", "googlenet"
MAX_BATCH_SIZE = 128
BUDGET = 9 * 60.0  # s of a stage
STAGES: Mapping[str, tuple[Part, ...]] = {  # MODEL stands for each of the models
    "A": (Part("tests", 3.0), Part("uploads", 1.0), Part("kernels:MODEL", 3.0)),
    "B": (Part("profile:MODEL", 1.0),),
    "C": (Part("policies:MODEL", 1.2), Part("http:MODEL", 1.0)),
}


def find_gpu() -> str | None:
    """The first GPU's name; None without one."""
    try:
        import torch
    except ImportError:
        return None
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def _reason() -> str:
    """Why there is no CUDA device."""
    try:
        from server.backends.torch_device import unusable_gpu
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return unusable_gpu() or "NVIDIA's driver has no GPU, or is not installed"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect the numbers."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "numpy", "uvicorn", "uvloop", "fastapi", "batchwright"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def next_stage(folder: Path, models: Sequence[str] = MODELS) -> str | None:
    """The first stage that the records lack for these models; None if they are complete."""
    return next((s for s in STAGES if not is_done(read_record(_path(folder, s)), parts_of(s, models))), None)


def _path(folder: Path, stage: str) -> Path:
    return folder / f"stage-{stage.lower()}.json"


def run_stage(stage: str, folder: Path, arguments: argparse.Namespace, device: str, until: float, repeat: bool) -> bool:
    """Run what a stage's record lacks, and write the record, profiles and report.md; return whether it is complete.

    Args:
        stage: A, B or C.
        folder: of the records, at most eight files.
        arguments: --models, --max-batch-size and --rehearse, for the parts.
        device: its name.
        until: end of the stage, s of time.monotonic.
        repeat: whether parts that have failed twice are run again.
    """
    path, parts = _path(folder, stage), parts_of(stage, arguments.models)
    record = read_record(path)
    record |= {"stage": stage, "device": device, "versions": versions()}
    record["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()

    def command(part: Part, limit: float) -> list[str]:
        options = ["--max-batch-size", str(arguments.max_batch_size), *["--rehearse"] * arguments.rehearse]
        return python(
            "benchmarks.gpu", "--part", part.name, "--until", f"{time.monotonic() + limit:.1f}", "--out", str(folder),
            *options,
        )  # fmt: skip

    def save() -> None:
        write_record(path, record)
        _write_profiles(record, folder)

    run_parts(record, parts, command, until, save, repeat)
    save()
    known = {letter: found for letter in STAGES if (found := read_record(_path(folder, letter)))}
    (folder / "report.md").write_text(report(known))
    print(report({stage: record}), flush=True)
    return all(record["parts"].get(part.name, {}).get("done") for part in parts)


def parts_of(stage: str, models: Sequence[str]) -> list[Part]:
    """The parts of a stage for these models."""
    return [
        Part(part.name.replace("MODEL", model), part.weight)
        for part in STAGES[stage]
        for model in (models if "MODEL" in part.name else [""])
    ]


def _write_profiles(record: Mapping[str, Any], folder: Path) -> None:
    for name, part in record.get("parts", {}).items():
        profile = part.get("results", {}).get("profile")
        if name.startswith("profile:") and profile is not None:
            with suppress(SpecError):  # the record has it, too
                text = parse_profile(json.dumps(profile), name).to_json()
                (folder / f"{name.partition(':')[2]}.profile.json").write_text(text)


def profile_of(model: str, folder: Path) -> Profile:
    """The profile that stage B has measured.

    Raises:
        SpecError: there is none.
    """
    path = folder / f"{model}.profile.json"
    if not path.is_file():
        raise SpecError(f"no profile of {model} at {path}; run stage B first: make gpu STAGE=B")
    return Profile.load(path)


def run_part(name: str, arguments: argparse.Namespace) -> None:
    """Measure one part of a stage, in this process."""
    kind, _, model = name.partition(":")
    rehearse, until = arguments.rehearse, arguments.until
    device = "cpu" if rehearse else "cuda:0"
    meters = _rehearsal_meters() if rehearse else {}
    largest = arguments.max_batch_size
    parts: Mapping[str, Callable[[], object]] = {
        "tests": partial(_run_tests, rehearse, until),
        "uploads": partial(_measure_uploads, rehearse),
        "kernels": partial(_measure_kernels, model, rehearse, largest, until),
        "profile": partial(_measure_profile, model, device, largest, until, meters),
        "policies": partial(_measure_policies, model, device, arguments.out, until, meters),
        "http": partial(_measure_http, model, device, arguments.out, until),
    }
    if model and kind != "kernels" and not rehearse:
        _keep_choice(model, arguments.out)
    parts[kind]()


def _keep_choice(model: str, folder: Path) -> None:
    """Serve the implementation that was the fastest in stage A: to compare them again takes minutes."""
    import torch

    from benchmarks.support.gpu_kernels import keep_choice

    kernels = read_record(_path(folder, "A")).get("parts", {}).get(f"kernels:{model}", {})
    keep_choice(model, kernels.get("results", {}).get("cells", []), torch.device("cuda:0"), find_gpu() or "")


def _run_tests(rehearse: bool, until: float) -> None:
    # without the settings of pyproject.toml, which name plugins that the machine may lack
    options = ["-c", os.devnull, "--rootdir", str(ROOT), "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command = python("pytest", "tests/gpu", *(["--collect-only"] if rehearse else ["-m", "gpu"]), *options)
    seconds = max(1.0, until - time.monotonic())
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode(errors="replace")[-6000:], flush=True)
        sys.exit(f"pytest did not end within {seconds:.0f} s")
    output = done.stdout.decode(errors="replace")
    print(output[-6000:], flush=True)
    emit("tests", output.strip().rpartition("\n")[2] or f"pytest ended with {done.returncode}")
    sys.exit(done.returncode)


def _measure_uploads(rehearse: bool) -> None:
    from benchmarks.support.gpu_kernels import Cuda, Rehearsal, measure_uploads

    measure_uploads(*((Rehearsal(), 64) if rehearse else (Cuda(),)))


def _measure_kernels(model: str, rehearse: bool, largest: int, until: float) -> None:
    from benchmarks.support.gpu_kernels import SIZES, Cuda, Rehearsal, measure_kernels

    sizes = tuple(size for size in SIZES if size <= largest)
    measure_kernels(model, Rehearsal() if rehearse else Cuda(), sizes, not rehearse, until)


# The time that is left is read after the imports, which take seconds on a machine that has not run them before.
def _measure_profile(model: str, device: str, largest: int, until: float, meters: Mapping[str, Any]) -> None:
    from benchmarks.support.gpu_energy import measure_profile

    measure_profile(model, device, largest, until - time.monotonic(), **meters)


def _measure_policies(model: str, device: str, folder: Path, until: float, meters: Mapping[str, Any]) -> None:
    from benchmarks.support.gpu_policies import measure_policies

    measure_policies(model, device, profile_of(model, folder), until - time.monotonic(), **meters)


def _measure_http(model: str, device: str, folder: Path, until: float) -> None:
    from benchmarks.support.gpu_http import GATEWAYS, measure_http

    profile_of(model, folder)
    most = max(1, (os.cpu_count() or 1) - 2)
    gateways = [count for count in GATEWAYS if count <= most]
    measure_http(model, device, folder / f"{model}.profile.json", gateways, until - time.monotonic())


def _rehearsal_meters() -> dict[str, Any]:
    from benchmarks.support.gpu_rehearsal import RehearsalMeter

    return {"meters": lambda device: RehearsalMeter()}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--stage", choices=("next", *STAGES, "all"), default="next", help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=RECORDS / "gpu", help="folder of the records (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=BUDGET, help="time of a stage, s (default: %(default)s)")
    parser.add_argument("--max-batch-size", type=int, default=MAX_BATCH_SIZE, help="default: %(default)s")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="default: %(default)s")
    parser.add_argument(
        "--rehearse", action="store_true", help="run all parts on the CPU with a synthetic energy counter"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=time.monotonic() + BUDGET, help=argparse.SUPPRESS)  # its end
    return parser.parse_args()


def main() -> None:
    """Run a stage, or with --part a part of one."""
    arguments = parse()
    if arguments.part is not None:
        run_part(arguments.part, arguments)
        return
    began, gpu = time.monotonic(), "a rehearsal" if arguments.rehearse else find_gpu()
    if gpu is None:
        print(f"no CUDA device that the torch of {sys.executable} can use: nothing to measure; {_reason()}")
        return
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    _continue_from(RECORDS / "gpu", folder)
    chosen = [arguments.stage]
    if arguments.stage in {"next", "all"}:
        first = next_stage(folder, arguments.models)
        chosen = (
            [] if first is None else [first] if arguments.stage == "next" else list(STAGES)[list(STAGES).index(first) :]
        )
    if not chosen:
        print(f"the records in {folder} are complete; give --stage to repeat the failed parts of one, or another --out")
        return
    complete = True
    for index, stage in enumerate(chosen):
        begin = began if index == 0 else time.monotonic()
        repeat = arguments.stage == stage
        complete &= run_stage(stage, folder, arguments, gpu, begin + arguments.seconds, repeat)
    sys.exit(0 if complete else 1)


def _continue_from(earlier: Path, folder: Path) -> None:
    """Copy the records of earlier runs to a folder that has none."""
    if earlier.resolve() == folder.resolve() or any(folder.glob("stage-*.json")):
        return
    for path in [*earlier.glob("stage-*.json"), *earlier.glob("*.profile.json")]:
        shutil.copy(path, folder)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
