from pathlib import Path

import pytest

from policies.types import SpecError
from server.config import by_model, load_settings


def test_flags_stand_over_the_environment_over_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("models: [resnet18]\nport: 1111\nhost: 127.0.0.2\nqueue_capacity: 7\n")
    monkeypatch.setenv("BATCHWRIGHT_PORT", "2222")
    monkeypatch.setenv("BATCHWRIGHT_HOST", "127.0.0.3")
    monkeypatch.setenv("BATCHWRIGHT_POLICY", "greedy resnet18=static:2")
    settings = load_settings({"port": 3333}, file)
    assert (settings.port, settings.host, settings.queue_capacity) == (3333, "127.0.0.3", 7)
    assert settings.models == ["resnet18"]
    assert settings.weights == "auto"
    assert settings.policy == ["greedy", "resnet18=static:2"]


@pytest.mark.parametrize(
    ("flags", "text", "says"),
    [
        ({}, "", "models"),
        ({"models": ["a", "a"]}, "", "named twice"),
        ({"models": ["a"], "port": 70000}, "", "port.*65535"),
        ({"models": ["a"], "queue_capacity": 0}, "", "queue_capacity"),
        ({"models": ["a"], "w2": float("nan")}, "", "w2"),
        ({"models": ["a"], "max_batch_size": 0, "port": -1}, "", "max_batch_size.*; port"),  # all mistakes at once
        ({"models": ["a"], "header_timeout_s": 0, "body_timeout_s": "inf"}, "", "header_timeout_s.*; body_timeout_s"),
        ({"models": ["a"]}, "prot: 1\n", "prot"),
        ({"models": ["a"]}, "{", "cannot be read"),
    ],
)
def test_mistakes_are_told_in_one_line(flags: dict[str, object], text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=says) as caught:
        load_settings(dict(flags), file)
    assert "\n" not in str(caught.value)


def test_an_unknown_environment_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_PROT", "1")
    with pytest.raises(SpecError, match="BATCHWRIGHT_PROT"):
        load_settings({"models": ["a"]}, None)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SpecError, match="nowhere"):
        load_settings({"models": ["a"]}, Path("nowhere.yaml"))


def test_entries_may_name_their_model_and_one_without_a_name_is_for_the_others() -> None:
    models = ["a", "b", "c"]
    assert by_model(["greedy", "b=static:2"], models) == {"a": "greedy", "b": "static:2", "c": "greedy"}
    assert by_model(["b=static:2"], models) == {"b": "static:2"}
    assert by_model(["smdp:w2=1"], models) == dict.fromkeys(models, "smdp:w2=1")
    assert by_model([], models) == {}


def test_two_values_for_one_model_are_an_error() -> None:
    for entries in (["greedy", "serial"], ["a=greedy", "a=serial"]):
        with pytest.raises(SpecError, match="second value"):
            by_model(entries, ["a", "b"])
