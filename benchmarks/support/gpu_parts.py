"""Parts of a GPU stage, each a process of its own with a time limit, whose results are saved as they arrive.

A part prints a result as a line of JSON after a mark; all else that it prints is its log. A part that fails, hangs or
crashes the CUDA context leaves the results that it had, and the other parts run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

_MARK = "::result "
_GRACE = 10.0  # s that a part may exceed its limit, which it knows, before it is killed
_ATTEMPTS = 2  # after which a failed part is not run again unless its stage is asked for
_LOG_LINES = 30  # of a failed part that are kept


@dataclass(frozen=True)
class Part:
    """A part of a stage.

    Attributes:
        name: such as "profile:resnet50".
        weight: its share of the stage's time, relative to those of the other parts.
    """

    name: str
    weight: float


def emit(key: str, value: Any) -> None:
    """Report a result of the part that this process runs; a later value of the same key replaces the earlier one."""
    print(_MARK + json.dumps([key, value]), flush=True)


def is_done(record: Mapping[str, Any], parts: Sequence[Part], repeat: bool = False) -> bool:
    """Whether nothing of a stage is left to run: all parts are done, or have failed as often as they are tried."""
    return not _left(record, parts, repeat)


def _left(record: Mapping[str, Any], parts: Sequence[Part], repeat: bool) -> list[Part]:
    known = record.get("parts", {})
    return [
        part
        for part in parts
        if not (found := known.get(part.name, {})).get("done") and (repeat or found.get("attempts", 0) < _ATTEMPTS)
    ]


def run_parts(
    record: dict[str, Any],
    parts: Sequence[Part],
    command: Callable[[Part, float], Sequence[str]],
    until: float,
    save: Callable[[], object],
    repeat: bool = False,
) -> None:
    """Run the parts of a stage that its record lacks, and add their results to it.

    The time that is left is divided among them by weight, so that a part that ends early leaves time to the others.

    Args:
        record: of the stage; "parts" is by name: "results", "done", "seconds", "attempts", and "failed" if it did.
        parts: in order.
        command: the command line of a part, given its limit, s.
        until: end of the stage, s of time.monotonic.
        save: called after each result.
        repeat: whether parts that have failed twice are run again.
    """
    left = _left(record, parts, repeat)
    for index, part in enumerate(left):
        remaining = until - time.monotonic() - _GRACE
        limit = remaining * part.weight / sum(other.weight for other in left[index:])
        entry = record.setdefault("parts", {}).setdefault(part.name, {})
        if limit < 1.0:
            entry["failed"] = "no time was left for it"
        else:
            print(f"== {part.name}, at most {limit:.0f} s", flush=True)
            entry["attempts"] = entry.get("attempts", 0) + 1
            _run(entry, command(part, limit), limit + _GRACE, save)
        save()


def _run(entry: dict[str, Any], command: Sequence[str], within: float, save: Callable[[], object]) -> None:
    began, log = time.monotonic(), list[str]()
    entry.pop("failed", None)
    results = entry.setdefault("results", {})
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as process:
        assert process.stdout is not None
        timer = Timer(within, _kill, [process])
        timer.start()
        for line in process.stdout:
            if line.startswith(_MARK):
                with suppress(json.JSONDecodeError):
                    key, value = json.loads(line.removeprefix(_MARK))
                    results[key] = value
                    save()
                print(f"{time.monotonic() - began:6.1f} s  {line.removeprefix(_MARK).strip()[:160]}", flush=True)
            else:
                print(f"  {line.rstrip()[:200]}", flush=True)
                log = [*log[-_LOG_LINES:], line.rstrip()]
        code = process.wait()
        timer.cancel()
        _kill(process)  # what it started, such as a server
    entry["seconds"] = round(time.monotonic() - began, 1)
    entry["done"] = code == 0
    if code:
        how = f"was stopped after {within:.0f} s" if code == -signal.SIGKILL else f"ended with code {code}"
        entry["failed"] = "\n".join([how, *log])


def _kill(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_record(path: Path) -> dict[str, Any]:
    """A stage's record; an empty one if there is none, or the file is damaged."""
    with suppress(OSError, json.JSONDecodeError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record in one step, so that a run that is stopped leaves the one before or this one."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)


def python(*arguments: str) -> list[str]:
    """The command line of a module of this checkout."""
    return [sys.executable, "-u", "-m", *arguments]
