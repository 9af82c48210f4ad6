"""Tests of the Kubernetes manifests: rendering by kubectl, schemas, and consistency."""

import re
import shutil
import subprocess
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from deploy.expressions import DEPLOY
from policies.catalog import parse_spec
from policies.profile import load_profile
from server.cli import app
from server.config import Settings, load_settings
from tests.support.crd_fields import FIELDS, strange
from tests.support.exported_metrics import exported, labels, names
from tests.support.kustomized import render
from tests.support.openapi import openapi_document

ROOT = DEPLOY / "kubernetes"
FOLDERS = [ROOT / "base", ROOT / "monitoring", *sorted((ROOT / "overlays").iterdir())]
PLAIN = ["base", "cpu-demo", "gpu"]  # without custom resources
SERVERS = ["cpu-demo", "gpu", "kserve"]
CUSTOM = [pytest.param(each, id=each[1]) for each in FIELDS]
VERSIONS = ["1.30", kubernetes_validate.latest_version()]
DISCOVERED = {"namespace", "pod", "container", "endpoint"}  # labels added by a PodMonitor, beside job and instance
BYTES = {"Mi": 2**20, "Gi": 2**30}

folders = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
servers = pytest.mark.parametrize("name", SERVERS)


@cache
def objects_in(folder: Path) -> list[dict[str, Any]]:
    """What `render` returns, which no test changes."""
    return render(folder)


def objects(name: str) -> list[dict[str, Any]]:
    return objects_in(next(folder for folder in FOLDERS if folder.name == name))


def one(name: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects(name) if each["kind"] == kind)
    return found


def is_custom(each: dict[str, Any]) -> bool:
    return (each["apiVersion"], each["kind"]) in FIELDS


def template(name: str) -> dict[str, Any]:
    """Pod template of a server; KServe combines it from the runtime and the service."""
    if name != "kserve":
        made: dict[str, Any] = one(name, "Deployment")["spec"]["template"]
        return made
    runtime, predictor = one(name, "ServingRuntime")["spec"], one(name, "InferenceService")["spec"]["predictor"]
    pod_keys = ("serviceAccountName", "enableServiceLinks", "terminationGracePeriodSeconds", "securityContext")
    container = runtime["containers"][0] | {key: predictor["model"][key] for key in ("args", "resources")}
    spec = {key: predictor[key] for key in pod_keys} | {"containers": [container], "volumes": runtime["volumes"]}
    return {"metadata": {"labels": runtime["labels"]}, "spec": spec}


def container(name: str) -> dict[str, Any]:
    (only,) = template(name)["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def environment(name: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(name)["env"]}


def queries(name: str) -> dict[str, float]:
    """PromQL queries of an autoscaler with their thresholds, averages per server."""
    if name == "kserve":
        metrics = one(name, "InferenceService")["spec"]["predictor"]["autoScaling"]["metrics"]
        external = [each["external"] for each in metrics]
        return {each["metric"]["query"]: float(each["target"]["value"]) for each in external}
    triggers = [each["metadata"] for each in one(name, "ScaledObject")["spec"]["triggers"]]
    return {each["query"]: float(each["threshold"]) for each in triggers}


def kubectl_renders(folder: Path) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (apt: kubernetes-client)")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [*yaml.safe_load_all(done.stdout)]


@folders
def test_kubectl_renders_the_same_objects_as_the_tests(folder: Path) -> None:
    rendered = kubectl_renders(folder)
    assert {identity(each): each for each in rendered} == {identity(each): each for each in objects_in(folder)}
    assert len(rendered) == len(objects_in(folder))


def test_the_example_folder_in_the_docs_can_be_rendered(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "deploy" / "kubernetes")
    (tmp_path / "mine").mkdir()
    page = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
    for name, text in re.findall(r"```yaml\n# (mine/[\w.]+)(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(f"#{text}")
    rendered = kubectl_renders(tmp_path / "mine")
    for each in rendered:
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    (deployment,) = (each for each in rendered if each["kind"] == "Deployment")
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    assert server["image"] == "registry.example.com/classifier:1"
    assert {"BATCHWRIGHT_API_KEY_FILE", *environment("gpu")} == {each["name"] for each in server["env"]}


def identity(each: dict[str, Any]) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]


@pytest.mark.parametrize("version", VERSIONS)
@folders
def test_every_field_is_in_the_schema_of_kubernetes(folder: Path, version: str) -> None:
    for each in objects_in(folder):
        if not is_custom(each):
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_pod_and_scaling_field_in_custom_resources_is_in_the_schema(version: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **template("kserve")}
    kubernetes_validate.validate(pod, version, strict=True)
    config = one("keda", "ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    target = {"kind": "Deployment", "name": "batchwright"}
    spec = {"maxReplicas": 1, "scaleTargetRef": target, "behavior": config["behavior"]}
    scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": spec}
    kubernetes_validate.validate(scaler, version, strict=True)


@folders
def test_custom_resources_have_only_fields_of_their_published_schema(folder: Path) -> None:
    assert [line for each in objects_in(folder) if is_custom(each) for line in strange(each)] == []


@pytest.mark.parametrize("custom", CUSTOM)
def test_a_wrong_name_or_type_of_a_custom_field_is_found(custom: tuple[str, str]) -> None:
    each = next(each for name in ("keda", "kserve") for each in objects(name) if each["kind"] == custom[1])
    for key, value in each["spec"].items():
        wrong = deepcopy(each)
        wrong["spec"][f"{key}s"] = wrong["spec"].pop(key)
        assert strange(wrong) == [f"spec.{key}s: there is no such field"]
        if key not in ("containers", "volumes"):  # Kubernetes' own
            wrong = each | {"spec": each["spec"] | {key: [[]] if isinstance(value, int) else 3.5}}
            assert len(strange(wrong)) == 1


def test_a_wrong_name_of_a_kubernetes_field_is_found() -> None:
    wrong = one("gpu", "Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_overlays_have_no_custom_resources(name: str) -> None:
    assert [each["kind"] for each in objects(name) if is_custom(each)] == []


@servers
def test_a_server_has_minimal_privileges(name: str) -> None:
    pod, box = template(name)["spec"], container(name)["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (box["readOnlyRootFilesystem"], box["allowPrivilegeEscalation"]) == (True, False)
    assert box["capabilities"] == {"drop": ["ALL"]}
    account = one(name, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert "automountServiceAccountToken" not in pod, "it would override the account's"


@servers
def test_user_and_volumes_match_the_image(name: str) -> None:
    dockerfile, security = (DEPLOY.parent / "Dockerfile").read_text(), template(name)["spec"]["securityContext"]
    assert f"--uid {security['runAsUser']} " in dockerfile
    assert security["fsGroup"] == security["runAsGroup"] == security["runAsUser"]
    mounts = {each["name"]: each["mountPath"] for each in container(name)["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in template(name)["spec"]["volumes"]}
    assert f"XDG_CACHE_HOME={mounts['cache']} " in dockerfile
    assert mounts["tmp"] == "/tmp"


@servers
def test_a_server_has_time_to_drain(name: str) -> None:
    defaults = {key: field.default for key, field in Settings.model_fields.items()}
    delay = float(environment(name)["BATCHWRIGHT_DRAIN_DELAY_S"])
    assert delay > 0
    longest = delay + defaults["hung_after_s"] + defaults["read_timeout_s"]
    assert template(name)["spec"]["terminationGracePeriodSeconds"] > longest


@servers
def test_arguments_and_environment_are_valid_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment(name).items():
        monkeypatch.setenv(key, value)
    command = typer.main.get_command(app).make_context("serve-model", container(name)["args"])
    flags = {key: value for key, value in command.params.items() if value not in (None, [])}
    settings = load_settings(flags, None)
    assert settings.models == ["googlenet"]
    assert [parse_spec(policy).text for policy in settings.policy] == settings.policy
    if name == "gpu":
        assert settings.device == "auto"
    else:
        assert load_profile(settings.device.removeprefix("emulated:")).model == "googlenet"


@servers
def test_service_links_are_off(name: str) -> None:
    """With them Kubernetes sets BATCHWRIGHT_PORT to tcp://... for the Service batchwright."""
    assert template(name)["spec"]["enableServiceLinks"] is False


@servers
def test_probes_call_existing_routes(name: str) -> None:
    pages, box = openapi_document()["paths"], container(name)
    probes = {which: box[which]["httpGet"] for which in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert all(probe["path"] in pages for probe in probes.values())
    assert {probe["port"] for probe in probes.values()} <= {port["name"] for port in box["ports"]}
    assert box["ports"][0]["containerPort"] == Settings.model_fields["port"].default
    assert [probe["path"].rpartition("/")[2] for probe in probes.values()] == ["ready", "ready", "live"]


def test_the_progress_deadline_is_longer_than_the_startup_probe() -> None:
    startup = container("gpu")["startupProbe"]
    longest = startup["periodSeconds"] * startup["failureThreshold"]
    assert one("gpu", "Deployment")["spec"]["progressDeadlineSeconds"] > longest


@servers
def test_the_memory_limit_covers_the_memory_budget_of_calls(name: str) -> None:
    limit = container(name)["resources"]["limits"]["memory"]
    assert int(limit[:-2]) * BYTES[limit[-2:]] >= Settings.model_fields["queue_bytes"].default + 200e6


def test_only_the_gpu_overlay_needs_a_gpu_and_the_network() -> None:
    limits = {name: container(name)["resources"]["limits"] for name in SERVERS}
    assert {name for name, limit in limits.items() if "nvidia.com/gpu" in limit} == {"gpu"}
    assert {name for name in SERVERS if one(name, "NetworkPolicy")["spec"]["egress"]} == {"gpu"}


def test_a_rollout_needs_no_spare_gpu() -> None:
    assert one("gpu", "Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@servers
def test_selectors_match_the_labels_and_the_port_of_the_pods(name: str) -> None:
    seen = {each["kind"]: each["spec"] for each in [*objects(name), *objects("monitoring")] if "spec" in each}
    pod_labels = template(name)["metadata"]["labels"]
    selectors = [seen[kind]["selector"]["matchLabels"] for kind in ("PodDisruptionBudget", "PodMonitor")]
    selectors.append(seen["NetworkPolicy"]["podSelector"]["matchLabels"])
    port = {
        seen["NetworkPolicy"]["ingress"][0]["ports"][0]["port"],
        seen["PodMonitor"]["podMetricsEndpoints"][0]["port"],
    }
    if name != "kserve":  # it creates its own Service and Deployment
        selectors += [seen["Service"]["selector"], seen["Deployment"]["selector"]["matchLabels"]]
        port.add(seen["Service"]["ports"][0]["targetPort"])
    assert all(selector.items() <= pod_labels.items() for selector in selectors)
    assert port == {container(name)["ports"][0]["name"]}


def test_the_pod_monitor_sets_the_job_of_the_rules() -> None:
    label = one("monitoring", "PodMonitor")["spec"]["jobLabel"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert all(template(name)["metadata"]["labels"][label] in jobs for name in SERVERS)


@pytest.mark.parametrize("name", ["keda", "kserve"])
def test_the_metrics_for_scaling_are_exported(name: str) -> None:
    used = {metric for query in queries(name) for metric in names(query)}
    assert used == {"batchwright_backlog_seconds", "batchwright_arrival_rate_hertz", "batchwright_capacity_hertz"}
    for query in queries(name):
        assert names(query) <= exported().keys()
        assert all(label in exported()[metric] | DISCOVERED for metric, label in labels(query))


def test_keda_and_kserve_scale_by_the_same_queries_and_no_replicas_are_set() -> None:
    assert [*queries("keda").values()] == [*queries("kserve").values()]
    target = one("keda", "ScaledObject")["spec"]["scaleTargetRef"]["name"]
    for name in ("cpu-demo", "gpu"):
        deployment = one(name, "Deployment")
        assert deployment["metadata"]["name"] == target
        assert "replicas" not in deployment["spec"], "applying it would undo what the autoscaler did"


def test_the_container_with_kserve_is_the_same_as_without() -> None:
    excluded = {"name", "args", "resources"}
    expected = {key: value for key, value in container("cpu-demo").items() if key not in excluded}
    assert {key: value for key, value in container("kserve").items() if key not in excluded} == expected
    assert (
        one("kserve", "InferenceService")["spec"]["predictor"]["model"]["runtime"]
        == identity(one("kserve", "ServingRuntime"))[1]
    )


@servers
def test_the_image_tag_is_the_version_of_the_project(name: str) -> None:
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert f'version = "{container(name)["image"].removeprefix("batchwright:")}"' in project
