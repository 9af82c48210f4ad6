"""The commands of an example's README, run as they are printed there."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.harness import ROOT, Server, serving
from policies.profile import Profile


@dataclass(frozen=True)
class Example:
    """A running example.

    Attributes:
        server: the server that its README starts.
        curl: the call of its README.
    """

    server: Server
    curl: list[str]

    def call(self, **replaced: str) -> Any:
        """Run the call of the README and return the answer; `replaced` are values for the words after a flag."""
        words = [word.replace("http://127.0.0.1:8000", self.server.url) for word in self.curl]
        for flag, value in replaced.items():
            words[words.index(f"--{flag.replace('_', '-')}") + 1] = value
        answer = subprocess.run(["curl", "-s", *words[1:]], capture_output=True, check=True, timeout=30)
        return json.loads(answer.stdout)


@contextmanager
def running_example(name: str, tmp_path: Path, profile: Profile | None = None) -> Iterator[Example]:
    """Run the commands of examples/NAME/README.md on the CPU, with profiles and written files in `tmp_path`.

    Args:
        name: that of the example.
        tmp_path: a folder.
        profile: of the model; None: the server measures one.
    """
    text = (ROOT / "examples" / name / "README.md").read_text().replace("/tmp", str(tmp_path))
    lines = [shlex.split(line) for line in text.split("\n") if line[:4] == "    "]
    commands = {words[0]: words for words in lines}
    preparations = takewhile(lambda words: words[0] != "serve-model", lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.chdir(ROOT)
        for words in preparations:
            if words[0] == "python":
                subprocess.run([sys.executable, *words[1:]], check=True, timeout=60)
        policy = () if "--policy" in commands["serve-model"] else ("--policy", "timeout:2")
        given = [] if profile is None else ["--profile", str(tmp_path / "profile.json")]
        if profile is not None:
            (tmp_path / "profile.json").write_text(profile.to_json())
        with serving(*commands["serve-model"][1:], "--device", "cpu", *policy, *given) as server:
            yield Example(server, commands["curl"])
