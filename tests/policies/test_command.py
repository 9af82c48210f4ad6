"""What all commands have in common."""

from importlib.metadata import version

import pytest

from loadgen.cli import main as generate_load
from policies.cli import main as solve_policy
from profiler.cli import main as profile_model
from server.cli import main as serve_model

COMMANDS = {
    "serve-model": serve_model,
    "profile-model": profile_model,
    "solve-policy": solve_policy,
    "generate-load": generate_load,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_version_is_printed(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [name, "--version"])
    with pytest.raises(SystemExit) as caught:
        COMMANDS[name]()
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{name} (Batchwright) {version('batchwright')}\n"
