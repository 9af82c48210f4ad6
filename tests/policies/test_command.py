"""What all commands have in common."""

from importlib.metadata import version

import pytest
import typer

from loadgen.cli import main as generate_load
from policies.cli import main as solve_policy
from policies.command import run
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


def test_ctrl_c_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer(add_completion=False)

    @app.command()
    def wait() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["wait"])
    with pytest.raises(SystemExit) as caught:
        run(app, "wait")
    assert caught.value.code == 130
    assert capsys.readouterr().err == "wait: interrupted\n"
