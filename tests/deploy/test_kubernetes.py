"""The Kubernetes manifests: kubectl reads them as we mean them, every field exists, and they fit together."""

import re
import shutil
import subprocess
from copy import deepcopy
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
PLAIN = ["base", "cpu-demo", "gpu"]  # for any cluster
SERVERS = ["cpu-demo", "gpu", "kserve"]
CUSTOM = [pytest.param(each, id=each[1]) for each in FIELDS]
VERSIONS = ["1.30", kubernetes_validate.latest_version()]
DISCOVERED = {"namespace", "pod", "container", "endpoint"}  # labels that a PodMonitor adds, beside job and instance
BYTES = {"Mi": 2**20, "Gi": 2**30}

folders = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
servers = pytest.mark.parametrize("name", SERVERS)


def objects(name: str) -> list[dict[str, Any]]:
    return render(next(folder for folder in FOLDERS if folder.name == name))


def one(name: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects(name) if each["kind"] == kind)
    return found


def is_custom(each: dict[str, Any]) -> bool:
    return (each["apiVersion"], each["kind"]) in FIELDS


def template(name: str) -> dict[str, Any]:
    """What a server's pods are made from; KServe joins what the runtime and the service say."""
    if name != "kserve":
        made: dict[str, Any] = one(name, "Deployment")["spec"]["template"]
        return made
    runtime, predictor = one(name, "ServingRuntime")["spec"], one(name, "InferenceService")["spec"]["predictor"]
    ours = ("serviceAccountName", "enableServiceLinks", "terminationGracePeriodSeconds", "securityContext")
    container = runtime["containers"][0] | {key: predictor["model"][key] for key in ("args", "resources")}
    spec = {key: predictor[key] for key in ours} | {"containers": [container], "volumes": runtime["volumes"]}
    return {"metadata": {"labels": runtime["labels"]}, "spec": spec}


def container(name: str) -> dict[str, Any]:
    (only,) = template(name)["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def environment(name: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(name)["env"]}


def queries(name: str) -> dict[str, float]:
    """PromQL that an autoscaler asks, and the average for each server above which it adds one."""
    if name == "kserve":
        metrics = one(name, "InferenceService")["spec"]["predictor"]["autoScaling"]["metrics"]
        asked = [each["external"] for each in metrics]
        return {each["metric"]["query"]: float(each["target"]["value"]) for each in asked}
    triggers = [each["metadata"] for each in one(name, "ScaledObject")["spec"]["triggers"]]
    return {each["query"]: float(each["threshold"]) for each in triggers}


def kubectl_renders(folder: Path) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (apt: kubernetes-client)")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [*yaml.safe_load_all(done.stdout)]


@folders
def test_kubectl_renders_what_is_tested_here(folder: Path) -> None:
    rendered = kubectl_renders(folder)
    assert {identity(each): each for each in rendered} == {identity(each): each for each in render(folder)}
    assert len(rendered) == len(render(folder))


def test_the_folder_of_your_own_that_the_page_shows_can_be_rendered(tmp_path: Path) -> None:
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
    assert server["image"] == f"registry.example.com/{container('gpu')['image']}"
    assert {"BATCHWRIGHT_API_KEY_FILE", *environment("gpu")} == {each["name"] for each in server["env"]}


def identity(each: dict[str, Any]) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]


@pytest.mark.parametrize("version", VERSIONS)
@folders
def test_kubernetes_knows_every_field(folder: Path, version: str) -> None:
    for each in render(folder):
        if not is_custom(each):
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field_within_custom_resources(version: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **template("kserve")}
    kubernetes_validate.validate(pod, version, strict=True)
    config = one("keda", "ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    target = {"kind": "Deployment", "name": "batchwright"}
    spec = {"maxReplicas": 1, "scaleTargetRef": target, "behavior": config["behavior"]}
    scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": spec}
    kubernetes_validate.validate(scaler, version, strict=True)


@folders
def test_custom_resources_have_only_fields_that_their_projects_publish(folder: Path) -> None:
    assert [line for each in render(folder) if is_custom(each) for line in strange(each)] == []


@pytest.mark.parametrize("custom", CUSTOM)
def test_a_misspelt_or_mistyped_field_is_found(custom: tuple[str, str]) -> None:
    each = next(each for name in ("keda", "kserve") for each in objects(name) if each["kind"] == custom[1])
    for key, value in each["spec"].items():
        wrong = deepcopy(each)
        wrong["spec"][f"{key}s"] = wrong["spec"].pop(key)
        assert strange(wrong) == [f"spec.{key}s: there is no such field"]
        if key not in ("containers", "volumes"):  # Kubernetes' own
            wrong = each | {"spec": each["spec"] | {key: [[]] if isinstance(value, int) else 3.5}}
            assert len(strange(wrong)) == 1


def test_a_misspelt_field_of_kubernetes_itself_is_found() -> None:
    wrong = one("gpu", "Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", PLAIN)
def test_a_cluster_without_operators_takes_it(name: str) -> None:
    assert [each["kind"] for each in objects(name) if is_custom(each)] == []


@servers
def test_a_server_may_do_as_little_as_possible(name: str) -> None:
    pod, box = template(name)["spec"], container(name)["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (box["readOnlyRootFilesystem"], box["allowPrivilegeEscalation"]) == (True, False)
    assert box["capabilities"] == {"drop": ["ALL"]}
    account = one(name, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert "automountServiceAccountToken" not in pod, "a pod's own word would win"


@servers
def test_a_server_is_the_images_user_and_writes_where_the_image_does(name: str) -> None:
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
def test_a_server_understands_what_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_no_service_speaks_to_the_server_by_its_environment(name: str) -> None:
    """Kubernetes would set BATCHWRIGHT_PORT to tcp://..., for a Service called batchwright."""
    assert template(name)["spec"]["enableServiceLinks"] is False


@servers
def test_probes_ask_for_pages_that_there_are(name: str) -> None:
    pages, box = openapi_document()["paths"], container(name)
    probes = {which: box[which]["httpGet"] for which in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert all(probe["path"] in pages for probe in probes.values())
    assert {probe["port"] for probe in probes.values()} <= {port["name"] for port in box["ports"]}
    assert box["ports"][0]["containerPort"] == Settings.model_fields["port"].default
    assert [probe["path"].rpartition("/")[2] for probe in probes.values()] == ["ready", "ready", "live"]


def test_a_rollout_waits_longer_than_a_start_may_take() -> None:
    startup = container("gpu")["startupProbe"]
    longest = startup["periodSeconds"] * startup["failureThreshold"]
    assert one("gpu", "Deployment")["spec"]["progressDeadlineSeconds"] > longest


@servers
def test_there_is_memory_for_the_calls_that_are_held(name: str) -> None:
    limit = container(name)["resources"]["limits"]["memory"]
    assert int(limit[:-2]) * BYTES[limit[-2:]] >= Settings.model_fields["queue_bytes"].default + 200e6


def test_only_the_gpu_overlay_needs_a_gpu_and_the_network() -> None:
    limits = {name: container(name)["resources"]["limits"] for name in SERVERS}
    assert {name for name, limit in limits.items() if "nvidia.com/gpu" in limit} == {"gpu"}
    assert {name for name in SERVERS if one(name, "NetworkPolicy")["spec"]["egress"]} == {"gpu"}


def test_a_rollout_waits_for_no_gpu_beyond_those_in_use() -> None:
    assert one("gpu", "Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@servers
def test_whoever_looks_for_the_pods_finds_them_and_their_port(name: str) -> None:
    seen = {each["kind"]: each["spec"] for each in [*objects(name), *objects("monitoring")] if "spec" in each}
    told = template(name)["metadata"]["labels"]
    selectors = [seen[kind]["selector"]["matchLabels"] for kind in ("PodDisruptionBudget", "PodMonitor")]
    selectors.append(seen["NetworkPolicy"]["podSelector"]["matchLabels"])
    port = {
        seen["NetworkPolicy"]["ingress"][0]["ports"][0]["port"],
        seen["PodMonitor"]["podMetricsEndpoints"][0]["port"],
    }
    if name != "kserve":  # which makes its own
        selectors += [seen["Service"]["selector"], seen["Deployment"]["selector"]["matchLabels"]]
        port.add(seen["Service"]["ports"][0]["targetPort"])
    assert all(selector.items() <= told.items() for selector in selectors)
    assert port == {container(name)["ports"][0]["name"]}


def test_the_rules_know_the_job_that_the_monitor_names() -> None:
    label = one("monitoring", "PodMonitor")["spec"]["jobLabel"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert all(template(name)["metadata"]["labels"][label] in jobs for name in SERVERS)


@pytest.mark.parametrize("name", ["keda", "kserve"])
def test_scaling_asks_for_what_is_exported(name: str) -> None:
    asked = {metric for query in queries(name) for metric in names(query)}
    assert asked == {"batchwright_backlog_seconds", "batchwright_arrival_rate_hertz", "batchwright_capacity_hertz"}
    for query in queries(name):
        assert names(query) <= exported().keys()
        assert all(label in exported()[metric] | DISCOVERED for metric, label in labels(query))


def test_keda_and_kserve_scale_alike_and_only_once() -> None:
    assert [*queries("keda").values()] == [*queries("kserve").values()]
    target = one("keda", "ScaledObject")["spec"]["scaleTargetRef"]["name"]
    for name in ("cpu-demo", "gpu"):
        deployment = one(name, "Deployment")
        assert deployment["metadata"]["name"] == target
        assert "replicas" not in deployment["spec"], "applying it would undo what the autoscaler did"


def test_a_server_with_kserve_is_the_same_server() -> None:
    theirs = {"name", "args", "resources"}
    ours = {key: value for key, value in container("cpu-demo").items() if key not in theirs}
    assert {key: value for key, value in container("kserve").items() if key not in theirs} == ours
    assert (
        one("kserve", "InferenceService")["spec"]["predictor"]["model"]["runtime"]
        == identity(one("kserve", "ServingRuntime"))[1]
    )


@servers
def test_the_image_is_of_this_version(name: str) -> None:
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert f'version = "{container(name)["image"].removeprefix("batchwright:")}"' in project
