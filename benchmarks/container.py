"""The Dockerfile's steps without Docker: its COPY, RUN make, ENV, USER, HEALTHCHECK and CMD in a temporary folder.

What .dockerignore leaves of the working tree is copied, `make` runs as the Dockerfile says, and its command serves as
an unprivileged user to whom all but /tmp and the cache is read-only, as in deploy/compose.yaml, on an emulated device.
Then: the health check passes, a prediction is answered, SIGTERM ends it with exit code 0 after the drain delay. Steps
that would change this machine (packages, users, its own cache) are listed, not run. Needs root, to become another user.
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

from benchmarks.serving import free_port, save

ROOT = Path(__file__).parent.parent
USER = 10001
DRAIN = 5.0  # s, as in deploy/compose.yaml
READY = 120.0  # s
ARGUMENTS = ["--device", "emulated:googlenet-tesla-p4"]
_AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--bounding-set=-all", "--no-new-privs"]
_BARE = {"PATH": "/usr/bin:/bin", "HOME": "/home/nobody-is-here"}  # nothing of this machine's environment
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && cd "$0" && ! touch x && exec "$@"'


def steps(dockerfile: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each, comments and continued lines resolved."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE)).splitlines()
    return [(line.split(None, 1)[0], " ".join(line.split()[1:])) for line in lines if line.strip()]


def last(all_steps: list[tuple[str, str]], instruction: str) -> str:
    return [rest for name, rest in all_steps if name == instruction][-1]


def copied(patterns: list[str]) -> list[str]:
    """What COPY . . takes: files that git knows or would add, less .dockerignore."""
    line = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split("\0")
    return [file for file in files if file and (ROOT / file).is_file() and not _ignored(file, patterns)]


def _ignored(file: str, patterns: list[str]) -> bool:
    parents = ["/".join(file.split("/")[:n]) for n in range(1, file.count("/") + 2)]
    return any(fnmatch(parent, pattern.strip("/")) for parent in parents for pattern in patterns)


def build(all_steps: list[tuple[str, str]], into: Path) -> dict[str, Any]:
    """Copy, and run what can be run; what was and what was not."""
    patterns = (ROOT / ".dockerignore").read_text().split()
    files = copied(patterns)
    for file in files:
        (into / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, into / file)
    commands = [command.strip() for name, rest in all_steps if name == "RUN" for command in rest.split("&&")]
    runs = [command for command in commands if command.startswith("make ")]
    began = time.monotonic()
    for command in runs:
        subprocess.run(shlex.split(command), cwd=into, check=True, stdout=sys.stderr)
    skipped = [command for command in commands if command not in runs]
    return {"files": len(files), "run": runs, "not_run": skipped, "seconds": round(time.monotonic() - began)}


def environment(all_steps: list[tuple[str, str]], cache: Path) -> dict[str, str]:
    """ENV's variables with the cache in its place."""
    given = dict(pair.split("=", 1) for name, rest in all_steps if name == "ENV" for pair in shlex.split(rest))
    ours = {key: str(cache) if "/.cache" in value else value for key, value in given.items()}
    return _BARE | ours | {"BATCHWRIGHT_DRAIN_DELAY_S": f"{DRAIN:g}"}


@contextmanager
def container(all_steps: list[tuple[str, str]], folder: Path, port: int) -> Iterator["subprocess.Popen[str]"]:
    """The image's command as the unprivileged user, all of the folder read-only to it but the cache."""
    cache, tree = folder / "cache", folder / "tree"
    cache.mkdir()
    os.chown(cache, USER, USER)
    folder.chmod(0o755)
    command = [*json.loads(last(all_steps, "ENTRYPOINT")), *json.loads(last(all_steps, "CMD")), *ARGUMENTS]
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
    """HEALTHCHECK's command, asked until it agrees."""
    line = json.loads(last(all_steps, "HEALTHCHECK").split("CMD", 1)[1].replace(":8000", f":{port}"))
    end = time.monotonic() + READY
    while time.monotonic() < end:
        if subprocess.run(line, cwd=tree, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return True
        time.sleep(0.5)
    return False


def predict(port: int) -> dict[str, Any]:
    photograph = (resources.files("matplotlib") / "mpl-data" / "sample_data" / "grace_hopper.jpg").read_bytes()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/predict", photograph, timeout=30) as answer:
        document: dict[str, Any] = json.load(answer)
    return {key: document[key] for key in ("model", "batch_size", "energy_source")}


def load(tree: Path, port: int) -> dict[str, Any]:
    """A little of what the compose file's loadgen sends, by the same program and user."""
    url = f"http://127.0.0.1:{port}"
    line = [*_AS_USER, ".venv/bin/generate-load", url, "--pixels", "--rate", "50", "--duration", "2", "--json"]
    done = subprocess.run(line, cwd=tree, env=_BARE, stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return {key: report[key] for key in ("scheduled", "ok", "errors")}


def end(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """SIGTERM; how long it took, and the exit code."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=60)
    return {"exit_code": code, "drained_s": round(time.monotonic() - began, 1)}


def status(pid: int) -> dict[str, str]:
    """Whose process it is, and what it may do."""
    found = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return {key: found[key].replace("\t", " ") for key in ("Name", "Uid", "CapBnd", "NoNewPrivs")}


def main() -> None:
    """Print and record what happened; exit code 1 where something is amiss."""
    all_steps, port = steps((ROOT / "Dockerfile").read_text()), free_port()
    with TemporaryDirectory(prefix="image-") as name:
        folder = Path(name)
        (folder / "tree").mkdir()
        record: dict[str, Any] = {"build": build(all_steps, folder / "tree")}
        with container(all_steps, folder, port) as process:
            record["healthy"] = healthy(all_steps, folder / "tree", port)
            record["process"] = status(process.pid)
            record["answer"], record["load"] = predict(port), load(folder / "tree", port)
            record |= end(process)
    save("container", record)
    print(json.dumps(record, indent=1))
    sys.exit(not (record["healthy"] and record["exit_code"] == 0 and record["drained_s"] >= DRAIN))


if __name__ == "__main__":
    main()
