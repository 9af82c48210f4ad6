"""A model without a profile is served at once, and its service times are learned meanwhile."""

import json
from pathlib import Path

import pytest

from policies.profile import load_profile
from tests.support.http_client import fetch
from tests.support.logged_server import LoggedServer, logged_server

CODE = """
import time
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {"x": Tensor("FP32", [-1], pad=0.0)}
    outputs = {"y": Tensor("FP32")}
    lengths = [4, 16]
    max_batch_size = 8
    def run(self, x):
        time.sleep(0.002 + 0.0005 * len(x))
        return {"y": x.sum(1)}
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(CODE)
    return f"mine={tmp_path}/mine.py:Mine"


def call(server: LoggedServer, x: list[float]) -> float:
    found: float = fetch(server.url, "/predict", json.dumps({"inputs": {"x": x}}).encode()).json["outputs"]["y"]
    return found


def profile_of(server: LoggedServer) -> str:
    (device,) = fetch(server.url, "/admin/devices").json
    found: str = device["models"]["mine"]["profile"]
    return found


def test_calls_are_answered_while_service_times_are_learned_and_the_learned_profile_is_cached(
    tmp_path: Path, model: str
) -> None:
    with logged_server(tmp_path, model, "--device", "cpu") as server:
        assert profile_of(server).endswith("-estimated")
        answers = 0
        while not server.logged("mine: the learned profile is cached"):
            assert call(server, [1.0, 2.0, answers]) == 3.0 + answers
            answers += 1
        assert answers > 10
        assert call(server, [1.0] * 16) == 16.0
    (cached,) = (tmp_path / "cache").rglob("*.json")
    profile = load_profile(str(cached))
    assert profile.lengths == (4, 16)
    assert 0.003 < profile.service_time(2) < 0.02
    assert 0.006 < profile.service_time(8, 16) < 0.03, "although calls made batches of one only"
    with logged_server(tmp_path, model, "--device", "cpu") as server:
        assert not profile_of(server).endswith("-estimated"), "the cached one is known from the start"


@pytest.mark.parametrize("flags", [("--profile-first",), ("--slo-p95-ms", "500"), ("--policy", "smdp:slo_mean_ms=300")])
def test_with_a_goal_or_where_it_is_asked_for_the_profile_is_measured_first(
    tmp_path: Path, model: str, flags: tuple[str, ...]
) -> None:
    with logged_server(tmp_path, model, "--device", "cpu", *flags) as server:
        assert not profile_of(server).endswith("-estimated")
