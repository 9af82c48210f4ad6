"""Apply one-line mutations to a copy of the code, one at a time, and run the tests that should fail.

Each mutation removes a safeguard that no test covered in the past. A mutation survives if no test fails; the exit code
is then 1. Needs the development environment.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.harness import ROOT, argument_parser, save_record

_COPIED = (
    *("batchwright", "policies", "server", "profiler", "loadgen", "benchmarks", "deploy", "tests"),
    "pyproject.toml",
)


@dataclass(frozen=True)
class Mutation:
    """One change of the code.

    Attributes:
        about: the safeguard that it removes.
        file: the file that it changes.
        before: the text that is replaced; it occurs in the file once.
        after: the replacement.
        tests: files or folders of tests of which one must fail.
    """

    about: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "reserve memory for each piece of a body",
        "server/transport/http_call.py",
        "            reserve(size)\n",
        "",
        ("tests/server/transport/test_http_call.py",),
    ),
    Mutation(
        "offer no standby launch while a timeout may pass",
        "server/scheduling/lookahead.py",
        "if expiry < inf and expiry < at + self._forecast.next_launch_bound():",
        "if False:",
        ("tests/server/scheduling/test_lookahead.py",),
    ),
    Mutation(
        "withdraw the standby launch before a request is removed",
        "server/scheduling/dispatcher.py",
        "            self._lookahead.withdraw()\n            self._on_change()\n",
        "            self._on_change()\n",
        ("tests/server/scheduling/test_lookahead.py",),
    ),
    Mutation(
        "decide again while a batch is overdue",
        "server/scheduling/lookahead.py",
        "        self._set_timer(0.0)\n        self._decide()\n",
        "        self._set_timer(0.0)\n",
        ("tests/server/scheduling/test_lookahead.py", "tests/server/scheduling/test_admission.py"),
    ),
    Mutation(
        "solve again if the profile was refitted meanwhile",
        "server/scheduling/policy_swap.py",
        "        or solved[dispatcher, model].profile is not dispatcher.chosen[model].profile  # replaced meanwhile\n",
        "",
        ("tests/server/scheduling/test_policy_swap.py",),
    ),
    Mutation(
        "keep a policy that was set while another one was solved",
        "server/scheduling/controller.py",
        "if self._dispatcher.chosen[model] is not monitored.current:\n            return",
        "if False:\n            return",
        ("tests/server/scheduling/test_controller.py",),
    ),
    Mutation(
        "learn how late answers are from requests that expire",
        "server/scheduling/expiry.py",
        "        self._admission.observe(call.earliest, answered)\n",
        "",
        ("tests/server/scheduling/test_dispatcher_expiry.py",),
    ),
    Mutation(
        "count a lost device only for some calls",
        "server/scheduling/calls.py",
        "any(r.started < inf and r.payload.output is None for r in self.requests)",
        "True",
        ("tests/server/scheduling/test_calls.py",),
    ),
    Mutation(
        "queued samples do not count as pending",
        "server/api/inference.py",
        "        context.memory.end_pending()\n        context.queued = monotonic()\n",
        "        context.queued = monotonic()\n",
        ("tests/server/api/test_inference.py",),
    ),
    Mutation(
        "set the expiry timer again after it has fired",
        "server/scheduling/expiry.py",
        "        self.drop_expired(self._clock())\n        self._on_change()\n        self.set_timer()\n",
        "        self.drop_expired(self._clock())\n        self._on_change()\n",
        ("tests/server/scheduling/test_dispatcher_expiry.py",),
    ),
)


def _copy(folder: Path) -> None:
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def _failed(folder: Path, tests: tuple[str, ...]) -> list[str]:
    """The names of the tests that fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", "60", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
    return re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)


def main() -> None:
    """Apply all mutations, print and record the test that fails for each; exit code 1 if one survives."""
    argument_parser(__doc__).parse_args()
    record, survived = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy(folder)
        tests = tuple(sorted({test for mutation in MUTATIONS for test in mutation.tests}))
        if failed := _failed(folder, tests):
            raise RuntimeError(f"without any mutation {', '.join(failed)} fails")
        for mutation in MUTATIONS:
            file = folder / mutation.file
            whole = file.read_text()
            if whole.count(mutation.before) != 1:
                raise RuntimeError(f"{mutation.file} has {whole.count(mutation.before)} of {mutation.before!r}")
            file.write_text(whole.replace(mutation.before, mutation.after))
            failed = _failed(folder, mutation.tests)
            file.write_text(whole)
            survived += not failed
            record.append({"mutation": mutation.about, "file": mutation.file, "caught_by": failed})
            print(f"{mutation.about}: {', '.join(failed) or 'SURVIVED'}", flush=True)
    save_record("mutations", record)
    print(json.dumps({"mutations": len(record), "survived": survived}))
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
