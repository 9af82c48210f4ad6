"""Tests of the profile-model command."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policies.cpus import SWITCH_INTERVAL
from policies.profile import Profile, load_profile
from profiler import cache, cli
from profiler.cli import main
from profiler.first_profile import FirstProfiles, _key
from server.config import load_settings, read_settings

P4 = "emulated:googlenet-tesla-p4"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Run":
    return Run(monkeypatch, capsys)


class Run:
    """Calls main() as a shell would: exit code, stdout, stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["/somewhere/profile-model", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return code, out, err


def test_threads_are_switched_as_often_as_in_the_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", set_to.append)
    run("net", "--device", P4, "--max-batch-size", "2", "--json")
    assert set_to == [SWITCH_INTERVAL]


def test_json_mode_prints_only_json(run: Run) -> None:
    code, out, err = run("net", "--device", P4, "--max-batch-size", "4", "--json")
    profile = json.loads(out)
    assert (code, err) == (0, "")
    assert profile["schema"] == "batchwright.profile/1"
    assert profile["batch_size"] == [1, 2, 3, 4]
    assert profile["model"] == "net"
    assert profile["device"] == P4
    assert profile["source"] == "measured"


def test_measuring_an_emulated_device_reproduces_its_profile(run: Run) -> None:
    emulated = load_profile("googlenet-tesla-p4").truncated(6)
    _, out, _ = run("net", "--device", P4, "--max-batch-size", "6", "--json")
    profile = json.loads(out)
    assert profile["energy_j"] == pytest.approx(emulated.energies, rel=1e-9)
    assert profile["energy_source"] == "modelled"
    # a batch never completes early; how late it completes depends on the machine
    assert all(t >= emulated.service_time(b + 1) for b, t in enumerate(profile["service_time_s"]))


def test_without_json_a_table_the_fits_and_the_output_path_are_printed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code, out, err = run("net", "--device", P4, "--max-batch-size", "5", "--quick", "--output", str(path))
    assert (code, err) == (0, "")
    assert all(text in out for text in ("requests/s", "affine", "isotonic", f"written to {path}"))
    assert load_profile(str(path)).max_batch_size == 5


def test_a_plot_is_drawn(run: Run, tmp_path: Path) -> None:
    run("net", "--device", P4, "--max-batch-size", "3", "--plot", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_real_model_is_measured_and_cached_for_serve_model(run: Run, tmp_path: Path) -> None:
    arguments = ("squeezenet1_1", "--device", "cpu", "--weights", "random", "--max-batch-size", "2", "--quick")
    code, out, _ = run(*arguments, "--json", "--energy-time", "0")  # no energy, whether or not there is a sensor
    profile = json.loads(out)
    assert code == 0
    assert profile["energy_source"] == "none"
    assert "; before the measurement: governor " in profile["note"]
    assert "energy_j" not in profile
    assert "weights random, torch " in profile["note"]
    assert "processors" in profile["note"]
    (cached,) = (tmp_path / "cache" / "batchwright" / "profiles").iterdir()
    assert json.loads(cached.read_text()) == profile


def test_an_interrupted_measurement_goes_on_after_its_service_times(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "mine.py").write_text(MODEL)
    arguments = (f"mine={tmp_path / 'mine.py'}:Mine", "--device", "cpu", "--quick", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(cli, "with_energy", interrupted)
        assert run(*arguments) == (130, "", "profile-model: interrupted\n")
    (unfinished,) = (tmp_path / "cache" / "batchwright" / "profiles").iterdir()
    measured = json.loads(unfinished.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(cli, "measure_service_times", interrupted)
        code, out, err = run(*arguments, "--energy-time", "0")
    assert code == 0
    assert err.startswith("resumed: ")
    assert json.loads(out)["service_time_s"] == measured["service_time_s"]
    assert not unfinished.exists(), "a finished measurement is not resumed"


def test_an_interrupted_measurement_of_yesterday_is_not_resumed() -> None:
    key = cache.unfinished(cache.CacheKey("mine", "CPU", 2), "quick")
    cache.store_profile(key, Profile("n", (1.0, 2.0), model="mine", device="CPU", source="measured"))
    assert cache.load_unfinished(key) is not None
    os.utime(key.path, (0.0, time.time() - 86_400))
    assert cache.load_unfinished(key) is None


LINES = """
import time

from batchwright import Model, Tensor


class Lines(Model):
    inputs = {"x": Tensor("FP32", [-1], pad=0.0)}
    outputs = {"y": Tensor("FP32")}
    lengths = [1, 4, 8]

    def run(self, x):
        time.sleep(0.002 * x.shape[1])
        return {"y": x.sum(axis=1)}
"""


def test_a_model_with_lengths_is_measured_by_length(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lines.py").write_text(LINES)
    arguments = (f"lines={tmp_path / 'lines.py'}:Lines", "--device", "cpu", "--max-batch-size", "3")
    code, out, _ = run(*arguments, "--quick", "--json", "--energy-time", "0")
    profile = json.loads(out)
    assert code == 0
    assert (profile["model"], profile["length"]) == ("lines", [1, 4, 8])
    assert [len(row) for row in profile["length_service_time_s"]] == [3, 3, 3]
    assert profile["length_service_time_s"][0][2] > profile["length_service_time_s"][0][0], "the longest, the shortest"
    assert "service_time_s is of samples of length 4" in profile["note"]
    (cached,) = (tmp_path / "cache" / "batchwright" / "profiles").iterdir()
    assert json.loads(cached.read_text()) == profile


MODEL = """
from batchwright import Model, Tensor


class Mine(Model):
    inputs = {"x": Tensor("FP32", [-1, 2]), "k": Tensor("INT32")}
    outputs = {"y": Tensor("FP32", [-1, 2])}
    max_batch_size = 3

    def run(self, x, k):
        return {"y": x * k[:, None, None].astype("f4")}


class Broken(Mine):
    def run(self, x, k):
        raise KeyError("the table")


class Unloadable(Mine):
    def load(self, device):
        raise OSError("no such weights")
"""


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODEL)
    return str(path)


def test_a_model_of_named_tensors_is_measured_up_to_its_own_largest_batch_and_cached(
    run: Run, model_file: str, tmp_path: Path
) -> None:
    spec = f"mine={model_file}:Mine"
    code, out, _ = run(spec, "--device", "cpu", "--quick", "--json", "--energy-time", "0")
    profile = json.loads(out)
    assert (code, profile["model"], profile["batch_size"]) == (0, "mine", [1, 2, 3])
    assert "; samples of shape 16x2" in profile["note"]
    settings = read_settings({"models": [spec], "device": "cpu"}, None).settings
    assert settings is not None
    cached = FirstProfiles().cached(settings, "mine", 3)
    assert cached is not None
    assert cached.note == profile["note"]
    Path(model_file).write_text(MODEL.replace("* k", "+ k"))
    assert FirstProfiles().cached(settings, "mine", 3) is None, "another file"


@pytest.mark.slow
def test_a_quick_profile_replaces_a_cached_quick_one_and_keeps_a_full_one(
    run: Run, model_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = (f"mine={model_file}:Mine", "--device", "cpu", "--energy-time", "0")
    measured = [run(*arguments, *flags, "--json")[1] for flags in (("--quick",), ("--quick",))]
    (path,) = (tmp_path / "cache" / "batchwright" / "profiles").iterdir()
    assert path.read_text() == measured[1] != measured[0]
    full = run(*arguments, "--json")[1]
    assert path.read_text() == full
    kept = f"{path} is of a full measurement and is kept; to replace it, delete it or omit --quick"
    assert kept not in caplog.text
    assert f"written to {path}" not in run(*arguments, "--quick")[1]
    assert path.read_text() == full
    assert kept in caplog.messages


def test_a_full_profile_stored_by_another_process_during_the_wait_for_the_device_is_kept(
    run: Run, model_file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = f"mine={model_file}:Mine"
    key = _key(load_settings({"models": [spec], "device": "cpu"}, None), "mine", 3)
    full = Profile("full", (1.0, 2.0, 3.0), model="mine", device=key.device, source="measured")

    @contextmanager
    def after_a_full_measurement(device: str) -> Iterator[None]:
        assert device == key.device
        cache.store_profile(key, full)
        yield

    monkeypatch.setattr(cache, "device_lock", after_a_full_measurement)
    assert run(spec, "--device", "cpu", "--quick", "--energy-time", "0")[0] == 0
    assert cache.load_cached_profile(key) == full
    assert f"{key.path} is of a full measurement and is kept" in caplog.text


@pytest.mark.parametrize("flags", [(), ("--quick",)])
def test_a_profile_is_stored_before_another_process_can_measure(
    run: Run, model_file: str, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    spec = f"mine={model_file}:Mine"
    key = _key(load_settings({"models": [spec], "device": "cpu"}, None), "mine", 3)
    stored = []

    @contextmanager
    def lock(_: str) -> Iterator[None]:
        yield
        stored.append(key.path.exists())

    monkeypatch.setattr(cache, "device_lock", lock)
    run(spec, "--device", "cpu", "--energy-time", "0", *flags)
    assert stored == [True]


def test_the_sample_of_a_file_is_measured(run: Run, model_file: str, tmp_path: Path) -> None:
    sample = tmp_path / "sample.json"
    sample.write_text('{"inputs": {"x": [[1, 2], [3, 4], [5, 6]], "k": 2}}')
    flags = {"models": [f"mine={model_file}:Mine"], "device": "cpu"}
    without, with_sample = load_settings(flags, None), load_settings(flags | {"sample": [str(sample)]}, None)
    for device in ("cpu", P4):
        arguments = (f"mine={model_file}:Mine", "--device", device, "--quick", "--json", "--energy-time", "0")
        code, out, _ = run(*arguments, "--sample", str(sample))
        profile = json.loads(out)
        assert (code, profile["model"], profile["batch_size"]) == (0, "mine", [1, 2, 3])
        assert "; samples of shape 3x2" in profile["note"]
    assert FirstProfiles().cached(with_sample, "mine", 3) is not None
    assert FirstProfiles().cached(without, "mine", 3) is None, "synthetic samples have another shape"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Broken", "broken: a batch of 3 failed: models.py line 16: KeyError: 'the table'"),
        ("Unloadable", "loading broken failed: models.py line 21: OSError: no such weights"),
    ],
)
def test_an_exception_of_the_model_is_one_line(run: Run, model_file: str, name: str, expected: str) -> None:
    code, out, err = run(f"broken={model_file}:{name}", "--device", "cpu", "--quick", "--energy-time", "0")
    assert (code, out) == (2, "")
    assert expected in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"x": [[1, 2, 3]], "k": 2}', "input x has the shape [1, 3], the model takes [-1, 2]"),
        ('{"x": [[1, 2]]}', "has x; give a value by name for each input of the model: x, k"),
    ],
)
def test_a_sample_that_does_not_fit_is_one_line(
    run: Run, model_file: str, tmp_path: Path, content: str, expected: str
) -> None:
    sample = tmp_path / "sample.json"
    sample.write_text(content)
    code, out, err = run(f"mine={model_file}:Mine", "--device", P4, "--sample", str(sample))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "MODEL"),
        (("googlenet", "--device", P4, "--sample", "x.json"), "not for googlenet; leave it out"),
        (("words=./folder", "--device", P4), "words: './folder' cannot be served; write a FILE.py:CLASS that loads it"),
        (("words=config.json", "--device", "cpu"), "words: 'config.json' cannot be served; write a FILE.py:CLASS that"),
        (("net", "--nonsense"), "--nonsense"),
        (("net", "--max-batch-size", "0"), "--max-batch-size"),
        (("net", "--energy-time", "-1"), "--energy-time"),
        (("net", "--device", "emulated:nothing"), "'nothing'"),
        (("net", "--device", P4, "--max-batch-size", "33"), "outside 1..32"),
        (("net", "--device", "tpu"), "'tpu'"),
        (("net", "--device", "cuda:77"), "77"),
        (("no-such-net", "--device", "cpu"), "'no-such-net'"),
        (("squeezenet1_1", "--device", "cpu", "--weights", "nowhere.pt"), "nowhere.pt"),
        (("net", "--device", P4, "--weights", "nowhere.pt"), "nowhere.pt"),
        (("net", "--device", P4, "--output", "/nowhere/p.json"), "/nowhere/p.json"),
        (("net", "--device", P4, "--plot", "p.bmp"), ".bmp"),
        (("net", "--device", P4, "--plot", "/"), "cannot write"),
    ],
)
def test_a_usage_error_is_one_line_on_stderr_and_exit_code_2(
    run: Run, arguments: tuple[str, ...], expected: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("profile-model: ")
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.slow
def test_without_network_pretrained_weights_are_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(url: str, **_: float) -> None:
        raise OSError("no network")

    monkeypatch.setattr("server.models.weights.urlopen", no_network)
    code, out, err = run("squeezenet1_1", "--device", "cpu", "--weights", "pretrained")
    assert (code, out) == (2, "")
    assert "no weights for squeezenet1_1: the download failed (" in err.splitlines()[-1]


@pytest.mark.parametrize("flag", ["--output", "--plot"])
def test_a_full_disk_after_the_measurement_is_exit_code_2(run: Run, tmp_path: Path, flag: str) -> None:
    file = tmp_path / "file.png"  # since a plot's suffix is its format
    file.symlink_to("/dev/full")
    code, out, err = run("net", "--device", P4, "--max-batch-size", "1", flag, str(file))
    assert code == 2
    assert "googlenet-tesla-p4" in out, "the profile is printed"
    assert f"cannot write {flag} '{file}' (No space left on device); choose another file" in err


def test_the_profile_of_an_emulated_device_is_not_cached(run: Run, tmp_path: Path) -> None:
    assert run("net", "--device", P4, "--max-batch-size", "1")[0] == 0
    assert not (tmp_path / "cache").exists()
