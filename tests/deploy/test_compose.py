"""Tests of the compose file: hardening, profiles, and validation by docker-compose."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from benchmarks.container import last, steps, target
from deploy.expressions import DEPLOY

COMPOSE = DEPLOY / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
MONITORING = {"prometheus", "grafana"}
RUN = {
    "gpu": {"batchwright"},
    "gpu-load": {"batchwright", "loadgen"},
    "emulated": {"batchwright-emulated"},
    "emulated-load": {"batchwright-emulated", "loadgen-emulated"},
}
FALLBACK = re.compile(r"weights\W+(?:value\W+)?(?:auto|random)\b", re.IGNORECASE)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_minimal_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].split(":")[0]) > 0
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("profile", RUN)
def test_a_profile_runs_its_services(profile: str) -> None:
    active = {name for name, service in SERVICES.items() if profile in service.get("profiles", [profile])}
    assert active == RUN[profile] | MONITORING
    for name in active:
        for needed, how in SERVICES[name].get("depends_on", {}).items():
            assert needed in active, name
            assert how == {"condition": "service_healthy"}, name
            assert "healthcheck" in SERVICES[needed], needed


def test_the_versions_of_third_party_images_are_pinned() -> None:
    for name in MONITORING:
        assert re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"]), name


def test_a_server_has_time_to_drain() -> None:
    from server.config import Settings

    for name in ("batchwright", "batchwright-emulated"):
        service = SERVICES[name]
        delay = float(service["environment"]["BATCHWRIGHT_DRAIN_DELAY_S"])
        longest_batch, slow_reader = (Settings.model_fields[key].default for key in ("hung_after_s", "read_timeout_s"))
        assert float(service["stop_grace_period"].removesuffix("s")) > delay + longest_batch + slow_reader


def test_no_deployment_falls_back_to_random_weights() -> None:
    files = [
        DEPLOY.parent / "Dockerfile",
        COMPOSE,
        *(DEPLOY / "kubernetes").rglob("*.yaml"),
        *(DEPLOY / "ray").iterdir(),
    ]
    assert [path for path in files if path.is_file() and FALLBACK.search(path.read_text())] == []


@pytest.mark.parametrize(
    "text", ["--weights, auto]", '"--weights", "random"', "weights: auto", "{name: BATCHWRIGHT_WEIGHTS, value: auto}"]
)
def test_the_fallback_to_random_weights_is_found(text: str) -> None:
    assert FALLBACK.search(text)


def test_only_the_gpu_profile_reserves_a_gpu() -> None:
    assert [name for name, service in SERVICES.items() if "deploy" in service] == ["batchwright"]


def test_the_gpu_profile_builds_the_target_with_pinned_cuda() -> None:
    dockerfile = steps((DEPLOY.parent / "Dockerfile").read_text())
    for name, stage in (("batchwright", "gpu"), ("batchwright-emulated", "any")):
        assert SERVICES[name]["build"].get("target", "any") == stage
        found = target(dockerfile, stage)
        assert last(found, "USER") == "batchwright"
        assert last(found, "VOLUME") == "/home/batchwright/.cache"
    (install,) = [rest for key, rest in target(dockerfile, "gpu") if key == "RUN" and rest.startswith("make")]
    assert re.search(r"torch==\d+\.\d+\.\d+ torchvision==\d+\.\d+\.\d+ .*/whl/cu\d+", install)
    assert "TORCH" not in " ".join(rest for key, rest in target(dockerfile, "any") if key == "RUN")
    assert "$(TORCH)" in (DEPLOY.parent / "Makefile").read_text()


def test_prometheus_scrapes_the_alias_of_both_servers() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (target,) = next(job for job in config["scrape_configs"] if job["job_name"] == "batchwright")["static_configs"][0][
        "targets"
    ]
    for name in ("batchwright", "batchwright-emulated"):
        assert target.split(":")[0] in SERVICES[name]["networks"]["default"]["aliases"]


def test_mounted_folders_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).is_dir(), volume


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="docker-compose is not installed (apt: docker-compose)"
)
@pytest.mark.parametrize("profile", RUN)
def test_docker_compose_accepts_the_file(profile: str) -> None:
    line = ["docker-compose", "--file", str(COMPOSE), "--profile", profile, "config", "--quiet"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
