"""The fields of other people's resources that ours use, as their projects publish them, and what uses any other.

Kubernetes' own kinds have schemas that kubernetes-validate brings; these have not. A field that is used for the first
time is looked up in its source and added here.

Sources:
    ScaledObject: kedacore/keda, config/crd/bases/keda.sh_scaledobjects.yaml, and @kubernetes-models/keda 2.0.0, which
        is made from it; the trigger's metadata: keda.sh/docs/2.22/scalers/prometheus.
    PodMonitor: prometheus-operator 0.91.0, example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml, and
        @kubernetes-models/prometheus-operator 6.0.0, which is made from it.
    ServingRuntime, InferenceService: the Python package kserve 0.21.0, made from the same Go types as the CRDs:
        v1alpha1_serving_runtime_spec.py, v1beta1_predictor_spec.py, v1beta1_model_spec.py, v1beta1_auto_scaling_spec.py
        in kserve/models, and those that they name. The annotations: kserve.github.io, "Autoscaling with KEDA".
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

TEXTS: Final = "texts"  # a map from any name to a text
CORE: Final = "core"  # of a kind that Kubernetes itself has: validated as part of a Pod or a HorizontalPodAutoscaler
_Field = type[str] | type[int] | frozenset[str] | Literal["texts", "core"]

_METADATA: Mapping[str, _Field] = {
    "apiVersion": str,
    "kind": str,
    "metadata.name": str,
    "metadata.namespace": str,
    "metadata.labels": TEXTS,
}
FIELDS: Mapping[tuple[str, str], Mapping[str, _Field]] = {
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "spec.scaleTargetRef.name": str,
        "spec.minReplicaCount": int,
        "spec.maxReplicaCount": int,
        "spec.triggers[].type": frozenset({"prometheus"}),  # other triggers have other metadata
        "spec.triggers[].name": str,
        "spec.triggers[].metadata.serverAddress": str,
        "spec.triggers[].metadata.query": str,
        "spec.triggers[].metadata.threshold": str,
        "spec.triggers[].metadata.ignoreNullValues": frozenset({"true", "false"}),
        "spec.advanced.horizontalPodAutoscalerConfig.behavior": CORE,
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "spec.selector.matchLabels": TEXTS,
        "spec.jobLabel": str,
        "spec.podMetricsEndpoints[].port": str,
        "spec.podMetricsEndpoints[].path": str,
        "spec.podMetricsEndpoints[].interval": str,
    },
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): {
        "spec.supportedModelFormats[].name": str,
        "spec.protocolVersions[]": str,
        "spec.labels": TEXTS,
        "spec.containers": CORE,
        "spec.volumes": CORE,
    },
    ("serving.kserve.io/v1beta1", "InferenceService"): {
        "metadata.annotations.serving.kserve.io/deploymentMode": frozenset({"Standard", "RawDeployment"}),
        "metadata.annotations.serving.kserve.io/autoscalerClass": frozenset({"keda", "none"}),
        "spec.predictor.minReplicas": int,
        "spec.predictor.maxReplicas": int,
        "spec.predictor.autoScaling.metrics[].type": frozenset({"External"}),
        "spec.predictor.autoScaling.metrics[].external.metric.backend": frozenset({"prometheus"}),
        "spec.predictor.autoScaling.metrics[].external.metric.serverAddress": str,
        "spec.predictor.autoScaling.metrics[].external.metric.query": str,
        "spec.predictor.autoScaling.metrics[].external.target.type": frozenset({"Value"}),
        "spec.predictor.autoScaling.metrics[].external.target.value": str,
        "spec.predictor.serviceAccountName": CORE,
        "spec.predictor.enableServiceLinks": CORE,
        "spec.predictor.terminationGracePeriodSeconds": CORE,
        "spec.predictor.securityContext": CORE,
        "spec.predictor.model.runtime": str,
        "spec.predictor.model.modelFormat.name": str,
        "spec.predictor.model.protocolVersion": str,
        "spec.predictor.model.args": CORE,
        "spec.predictor.model.resources": CORE,
    },
}


def strange(each: Mapping[str, Any]) -> list[str]:
    """What its project's CRD does not have, or has as another type: a line each.

    Raises:
        KeyError: nothing is known of resources of this kind and version.
    """
    fields = {**_METADATA, **FIELDS[each["apiVersion"], each["kind"]]}
    return [*_strange(each, "", fields)]


def _strange(value: Any, path: str, fields: Mapping[str, _Field]) -> Iterator[str]:
    field = fields.get(path)
    if field is not None:
        if not _fits(value, field):
            yield f"{path}: {value!r} is not of {field}"
    elif not any(known.startswith((f"{path}.", f"{path}[]")) for known in fields) and path:
        yield f"{path}: there is no such field"
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _strange(part, f"{path}.{key}".removeprefix("."), fields)
    elif isinstance(value, list):
        for part in value:
            yield from _strange(part, f"{path}[]", fields)
    else:
        yield f"{path}: {value!r} has parts in the CRD"


def _fits(value: Any, field: _Field) -> bool:
    if field == CORE:
        return True
    if field == TEXTS:
        return isinstance(value, Mapping) and all(isinstance(part, str) for part in value.values())
    if isinstance(field, frozenset):
        return value in field
    return type(value) is field
