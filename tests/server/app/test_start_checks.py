"""The checks before anything starts, reported together."""

import json
import socket
from math import inf
from pathlib import Path

import pytest

from policies.profile import Profile, load_profile
from policies.types import SpecError
from server.app.start_checks import DevicePlan, ServerPlan, make_plan
from server.config import Settings, SettingsResult, read_settings
from tests.support.fake_upstream import metadata, upstream
from tests.support.gpu import pretend_to_have_a_gpu

P4 = "emulated:googlenet-tesla-p4"
PADDED = """
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {"x": Tensor("FP32", [-1], pad=0.0)}
    outputs = {"y": Tensor("FP32", [-1])}
    lengths = [4, 16]
    def run(self, x):
        return {"y": x}
"""


def server_plan(cached: Profile | None = None, /, **flags: object) -> ServerPlan:
    given: dict[str, object] = {"models": ["googlenet"], "device": P4, "port": 0} | flags
    plan = make_plan(read_settings(given, None), lambda *_: cached)
    plan.bound.close()
    return plan


def device_plan(cached: Profile | None = None, /, **flags: object) -> DevicePlan:
    (device,) = server_plan(cached, **flags).devices
    return device


def error_of(**flags: object) -> str:
    with pytest.raises(SpecError) as caught:
        server_plan(None, **flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_emulated_device_needs_no_weights() -> None:
    for weights in ("pretrained", "auto", "random"):
        assert device_plan(weights=weights).chosen


def test_a_name_that_torchvision_does_not_have_is_a_warning_on_an_emulated_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server_plan(device=f"{P4},{P4}", models=["googlenet", "a=resnet18"])
    assert caplog.messages == []
    server_plan(device=f"{P4},{P4}", models=["googlnet", "b=something"])
    first, second = caplog.messages
    assert first.startswith("googlnet: there is no torchvision classification model 'googlnet', but googlenet; the ")
    assert second.startswith("b: there is no torchvision classification model 'something'; the emulated device serves")


def test_an_unknown_name_is_a_warning_if_only_the_models_entry_names_the_emulated_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = [{"name": "a", "source": "googlnet", "device": P4}, {"name": "b", "source": "resnet18", "device": P4}]
    config = tmp_path / "server.yaml"
    config.write_text(json.dumps({"models": models, "port": 0}))
    make_plan(read_settings({}, config), lambda *_: None).bound.close()
    (message,) = caplog.messages
    assert message.startswith("a: there is no torchvision classification model 'googlnet', but googlenet; ")


@pytest.mark.parametrize("device", ["cpu", P4])
def test_a_folder_or_a_configuration_is_an_error_that_names_it_and_the_remedy(tmp_path: Path, device: str) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    for spec in (str(tmp_path), str(config), "nowhere/at-all"):
        assert error_of(device=device, models=[f"m={spec}"], policy=["greedy"]) == (
            f"m: {spec!r} cannot be served; write a FILE.py:CLASS that loads it, or export the model to FILE.pt2 or "
            "FILE.onnx (docs/your-own-model.md)"
        )


def test_a_model_with_lengths_needs_a_profile_with_lengths(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PADDED)
    model = {"device": "cpu", "models": [f"m={tmp_path}/mine.py:Mine"]}
    assert "no service times by length, which m needs" in error_of(**model, profile=["googlenet-tesla-p4"])
    with_lengths = Profile("p", (1.0, 2.0), lengths=(4, 16), length_service_times=((0.5, 1.0), (1.0, 2.0)))
    assert device_plan(with_lengths, **model, policy=["multi-bin:2"]).chosen["m"].bins is not None
    assert "but m has none; give another" in error_of(**model, policy=["lazy:slo_ms=9"])


def small(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    sizes = {"batch_size": [1, 8], "service_time_s": [1.0, 2.0]}
    path.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "small", **sizes}))
    return str(path)


def test_the_policy_for_a_known_profile_is_chosen_once() -> None:
    plan = device_plan(policy=["static:4"], max_batch_size=8)
    assert plan.profiles["googlenet"].max_batch_size == 8
    assert plan.choose("googlenet", plan.profiles["googlenet"]) is plan.chosen["googlenet"]
    assert plan.max_batch_size("googlenet") == 8


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_batch_size": 64}, "outside 1..32"),
        ({"queue_capacity": 31}, "queue_capacity 31 is below the largest batch of googlenet, 32"),
        ({"policy": ["resnet50=greedy"]}, "'resnet50', which is not served"),
        ({"profile": ["resnet50=small"]}, "'resnet50', which is not served"),
        ({"policy": ["static:33"]}, "within 1..32"),
        ({"policy": ["nowhere.json"]}, "no policy file"),
        ({"profile": ["nowhere"]}, "no profile 'nowhere'"),
        ({"device": "emulated:nowhere"}, "no profile 'nowhere'"),
        ({"device": "gpu"}, "no device 'gpu'"),
        ({"device": "cuda:4096"}, "no CUDA device 4096"),
        ({"device": "cpu,cpu"}, "named twice: cpu,cpu"),
        ({"device": "cpu,gpu"}, "no device 'gpu'"),
        ({"device": f"{P4},"}, "mixes emulated and real ones"),
        ({"device": f"{P4},cpu"}, "mixes emulated and real ones"),
        ({"device": f"{P4},emulated:nowhere"}, "no profile 'nowhere'"),
        ({"device": f"{P4},emulated:resnet50-l4-int8", "max_batch_size": 33}, "outside 1..32"),
        ({"device": "cpu", "models": ["goglenet"]}, "there is googlenet"),
        ({"device": "cpu", "weights": "nowhere.pt"}, "no weights file 'nowhere.pt'"),
        ({"weights": "nowhere.pt"}, "no weights file 'nowhere.pt'"),
        ({"device": f"{P4},{P4}", "weights": "pretraind"}, "'pretraind'; give pretrained, auto, random, or"),
        ({"device": "cpu", "policy": ["joining"]}, "unknown policy 'joining': choose one of greedy"),
        ({"device": "cpu", "policy": ["lazy"], "stages": 4}, "needs lazy:slo_ms=VALUE"),
        ({"models": ["m=a", "m=b"]}, "named twice"),
        ({"w2": 1.0, "slo_p95_ms": 5.0}, "sets w2 and slo_p95_ms"),
        ({"device": "cpu", "policy": ["smdp:w2=1"], "w2": 2.0}, "give one"),
        ({"device": "cpu", "policy": ["smdp:w2=inf"]}, "finite"),
        ({"device": "cpu", "policy": ["smdp:slo_p95_ms=x"]}, "not a number"),
        ({"device": "cpu", "policy": ["static:33"]}, "within 1..32"),
    ],
)
def test_an_error_is_found_before_anything_starts(flags: dict[str, object], says: str) -> None:
    assert says in error_of(**flags)


OBJECTIVES = [
    ({"policy": ["greedy"]}, ["policy 'greedy' of googlenet ignores --slo-p95-ms 30", "such as smdp"]),
    ({"policy": ["lazy:slo_ms=9"], "stages": 2}, ["policy 'lazy:slo_ms=9' of googlenet ignores --slo-p95-ms 30"]),
    (
        {"models": ["googlenet", "resnet18", "resnet50"], "policy": ["resnet50=greedy", "resnet18=static:8"]},
        [
            "policy 'static:8' of resnet18 and policy 'greedy' of resnet50 ignore --slo-p95-ms 30",
            "for googlenet alone, by --policy googlenet=smdp:slo_p95_ms=30 or slo_p95_ms in its entry",
        ],
    ),
]


@pytest.mark.usefixtures("few_loads")
@pytest.mark.parametrize(("flags", "parts"), OBJECTIVES)
def test_an_objective_that_a_policy_ignores_is_an_error(flags: dict[str, object], parts: list[str]) -> None:
    message = error_of(slo_p95_ms=30.0, **flags)
    assert all(part in message for part in parts), message
    weight = error_of(w2=30.0, **flags)
    assert all(part.replace("slo-p95-ms", "w2").replace("slo_p95_ms", "w2") in weight for part in parts), weight


def test_an_objective_from_the_environment_or_the_file_is_not_ignored_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("BATCHWRIGHT_SLO_P95_MS", "30")
        assert "ignores --slo-p95-ms 30" in error_of(policy=["greedy"])
    file = tmp_path / "s.yaml"
    for content, says in (
        ("slo_p95_ms: 30\npolicy: [greedy]\nmodels: [a=resnet18]", "policy 'greedy' of a ignores --slo-p95-ms 30"),
        (
            "models: [{name: resnet18, policy: greedy, slo_p95_ms: 30}, googlenet]",
            "resnet18: policy 'greedy' ignores slo_p95_ms 30 of its entry in the configuration file",
        ),
        (
            "w2: 1\nmodels: [{name: resnet18, policy: greedy, w2: 3}, {name: googlenet, policy: serial}]",
            "such as smdp; policy 'serial' of googlenet ignores --w2 1",
        ),
    ):
        file.write_text(f"{content}\ndevice: {P4}\nport: 0")
        with pytest.raises(SpecError) as caught:
            make_plan(read_settings({}, file), lambda *_: None)
        assert says in str(caught.value)


def test_an_objective_for_some_models_is_given_to_them_alone(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    entry = "models: [{name: resnet18, policy: greedy}, {name: googlenet, slo_p95_ms: 300}]"
    file.write_text(f"{entry}\ndevice: {P4}-x10\nport: 0\nmax_batch_size: 2")
    plan = make_plan(read_settings({}, file), lambda *_: None)
    plan.bound.close()
    objectives = {model: choice.objective for model, choice in plan.devices[0].chosen.items()}
    assert objectives == {"resnet18": inf, "googlenet": 0.3}


def test_the_resource_of_the_settings_is_saved_or_an_error(tmp_path: Path) -> None:
    small = tmp_path / "small.json"
    small.write_text(Profile("small", (0.002, 0.003, 0.004), energies=(0.03, 0.05, 0.07)).to_json())
    plan = device_plan(device=f"emulated:{small}", resource="busy_time", slo_p95_ms=10)
    chosen = plan.chosen["googlenet"]
    assert chosen.profile.saved == "busy_time"
    assert plan.choose("googlenet", plan.profiles["googlenet"]) is chosen, "solved once"
    assert "resource=cpu_time is not in profile" in error_of(resource="cpu_time")


def test_the_policy_for_a_cached_profile_is_chosen() -> None:
    assert device_plan(Profile("cached", (1.0, 2.0)), device="cpu", policy=["greedy"]).chosen


def test_all_errors_are_reported_together() -> None:
    message = error_of(device="emulated:nowhere", profile=["nix"], policy=["a=b"], port=-1, queue_capacity=0)
    for part in ("nowhere", "nix", "'a=b'", "--port", "--queue-capacity"):
        assert part in message
    assert message.count("; ") >= 4


def test_on_cuda_images_are_measured_up_to_128_and_stages_up_to_32(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_have_a_gpu(monkeypatch)

    def largest(**flags: object) -> int:
        return device_plan(device="cuda:0", policy=["greedy"], **flags).max_batch_size("googlenet")

    assert largest() == 128
    assert largest(queue_capacity=100) == 100
    assert largest(max_batch_size=48) == 48
    assert largest(stages=3) == largest(optimise="none") == 32


def test_a_max_batch_size_above_the_profiles_is_an_error(tmp_path: Path) -> None:
    assert "outside 1..8" in error_of(profile=[small(tmp_path)], max_batch_size=16)
    assert device_plan(profile=[small(tmp_path)]).max_batch_size("googlenet") == 8


def test_each_device_has_its_own_profile_and_policies() -> None:
    plan = server_plan(device=f"{P4},{P4}-x10, {P4}", policy=["smdp:w2=1"])
    assert [device.settings.device for device in plan.devices] == [P4, f"{P4}-x10", P4]
    chosen = [device.chosen["googlenet"] for device in plan.devices]
    profiles = ["googlenet-tesla-p4", "googlenet-tesla-p4-x10", "googlenet-tesla-p4"]
    assert [choice.profile.name for choice in chosen] == profiles
    assert chosen[0].monitor is not chosen[2].monitor, "each measures its own arrival rate"
    given = server_plan(device=f"{P4},{P4}-x10", profile=["googlenet-tesla-p4"]).devices
    assert [device.profiles["googlenet"].name for device in given] == ["googlenet-tesla-p4"] * 2


def test_an_error_of_all_devices_is_reported_once() -> None:
    assert error_of(device=f"{P4},{P4}-x10", policy=["clever"]).count("clever") == 1


def test_the_policy_for_a_cached_profile_is_solved_before_the_model_is_loaded() -> None:
    cached = load_profile("googlenet-tesla-p4").truncated(4)
    plan = device_plan(cached, device="cpu", policy=["smdp:w2=1"])
    assert plan.chosen["googlenet"].profile is cached
    assert device_plan(None, device="cpu", policy=["smdp:w2=1"]).chosen == {}


def test_a_port_in_use_is_reported_with_other_errors_and_a_free_one_is_released() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = error_of(port=port, policy=["clever"])
        assert "cannot listen" in message
        assert "clever" in message
    assert "clever" in error_of(port=port, policy=["clever"])
    assert server_plan(port=port).bound.fileno() == -1


def test_further_checks_are_reported_with_the_errors_of_the_settings() -> None:
    def check_keys(settings: Settings) -> None:
        raise SpecError("no key file")

    result = read_settings({"models": ["a"], "device": P4, "port": 0}, None)
    with pytest.raises(SpecError, match="no such setting; no key file"):
        make_plan(SettingsResult(result.settings, ("no such setting",)), lambda *_: None, [check_keys])


def devices(*models: str, **flags: object) -> dict[str, dict[str, str]]:
    plan = server_plan(None, **{"models": list(models), "policy": ["greedy"], **flags})
    return {one.settings.device: one.settings.specs for one in plan.devices}


def test_each_other_server_is_a_device_of_its_own_beside_those_of_the_flag() -> None:
    with upstream() as a, upstream() as b:
        both, alone = f"{a.spec},{b.spec[4:]}", b.spec
        found = devices("googlenet", f"m={both}", f"n={alone}")
        assert found == {
            P4: {"googlenet": "googlenet"},
            a.device: {"m": a.spec},
            b.device: {"m": b.spec, "n": b.spec},
        }
        assert devices(f"m={both}", device="cuda:4095") == {a.device: {"m": a.spec}, b.device: {"m": b.spec}}
        plan = server_plan(None, models=[f"m={both}"], policy=["static:8"], profile=["googlenet-tesla-p4"])
        assert [one.max_batch_size("m") for one in plan.devices] == [8, 8]


def test_errors_of_other_servers_are_found_before_anything_starts(tmp_path: Path) -> None:
    def error(*models: str, **flags: object) -> str:
        return error_of(models=list(models), policy=["greedy"], **flags)

    with upstream() as a, upstream(metadata=metadata(x=("FP64", [-1, 2]))) as b:
        assert "m differs between" in error(f"m={a.spec},{b.spec[4:]}")
        assert "input x is FP32 [-1, 2] and FP64 [-1, 2]; serve one" in error(f"m={a.spec},{b.spec[4:]}")
        assert "a server is named twice" in error(f"m={a.spec},{a.spec[4:]}")
        assert "is not the URL of a model; give NAME=oip:http://" in error(f"m={a.spec},")
        assert "leave out --stages" in error(f"m={a.spec}", stages=2)
        assert "--meter: give a value for: energy meter of the server of an oip" in error(f"m={a.spec}", meter="gpu")
        assert "each of which would count all its energy: cpu, cpu" in error(f"m={a.spec}", f"n={b.spec}", meter="cpu")
        assert "unknown type of the sample 'x'" in error(f"m={a.spec}", sample=["x"])
        config = tmp_path / "server.yaml"
        models = [{"name": "m", "source": a.spec, "meter": "cpu"}, {"name": "n", "source": a.spec}]
        config.write_text(json.dumps({"models": models, "port": 0}))
        with pytest.raises(SpecError, match=f"the models of {a.device} have the meters cpu and none; give one"):
            make_plan(read_settings({}, config), lambda *_: None)
    assert "does not answer" in error(f"m={a.spec.replace('echo', 'gone')}")
    assert "--meter cpu is for models of other servers, oip:URL, and there are none" in error("googlenet", meter="cpu")
