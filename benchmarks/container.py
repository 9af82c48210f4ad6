"""Run the Dockerfile's steps without Docker: COPY, RUN make, ENV, USER, HEALTHCHECK and CMD in a temporary folder.

The working tree is copied without the files of .dockerignore, `make` runs as in the Dockerfile, and the image's command
serves on an emulated device as an unprivileged user with write access to /tmp and the cache only, as in
deploy/compose.yaml. Checked: the health check passes, a prediction is answered, and SIGTERM ends the server with exit
code 0 after the drain delay. Then the same for the image of a user's model, whose Dockerfile extends this one: its
packages are installed, its files copied, and its command answers a photograph on the CPU. Steps that would change this
machine (packages, users, its own cache) are listed, not run. Needs root, to change the user.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from benchmarks.support.harness import ROOT, argument_parser, free_port, save_record, wait_until

USER = 10001
OWN = ROOT / "examples" / "image_classifier"  # whose Dockerfile extends the image
DRAIN = 5.0  # s, as in deploy/compose.yaml
READY = 120.0  # s
ARGUMENTS = ["--device", "emulated:googlenet-tesla-p4"]
_AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--bounding-set=-all", "--no-new-privs"]
_BARE = {"PATH": "/usr/bin:/bin", "HOME": "/home/none"}  # without this machine's environment
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && cd "$0" && ! touch x && exec "$@"'


def steps(dockerfile: str) -> list[tuple[str, str]]:
    """The instructions with their arguments, without comments, continued lines joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE)).splitlines()
    return [(line.split(None, 1)[0], " ".join(line.split()[1:])) for line in lines if line.strip()]


def target(all_steps: list[tuple[str, str]], name: str) -> list[tuple[str, str]]:
    """The instructions of a build stage, after those of the stages that it is based on."""
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for instruction, rest in all_steps:
        if instruction == "FROM":
            base, _, stage = rest.partition(" AS ")
            current = stages[stage or base] = list(stages.get(base, ()))
        else:
            current.append((instruction, rest))
    return stages[name]


def last(all_steps: list[tuple[str, str]], instruction: str) -> str:
    """The arguments of an instruction where it occurs last."""
    return [rest for name, rest in all_steps if name == instruction][-1]


def copied(patterns: list[str]) -> list[str]:
    """The files that COPY . . copies: those that git tracks or would add, less the patterns of .dockerignore."""
    line = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split("\0")
    return [file for file in files if file and (ROOT / file).is_file() and not _ignored(file, patterns)]


def _ignored(file: str, patterns: list[str]) -> bool:
    parents = ["/".join(file.split("/")[:n]) for n in range(1, file.count("/") + 2)]
    return any(fnmatch(parent, pattern.strip("/")) for parent in parents for pattern in patterns)


def build(all_steps: list[tuple[str, str]], into: Path) -> dict[str, Any]:
    """Copy the files and run the `make` steps; return the number of files and the steps run and not run."""
    patterns = (ROOT / ".dockerignore").read_text().split()
    files = copied(patterns)
    for file in files:
        (into / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, into / file)
    commands = [command.strip() for name, rest in all_steps if name == "RUN" for command in rest.split("&&")]
    runs = [command for command in commands if command.startswith("make ")]
    began = time.monotonic()
    for command in runs:
        environment = os.environ | {"PATH": _BARE["PATH"]}  # a Python that the unprivileged user can run, too
        subprocess.run(shlex.split(command), cwd=into, env=environment, check=True, stdout=sys.stderr)
    skipped = [command for command in commands if command not in runs]
    return {"files": len(files), "run": runs, "not_run": skipped, "seconds": round(time.monotonic() - began)}


def environment(all_steps: list[tuple[str, str]], cache: Path) -> dict[str, str]:
    """The variables of ENV, with `cache` in place of the image's cache."""
    given = dict(pair.split("=", 1) for name, rest in all_steps if name == "ENV" for pair in shlex.split(rest))
    ours = {key: str(cache) if "/.cache" in value else value for key, value in given.items() if key != "PATH"}
    return _BARE | ours | {"BATCHWRIGHT_DRAIN_DELAY_S": f"{DRAIN:g}"}


def extend(own_steps: list[tuple[str, str]], folder: Path) -> list[str]:
    """Install the packages of a user's image, and copy its files; return its command, for the copied files."""
    for name, rest in own_steps:
        if name == "RUN":
            subprocess.run([f".venv/bin/{rest}"], shell=True, cwd=folder / "tree", check=True, stdout=sys.stderr)  # noqa: S602
        elif name == "COPY":
            *files, into = rest.split()
            (folder / into.strip("/")).mkdir(exist_ok=True)
            for file in files:
                shutil.copy2(OWN / file, folder / into.strip("/"))
    command: list[str] = json.loads(last(own_steps, "CMD"))
    return [word.replace("=/", f"={folder}/") for word in command]


@contextmanager
def container(
    all_steps: list[tuple[str, str]], folder: Path, port: int, arguments: list[str]
) -> Iterator["subprocess.Popen[str]"]:
    """The process of the image's entrypoint, as the unprivileged user; of the folder it can write the cache only."""
    cache, tree = folder / "cache", folder / "tree"
    cache.mkdir(exist_ok=True)
    os.chown(cache, USER, USER)
    folder.chmod(0o755)
    command = [*json.loads(last(all_steps, "ENTRYPOINT")), *arguments]
    line = ["unshare", "--mount", "sh", "-c", _READ_ONLY, str(tree), *_AS_USER, *command, "--port", str(port)]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(line, cwd=tree, env=environment(all_steps, cache), stderr=log, text=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=30)
            _print(log)


def _print(log: IO[str]) -> None:
    log.seek(0)
    print(log.read(), file=sys.stderr)


def healthy(all_steps: list[tuple[str, str]], tree: Path, port: int) -> bool:
    """Whether HEALTHCHECK's command succeeds within `READY`."""
    line = json.loads(last(all_steps, "HEALTHCHECK").split("CMD", 1)[1].replace(":8000", f":{port}"))

    def succeeds() -> bool:
        return subprocess.run(line, cwd=tree, stderr=subprocess.DEVNULL, check=False).returncode == 0

    try:
        wait_until(succeeds, READY, 0.5)
    except TimeoutError:
        return False
    return True


def predict(port: int) -> dict[str, Any]:
    """The answer to a photograph."""
    photograph = (resources.files("matplotlib") / "mpl-data" / "sample_data" / "grace_hopper.jpg").read_bytes()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/predict", photograph, timeout=30) as answer:
        document: dict[str, Any] = json.load(answer)
    return {key: document[key] for key in ("model", "outputs", "batch_size", "energy_source") if key in document}


def generate_load(tree: Path, port: int) -> dict[str, Any]:
    """The report of two seconds of load, by the program and user of the compose file's loadgen service."""
    url = f"http://127.0.0.1:{port}"
    line = [*_AS_USER, ".venv/bin/generate-load", url, "--pixels", "--rate", "50", "--duration", "2", "--json"]
    done = subprocess.run(line, cwd=tree, env=_BARE, stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return {key: report[key] for key in ("scheduled", "ok", "errors")}


def terminate(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Send SIGTERM; return the exit code and the time until the end."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=60)
    return {"exit_code": code, "drained_s": round(time.monotonic() - began, 1)}


def status(pid: int) -> dict[str, str]:
    """The user and the capabilities of a process."""
    found = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return {key: found[key].replace("\t", " ") for key in ("Name", "Uid", "CapBnd", "NoNewPrivs")}


def main() -> None:
    """Print and record the checks; exit code 1 if one fails."""
    argument_parser(__doc__).parse_args()
    all_steps, port = target(steps((ROOT / "Dockerfile").read_text()), "any"), free_port()
    own_steps = steps((OWN / "Dockerfile").read_text())
    with TemporaryDirectory(prefix="image-") as name:
        folder = Path(name)
        (folder / "tree").mkdir()
        record: dict[str, Any] = {"build": build(all_steps, folder / "tree")}
        command = [*json.loads(last(all_steps, "CMD")), *ARGUMENTS]
        with container(all_steps, folder, port, command) as process:
            record["healthy"] = healthy(all_steps, folder / "tree", port)
            record["process"] = status(process.pid)
            record["answer"], record["load"] = predict(port), generate_load(folder / "tree", port)
            record |= terminate(process)
        with container(all_steps, folder, port, extend(own_steps, folder)) as process:
            own = {"healthy": healthy(all_steps, folder / "tree", port), "answer": predict(port)}
            record["own"] = own | terminate(process)
    save_record("container", record)
    print(json.dumps(record, indent=1))
    runs = (record, record["own"])
    sys.exit(not all(run["healthy"] and run["exit_code"] == 0 and run["drained_s"] >= DRAIN for run in runs))


if __name__ == "__main__":
    main()
