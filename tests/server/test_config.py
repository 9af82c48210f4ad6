"""Settings from flags, environment and file, and the flags of serve-model."""

from pathlib import Path

import pytest
import typer

from policies.command_line.common import run
from policies.types import SpecError
from server.cli import app
from server.config import Settings, by_model, load_settings, read_settings


def test_flags_take_precedence_over_the_environment_over_the_file_over_defaults(
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
    assert settings.weights == "pretrained"
    assert settings.policy == ["greedy", "resnet18=static:2"]


@pytest.mark.parametrize(
    ("flags", "text", "says"),
    [
        ({}, "", "models"),
        ({"models": ["a", "a"]}, "", "named twice"),
        ({"models": ["a"], "port": 70000}, "", "port.*65535"),
        ({"models": ["blend.onnx"]}, "", "'blend.onnx' has no name; write NAME=blend.onnx"),
        ({"models": ["a"], "queue_capacity": 0}, "", "^--queue-capacity: should be greater"),
        ({"models": ["a"], "w2": float("nan")}, "", "w2"),
        ({"models": ["a"], "threads": "0"}, "", r"--threads: .*threads of a model .* such as 3, .* not '0'"),
        ({"models": ["a"]}, "threads: 3:1\n", 'threads: give text, such as "3:1" in quotes'),
        ({"models": ["a"], "max_batch_size": 0, "port": -1}, "", "--max-batch-size.*; --port"),  # all errors together
        (
            {"models": ["a"], "header_timeout_s": 0, "body_timeout_s": "inf"},
            "",
            "--header-timeout-s.*; --body-timeout-s",
        ),
        ({"models": ["a"]}, "prot: 1\n", "prot"),
        ({"models": ["a"]}, "1: 2\n_env_prefix: x\n", "1: unknown setting.*; _env_prefix: unknown setting"),
        ({"models": ["a"]}, "{", "cannot be read"),
        ({"models": ["a"]}, "- a", "not a mapping"),
    ],
)
def test_all_errors_are_in_one_line(flags: dict[str, object], text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=says) as caught:
        load_settings(dict(flags), file)
    assert "\n" not in str(caught.value)


def test_an_unknown_environment_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_PROT", "1")
    with pytest.raises(SpecError, match="BATCHWRIGHT_PROT"):
        load_settings({"models": ["a"]}, None)


def test_the_error_for_a_missing_file_has_its_name() -> None:
    with pytest.raises(SpecError, match="nowhere"):
        load_settings({"models": ["a"]}, Path("nowhere.yaml"))


def test_an_entry_without_a_model_is_for_the_models_not_named() -> None:
    models = ["a", "b", "c"]
    assert by_model(["greedy", "b=static:2"], models) == {"a": "greedy", "b": "static:2", "c": "greedy"}
    assert by_model(["b=static:2"], models) == {"b": "static:2"}
    assert by_model(["smdp:w2=1"], models) == dict.fromkeys(models, "smdp:w2=1")
    assert by_model([], models) == {}


def test_two_values_for_one_model_are_an_error() -> None:
    for entries in (["greedy", "serial"], ["a=greedy", "a=serial"]):
        with pytest.raises(SpecError, match="second value"):
            by_model(entries, ["a", "b"])


def test_valid_settings_are_kept_among_invalid_ones(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("prot: 1\nhost: 127.0.0.2\nlog_level: debug\n")
    result = read_settings({"models": ["a"], "port": 70000}, file)
    assert result.settings is not None
    assert (result.settings.host, result.settings.port, result.log_options) == ("127.0.0.2", 8000, ("debug", "auto"))
    assert len(result.errors) == 2
    assert read_settings({}, None).log_options == ("info", "auto")


def test_every_setting_has_a_flag_with_its_description_and_default() -> None:
    parameters = {parameter.name: parameter for parameter in typer.main.get_command(app).params}
    assert [*parameters] == [*Settings.model_fields, "config", "version", "install_completion", "show_completion"]
    for name, field in Settings.model_fields.items():
        flag = parameters[name]
        text = getattr(flag, "help", "")
        assert text.startswith(str(field.description))
        if name != "models":
            assert flag.opts == ["--" + name.replace("_", "-")]
        if field.default not in (None, []) and name != "models" and field.annotation is not bool:
            assert text.endswith(f" (default {str(field.default).removesuffix('.0')})")  # no default address ends in .0
    settings = (parameters[name] for name in Settings.model_fields)
    assert all(parameter.default is None for parameter in settings), "else it would precede the environment"


def test_values_of_the_wrong_type_are_reported_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["serve-model", "nix", "--port", "x", "--stages", "99999", "--w2", "y"])
    with pytest.raises(SystemExit) as caught:
        run(app, "serve-model")
    assert caught.value.code == 2
    error = capsys.readouterr().err
    for part in ("--port: should be a valid integer, not 'x'", "--stages: ", "--w2: ", "no torchvision"):
        assert part in error
    assert error.count("\n") == 1


def test_the_error_names_the_variable_that_has_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_PORT", "70000")
    with pytest.raises(SpecError, match=r"^BATCHWRIGHT_PORT: should be less than or equal to 65535, not .70000.$"):
        load_settings({"models": ["a"]}, None)


MODELS = """
device: cpu
policy: [greedy]
models:
  - plain
  - name: mine
    source: mine.py:Mine
    policy: smdp:w2=1
    profile: mine.json
    max_batch_size: 4
    slo_p95_ms: 20
    labels: ['no', 'yes']
    device: cuda:0, cuda:1
  - name: other
    weights: other.pt
    labels: LABELS
"""


def test_a_file_gives_each_model_its_own_settings(tmp_path: Path) -> None:
    (tmp_path / "labels").write_text("a\nb\nc\n")
    file = tmp_path / "s.yaml"
    file.write_text(MODELS.replace("LABELS", str(tmp_path / "labels")))
    settings = load_settings({}, file)
    assert settings.specs == {"plain": "plain", "mine": "mine.py:Mine", "other": "other"}
    assert by_model(settings.policy, settings.specs) == {"plain": "greedy", "mine": "smdp:w2=1", "other": "greedy"}
    assert settings.profile == ["mine=mine.json"]
    mine, other = settings.of("mine"), settings.of("other")
    assert (mine.max_batch_size, mine.slo_p95_ms, mine.weights) == (4, 20.0, "pretrained")
    assert (other.max_batch_size, other.slo_p95_ms, other.weights) == (None, None, "other.pt")
    assert [settings.labels(name) for name in settings.specs] == [(), ("no", "yes"), ("a", "b", "c")]
    devices = {one.device: [*one.specs] for one in settings.by_device()}
    assert devices == {"cpu": ["plain", "other"], "cuda:0": ["mine"], "cuda:1": ["mine"]}
    mines = ["greedy", "mine=smdp:w2=1"]
    assert [one.policy for one in settings.by_device()] == [["greedy"], mines, mines]


def test_flags_take_precedence_over_the_values_of_a_model(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(MODELS.replace("LABELS", "x"))
    settings = load_settings({"max_batch_size": 2, "device": "cpu"}, file)
    assert settings.of("mine").max_batch_size == 2
    assert [one.device for one in settings.by_device()] == ["cpu"]
    with pytest.raises(SpecError, match="labels of other cannot be read"):
        settings.labels("other")


@pytest.mark.parametrize(
    ("flags", "policies"),
    [
        ({}, {"plain": "greedy", "mine": "smdp:w2=1", "other": "greedy"}),
        ({"policy": ["serial"]}, {"plain": "serial", "mine": "serial", "other": "serial"}),
        ({"policy": ["mine=serial"]}, {"mine": "serial"}),
        ({"policy": ["other=serial"]}, {"mine": "smdp:w2=1", "other": "serial"}),
        ({"models": ["plain"]}, {"plain": "greedy"}),
        ({"models": ["mine=x.onnx"]}, {"mine": "smdp:w2=1"}),
    ],
)
def test_a_policy_flag_replaces_those_of_the_models_that_it_names(
    flags: dict[str, object], policies: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(MODELS)
    settings = load_settings(flags, file)
    assert by_model(settings.policy, settings.specs) == policies


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{source: x}", "models: an entry has no name"),
        ("{name: m, sauce: x}", "models: m: unknown key 'sauce'; a model has name, source, policy"),
        ("{name: m, max_batch_size: 0}", "models: m: max_batch_size: should be greater"),
        ("{name: m, labels: [no, yes]}", "models: m: the label False is no text; write it in quotes"),
        ("{name: m, labels: 3}", "models: m: labels is 3"),
        ("{name: a/b, source: x}", "'a/b' is not a model name"),
    ],
)
def test_a_wrong_value_of_a_model_is_named(entry: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"models: [{entry}]\n")
    with pytest.raises(SpecError) as caught:
        load_settings({}, file)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "variables",
    [
        {"BATCHWRIGHT_PORT": "tcp://10.0.0.1:80"},
        {"BATCHWRIGHT_SERVICE_HOST": "10.0.0.1", "BATCHWRIGHT_SERVICE_PORT_HTTP": "80"},
        {"BATCHWRIGHT_PORT_80_TCP_ADDR": "10.0.0.1"},
    ],
)
def test_the_variables_of_a_kubernetes_service_are_named_as_such(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecError, match=rf"{next(iter(variables))}.*set enableServiceLinks: false") as caught:
        load_settings({"models": ["a"]}, None)
    assert "known are" not in str(caught.value)


def test_files_are_found_after_a_model_has_changed_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model.py", "keys", "cert.pem", "labels.txt", "sample.json", "profile.json", "weights.pt", "resnet18"):
        (tmp_path / name).write_text("a\nb\n")
    (tmp_path / "file.yaml").write_text(
        "models: [{name: c, source: googlenet, labels: labels.txt, weights: weights.pt}]"
    )
    monkeypatch.chdir(tmp_path)
    flags = {
        "api_key_file": "keys", "tls_cert": "cert.pem", "profile": ["m=profile.json", "googlenet-tesla-p4"],
        "sample": ["m=sample.json"],
    }  # fmt: skip
    settings = load_settings({**flags, "models": ["m=model.py:Mine", "resnet18", "o=gone.onnx"]}, None)
    with_file = load_settings({}, Path("file.yaml"))
    monkeypatch.chdir("/")
    assert settings.specs == {"m": f"{tmp_path}/model.py:Mine", "resnet18": "resnet18", "o": "gone.onnx"}
    assert (settings.api_key_file, settings.tls_cert) == (tmp_path / "keys", tmp_path / "cert.pem")
    assert settings.profile == [f"m={tmp_path}/profile.json", "googlenet-tesla-p4"]
    assert settings.sample == [f"m={tmp_path}/sample.json"]
    assert with_file.labels("c") == ("a", "b")
    assert with_file.of("c").weights == f"{tmp_path}/weights.pt"
    assert settings.weights == "pretrained"


def test_byte_order_marks_are_no_content(tmp_path: Path) -> None:
    (tmp_path / "labels").write_text("cat\ndog\n", encoding="utf-8-sig")
    file = tmp_path / "s.yaml"
    file.write_text(f"models: [{{name: resnet18, labels: {tmp_path}/labels}}]\n", encoding="utf-8-sig")
    settings = load_settings({}, file)
    assert settings.labels("resnet18") == ("cat", "dog")
