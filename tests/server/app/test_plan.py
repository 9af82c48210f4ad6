"""What is checked before anything starts: everything, at once."""

import json
import socket
import sys
from pathlib import Path

import pytest

from policies.profile import Profile, load_profile
from policies.types import SpecError
from server.app.plan import DevicePlan, Plan, make_plan
from server.config import Reading, Settings, read_settings

P4 = "emulated:googlenet-tesla-p4"


def whole(kept: Profile | None = None, /, **flags: object) -> Plan:
    given: dict[str, object] = {"models": ["googlenet"], "device": P4, "port": 0} | flags
    plan = make_plan(read_settings(given, None), lambda *_: kept)
    plan.bound.close()
    return plan


def planned(kept: Profile | None = None, /, **flags: object) -> DevicePlan:
    (device,) = whole(kept, **flags).devices
    return device


def mistakes(**flags: object) -> str:
    with pytest.raises(SpecError) as caught:
        whole(None, **flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def small(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    sizes = {"batch_size": [1, 8], "service_time_s": [1.0, 2.0]}
    path.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "small", **sizes}))
    return str(path)


def test_what_is_known_is_chosen_once_and_for_all() -> None:
    plan = planned(policy=["static:4"], max_batch_size=8)
    assert plan.profiles["googlenet"].max_batch_size == 8
    assert plan.choose("googlenet", plan.profiles["googlenet"]) is plan.chosen["googlenet"]
    assert plan.largest("googlenet") == 8


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
        ({"device": "cpu", "weights": "nowhere.pt"}, "no weights file"),
        ({"device": "cpu", "models": ["m=nowhere/at-all"]}, "no 'nowhere/at-all/config.json'"),
        ({"device": "cpu", "models": ["text-generator"], "weights": "w.pt"}, "takes its weights from its folder"),
        ({"device": "cpu", "models": ["text-generator"], "stages": 2}, "leave out --stages"),
        ({"device": "cpu", "policy": ["lazy:slo_ms=9,timesteps=5"], "stages": 4}, "timesteps are for models"),
        ({"device": "cpu", "policy": ["joining"]}, "for models that generate tokens"),
        ({"device": "cpu", "models": ["text-generator"], "policy": ["lazy"]}, "needs lazy:slo_ms=VALUE"),
        ({"device": "cpu", "models": ["m=translator"], "profile": ["googlenet-tesla-p4"]}, "knows no lengths"),
        ({"models": ["m=translator"]}, "an emulated device takes pictures"),
        ({"models": ["m=a", "m=b"]}, "named twice"),
        ({"w2": 1.0, "slo_p95_ms": 5.0}, "names"),
        ({"device": "cpu", "policy": ["smdp:w2=1"], "w2": 2.0}, "give one"),
        ({"device": "cpu", "policy": ["smdp:w2=inf"]}, "finite"),
        ({"device": "cpu", "policy": ["smdp:slo_p95_ms=x"]}, "not a number"),
        ({"device": "cpu", "policy": ["static:33"]}, "within 1..32"),
    ],
)
def test_a_mistake_is_found_before_anything_starts(flags: dict[str, object], says: str) -> None:
    assert says in mistakes(**flags)


def test_a_text_model_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    told = mistakes(device="cpu", models=["m=text-generator"], policy=["greedy"])
    assert 'm is a text model, which needs transformers; in the clone pip install ".[text]"' in told
    assert planned(Profile("kept", (1.0, 2.0)), device="cpu", policy=["greedy"]).chosen


def test_all_mistakes_are_told_at_once() -> None:
    told = mistakes(device="emulated:nowhere", profile=["nix"], policy=["a=b"], port=-1, queue_capacity=0)
    for said in ("nowhere", "nix", "'a=b'", "port", "queue_capacity"):
        assert said in told
    assert told.count("; ") >= 4


def test_a_flag_that_a_given_profile_would_cap_silently_is_an_error(tmp_path: Path) -> None:
    assert "outside 1..8" in mistakes(profile=[small(tmp_path)], max_batch_size=16)
    assert planned(profile=[small(tmp_path)]).largest("googlenet") == 8


def test_each_device_has_its_profile_and_the_policies_solved_for_it() -> None:
    plan = whole(device=f"{P4},{P4}-x10, {P4}", policy=["smdp:w2=1"])
    assert [device.settings.device for device in plan.devices] == [P4, f"{P4}-x10", P4]
    chosen = [device.chosen["googlenet"] for device in plan.devices]
    played = ["googlenet-tesla-p4", "googlenet-tesla-p4-x10", "googlenet-tesla-p4"]
    assert [choice.profile.name for choice in chosen] == played
    assert chosen[0].monitor is not chosen[2].monitor, "each measures its own share"
    given = whole(device=f"{P4},{P4}-x10", profile=["googlenet-tesla-p4"]).devices
    assert [device.profiles["googlenet"].name for device in given] == ["googlenet-tesla-p4"] * 2


def test_a_mistake_that_all_devices_share_is_told_once() -> None:
    assert mistakes(device=f"{P4},{P4}-x10", policy=["clever"]).count("clever") == 1


def test_a_kept_profile_is_known_and_the_policy_solved_before_the_model_is_loaded() -> None:
    kept = load_profile("googlenet-tesla-p4").truncated(4)
    plan = planned(kept, device="cpu", policy=["smdp:w2=1"])
    assert plan.chosen["googlenet"].profile is kept
    assert planned(None, device="cpu", policy=["smdp:w2=1"]).chosen == {}


def test_a_taken_port_is_a_mistake_among_others_and_a_free_one_is_given_back() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = mistakes(port=port, policy=["clever"])
        assert "cannot listen" in told
        assert "clever" in told
    assert "clever" in mistakes(port=port, policy=["clever"])
    assert whole(port=port).bound.fileno() == -1


def test_other_parts_have_their_own_checks() -> None:
    def no_keys(settings: Settings) -> None:
        raise SpecError("no key file")

    reading = read_settings({"models": ["a"], "device": P4, "port": 0}, None)
    with pytest.raises(SpecError, match="nothing else; no key file"):
        make_plan(Reading(reading.settings, ("nothing else",)), lambda *_: None, [no_keys])
