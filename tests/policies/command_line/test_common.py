"""What all commands have in common."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

import loadgen.cli
import policies.command_line.cli
import profiler.cli
import server.cli
from policies.catalog import CATALOG
from policies.command_line.common import complete_policies, complete_profiles, paths_as_given, run
from policies.profile import shipped_profiles

MODULES: dict[str, Any] = {
    "serve-model": server.cli,
    "profile-model": profiler.cli,
    "solve-policy": policies.command_line.cli,
    "generate-load": loadgen.cli,
}
COMMANDS = {name: module.main for name, module in MODULES.items()}
GROUPS = {name: module.GROUPS for name, module in MODULES.items()}
ENDS = ("", "-x10")


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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_groups_and_examples(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as caught:
        COMMANDS[name]()
    text = capsys.readouterr().out
    assert caught.value.code == 0
    groups = [line.split("─ ")[1].split(" ─")[0] for line in text.splitlines() if line.startswith("╭")]
    assert set(GROUPS[name]) < set(groups)
    assert "--install-completion" in text.split("─ Options ─")[1], "what is in no group stays under Options"
    _, _, examples = text.partition("Examples:")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert len(lines) >= 3
    assert all(line.startswith(name) for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_parameter_of_a_group_exists(name: str) -> None:
    module = MODULES[name]
    known = {parameter.name for parameter in typer.main.get_command(module.app).params}
    grouped = [parameter for parameters in module.GROUPS.values() for parameter in parameters]
    assert set(grouped) < known
    assert len(grouped) == len(set(grouped)), "in one group only"


def test_each_setting_of_a_server_is_in_a_group() -> None:
    grouped = {name for names in server.cli.GROUPS.values() for name in names}
    assert grouped == set(server.config.Settings.model_fields) - {"models"}


@pytest.mark.parametrize(
    ("name", "words", "completed"),
    [
        ("serve-model", "serve-model googlenet --policy mul", ["multi-bin"]),
        (
            "serve-model",
            "serve-model --device emulated:googlenet-t",
            [f"emulated:googlenet-tesla-p4{end}" for end in ENDS],
        ),
        ("serve-model", "serve-model --profile resnet50-l", ["resnet50-l4-int8"]),
        ("solve-policy", "solve-policy resnet50-l", ["resnet50-l4-int8"]),
        ("solve-policy", "solve-policy resnet50-l4-int8 --evaluate mul", ["multi-bin"]),
        ("generate-load", "generate-load --simulate resnet50-h", ["resnet50-h100"]),
        ("generate-load", "generate-load --policy mul", ["multi-bin"]),
        ("generate-load", "generate-load --policy greedy --compare mul", ["multi-bin"]),
    ],
)
def test_names_are_completed(
    name: str, words: str, completed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"_{name.replace('-', '_').upper()}_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit):
        COMMANDS[name]()
    assert capsys.readouterr().out.split() == completed


@pytest.mark.parametrize(
    ("complete", "all_names"),
    [(complete_profiles, [*shipped_profiles()]), (complete_policies, [*CATALOG])],
)
def test_a_completer_returns_the_names_that_begin_with_the_text(
    complete: Callable[[str], list[str]], all_names: list[str]
) -> None:
    assert complete("") == all_names
    for name in all_names:
        assert name in complete(name)
        assert name in complete(name[:-1])
    assert complete("nothing begins so") == []


def test_devices_are_completed_with_the_profiles_to_emulate() -> None:
    emulated = [f"emulated:{name}" for name in shipped_profiles()]
    assert server.cli._complete_devices("") == ["auto", "cpu", "cuda:0", *emulated]
    assert server.cli._complete_devices("cu") == ["cuda:0"]


def test_messages_have_paths_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths_as_given(f"{tmp_path}/a/b.json and http://c/d") == "a/b.json and http://c/d"
    monkeypatch.chdir("/")
    assert paths_as_given(f"{tmp_path}/a and http://c/d") == f"{tmp_path}/a and http://c/d"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert paths_as_given("http://c/d") == "http://c/d"
