"""Tests of Ray Serve: the methods of a replica, the autoscaling policy, and the configuration file."""

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from deploy.expressions import DEPLOY
from deploy.ray.autoscaling import ByBacklog
from deploy.ray.replica import Replica, merge_metrics
from policies.profile import Profile
from policies.types import SpecError
from profiler.cache import CacheKey
from profiler.measure import Subject
from profiler.preflight import Findings
from server.config import load_settings
from server.scheduling.calls import Sample

CONFIG: dict[str, Any] = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())
APPLICATION = CONFIG["applications"][0]
(DEPLOYED,) = APPLICATION["deployments"]
SETTINGS = {"models": ["cat", "dog"], "device": "emulated:googlenet-tesla-p4-x10", "policy": ["static:4"]}

MODEL = """
from batchwright import Model, Tensor


class Mine(Model):
    inputs = {"x": Tensor("FP32", [1])}
    outputs = {"y": Tensor("FP32", [1])}

    def run(self, x):
        return {"y": x}
"""


def play(scenario: Callable[[Replica], Awaitable[None]], **settings: Any) -> None:
    """Run a scenario with a replica that is built but does not serve yet."""

    async def whole() -> None:
        replica = Replica(SETTINGS | settings)
        replica.app = await replica.__serve_build_asgi_app__()  # type: ignore[attr-defined]
        with replica._logs:
            await scenario(replica)

    asyncio.run(whole())


async def call(replica: Replica, method: str, path: str, prefix: str = "") -> tuple[int, str]:
    """A call as Ray's proxy forwards it: with the application's route prefix, and without state in its scope."""
    path = prefix + path
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "root_path": prefix}
    scope |= {"headers": [(b"host", b"localhost")], "query_string": b"", "server": ("localhost", 80), "scheme": "http"}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await replica.app(scope, receive, send)  # type: ignore[attr-defined]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


def specs(replica: Replica) -> dict[str, str]:
    return {model: chosen.spec for model, chosen in replica._server.fleet.dispatchers[0].chosen.items()}


@pytest.mark.usefixtures("few_loads")
def test_user_config_swaps_the_policies_and_overrides_args() -> None:
    async def scenario(replica: Replica) -> None:
        await replica.reconfigure({"policy": ["smdp"], "slo_p95_ms": 300})
        assert specs(replica) == {"cat": "smdp", "dog": "smdp"}
        assert '"slo_p95_ms":"300.0"' in (await call(replica, "GET", "/admin/models/cat/policy"))[1]
        assert 'batchwright_objective_seconds{model="cat"} 0.3' in await replica.render_metrics()
        await replica.reconfigure({"policy": ["smdp"], "w2": 2})
        assert '"max_wait_ms":"1000","w2":"2.0"}' in (await call(replica, "GET", "/admin/models/cat/policy"))[1]
        assert "batchwright_objective_seconds{" not in await replica.render_metrics()
        await replica.reconfigure({"policy": ["cat=smdp:w2=2", "dog=greedy"]})
        assert specs(replica) == {"cat": "smdp:w2=2", "dog": "greedy"}
        assert 'model="dog",policy="greedy"' in await replica.render_metrics()

    play(scenario)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy": ["cat=greedy", "dog=clever"]}, "unknown policy 'clever'"),
        ({"policy": ["cat=greedy", "dog=lazy:slo_ms=50"]}, "--stages"),
        ({"policy": "auto:w2=1", "w2": 2}, "but --w2 is 2; give one"),
        ({"slo_p95_ms": -1}, "greater than 0"),
        ({"slo_p95_ms": 200}, "policy 'static:4' of cat and policy 'static:4' of dog ignore --slo-p95-ms 200"),
        ({"device": "cpu"}, "'device' cannot change while serving"),
    ],
)
def test_an_invalid_user_config_fails_the_start_and_is_only_logged_later(
    config: Mapping[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(replica: Replica) -> None:
        with pytest.raises(SpecError, match=message):
            await replica.reconfigure(config)
        assert specs(replica) == {"cat": "static:4", "dog": "static:4"}
        replica.check_health()
        with caplog.at_level(logging.ERROR):
            await replica.reconfigure(config)
        assert message in caplog.text
        assert specs(replica) == {"cat": "static:4", "dog": "static:4"}

    play(scenario)


def test_settings_are_validated_like_those_of_serve_model() -> None:
    with pytest.raises(SpecError, match=r"queue-capacity.*; unknown policy 'clever'"):
        play(_nothing, policy=["clever"], queue_capacity=0)


async def _nothing(_: Replica) -> None:
    raise AssertionError("the replica was built")


def test_the_state_of_the_device_that_planning_finds_is_that_of_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings, recorded = [Findings(("idle before models were loaded",))], list[str]()

    def first_profile(subject: Subject, key: CacheKey, _: bool, found: Findings, *__: object) -> Profile:
        recorded.extend(found.facts)
        return Profile("p", (1.0, 2.0), model=subject.model, device=key.device, source="measured")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("profiler.first_profile.preflight", lambda _: findings.pop())
    monkeypatch.setattr("profiler.first_profile.first_profile", first_profile)
    (tmp_path / "model.py").write_text(MODEL)
    play(
        _done,
        models=[f"m={tmp_path / 'model.py'}:Mine"],
        device="cpu",
        max_batch_size=2,
        policy=["greedy"],
        profile_first=True,
    )
    assert recorded == ["idle before models were loaded"]


async def _done(_: Replica) -> None:
    pass


def test_a_policy_change_of_a_single_replica_is_rejected() -> None:
    async def scenario(replica: Replica) -> None:
        for method, path in (("PUT", "/admin/models/cat/policy"), ("POST", "/admin/models/cat/solve")):
            status, body = await call(replica, method, path)
            assert status == 405
            assert "user_config" in body

    play(scenario)


def test_routes_work_with_a_route_prefix() -> None:
    async def scenario(replica: Replica) -> None:
        for prefix in ("", "/svc", "/admin", "/v2/health"):
            assert (await call(replica, "PUT", "/admin/models/cat/policy", prefix))[0] == 405
            assert (await call(replica, "GET", "/admin/models/cat/policy", prefix))[0] == 200
            assert (await call(replica, "GET", "/v2/models/cat", prefix))[0] == 200
            status, text = await call(replica, "GET", "/metrics", prefix)
            assert (status, 'replica=""' in text) == (200, True)

    play(scenario)


def test_a_call_without_state_is_answered() -> None:
    async def scenario(replica: Replica) -> None:
        assert (await call(replica, "GET", "/v2/health/ready"))[0] == 200
        assert (await call(replica, "GET", "/nowhere"))[0] == 404

    play(scenario)


def test_a_replica_is_healthy_until_its_dispatcher_fails() -> None:
    async def scenario(replica: Replica) -> None:
        replica.check_health()
        replica._server.fleet.broken.set()
        with pytest.raises(RuntimeError, match="dispatcher"):
            replica.check_health()

    play(scenario)


def test_a_replica_reports_backlog_and_load() -> None:
    async def scenario(replica: Replica) -> None:
        assert replica.record_autoscaling_stats() == {"backlog_s": 0.0, "load": 0.0}
        profile = replica._server.fleet.dispatchers[0].chosen["cat"].profile
        calls = [replica._server.fleet.submit("cat", [Sample(n)]) for n in range(64)]
        stats = replica.record_autoscaling_stats()
        assert stats["backlog_s"] == pytest.approx(2 * profile.service_time(32))
        assert stats["load"] > 0
        for submitted in calls:
            submitted.cancel()

    play(scenario)


@dataclass(frozen=True)
class FakeContext:
    """See deploy.ray.autoscaling.Context."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    target_num_replicas: int = 2


@pytest.mark.parametrize(
    ("backlogs", "loads", "replicas"),
    [
        ((0.0, 0.0), (0.0, 0.0), 0.0),  # Ray clips to min_replicas
        ((0.1, 0.1), (0.4, 0.4), 1.0),
        ((0.2, 0.2), (0.9, 0.9), 2.25),  # the load is too high
        ((1.5, 0.5), (0.5, 0.5), 4.0),  # the backlog is too long
    ],
)
def test_the_number_of_replicas_follows_from_backlog_and_load(
    backlogs: tuple[float, ...], loads: tuple[float, ...], replicas: float
) -> None:
    metrics = {"backlog_s": dict(enumerate(backlogs)), "load": dict(enumerate(loads))}
    assert ByBacklog(0.5, 0.8)(FakeContext(metrics))[0] == pytest.approx(replicas)


@pytest.mark.parametrize("metrics", [None, {}, {"backlog_s": {}, "load": {}}, {"backlog_s": {"a": 9.0}}])
def test_without_metrics_the_number_of_replicas_stays(metrics: Mapping[str, Mapping[Any, float]] | None) -> None:
    assert ByBacklog()(FakeContext(metrics, 3)) == (3, {})


def test_the_metrics_of_all_replicas_are_merged() -> None:
    async def scenario(replica: Replica) -> None:
        texts = {}
        for name in ("a", "b"):
            replica._server.metrics.outcome("cat", "ok", 3)
            texts[name] = await replica.render_metrics()
        families = {family.name: family for family in text_string_to_metric_families(merge_metrics(texts))}
        samples = families["batchwright_requests"].samples
        counted = {
            s.labels["replica"]: s.value for s in samples if s.labels["outcome"] == "ok" and s.labels["model"] == "cat"
        }
        assert counted == {"a": 3.0, "b": 6.0}
        assert families.keys() == {f.name for f in text_string_to_metric_families(texts["a"])}
        assert {s.labels["replica"] for f in families.values() for s in f.samples} == {"a", "b"}
        assert 'replica=""' in (await call(replica, "GET", "/metrics"))[1]
        assert (await call(replica, "POST", "/metrics"))[0] == 405

    play(scenario)


@pytest.mark.usefixtures("few_loads")
def test_the_configuration_file_is_valid_for_a_replica() -> None:
    args, config = APPLICATION["args"], DEPLOYED["user_config"]
    load_settings({**args, **config}, None)

    async def scenario(replica: Replica) -> None:
        await replica.reconfigure(config)

    play(scenario, **args)
    policy = DEPLOYED["autoscaling_config"]["policy"]
    module, _, name = policy["policy_function"].partition(":")
    assert getattr(importlib.import_module(module), name)(**policy["policy_kwargs"])(FakeContext(None)) == (2, {})


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field")  # see serve.yaml
def test_ray_accepts_the_configuration_file() -> None:
    pytest.importorskip("ray.serve", reason="needs pip install 'batchwright[ray]'")
    schema = importlib.import_module("ray.serve.schema").ServeDeploySchema.model_validate(CONFIG)
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    built = getattr(importlib.import_module(module), name)(application.args)
    assert [deployment.name for deployment in application.deployments] == [built._bound_deployment.name]
