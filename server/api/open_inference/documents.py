"""The documents of Open Inference Protocol v2 that describe server and models, as JSON-ready values.

The C++ clients and perf_analyzer read most keys without checking for them, so every key is present, including those
that do not apply to this server (cache_hit, memory_usage). A version is a numeric string because perf_analyzer parses
it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from server.errors import BadInputError
from server.json_body import parse_object
from server.models.signature import Signature, TensorSpec
from server.telemetry.statistics import BatchStatistics, Duration, ModelStatistics

VERSION = "1"
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The properties of a model that the documents contain.

    Attributes:
        name: The model's name.
        platform: Its framework, such as `pytorch`; never `ensemble`, which perf_analyzer takes for a graph of models.
        signature: Its inputs and outputs.
        max_batch_size: The largest batch.
    """

    name: str
    platform: str
    signature: Signature
    max_batch_size: int


def server_metadata(name: str, version: str) -> dict[str, Any]:
    """The response to GET /v2."""
    return {"name": name, "version": version, "extensions": list(EXTENSIONS)}


def model_metadata(model: ModelDescription) -> dict[str, Any]:
    """The response to GET /v2/models/{m}; shapes begin with -1, the number of samples."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": model.platform,
        "inputs": [_tensor_metadata(each) for each in model.signature.inputs],
        "outputs": [_tensor_metadata(output) for output in model.signature.outputs],
    }


def _tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.sample_shape]}


def model_config(model: ModelDescription) -> dict[str, Any]:
    """The response to GET /v2/models/{m}/config.

    perf_analyzer recognises dynamic batching by `dynamic_batching`; `sequence_batching` must be absent.
    """
    return {
        "name": model.name,
        "platform": model.platform,
        "backend": model.platform,
        "max_batch_size": model.max_batch_size,
        "input": [_tensor_config(each) for each in model.signature.inputs],
        "output": [_tensor_config(output) for output in model.signature.outputs],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": False},
        "response_cache": {"enable": False},
    }


def _tensor_config(spec: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(spec.sample_shape)}


def parse_index_request(body: bytes) -> bool:
    """Return `ready` of the body of POST /v2/repository/index, which is empty or an object.

    Raises:
        BadInputError: The body is neither, or `ready` is not a boolean.
    """
    if not body.strip():
        return False
    document = parse_object(body, "body", 'none or {"ready": true}')
    if type(document.get("ready", False)) is not bool:
        raise BadInputError('the body is not an object with a boolean `ready`; send none or {"ready": true}')
    return bool(document.get("ready", False))


def repository_index(models: Iterable[tuple[str, str, str]], ready_only: bool) -> list[dict[str, Any]]:
    """The response to POST /v2/repository/index: a bare array.

    Args:
        models: Name, state and reason of each; the state is READY, LOADING or UNAVAILABLE.
        ready_only: Leave out those that are not READY.
    """
    return [
        {"name": name, "version": VERSION, "state": state, "reason": reason}
        for name, state, reason in models
        if state == "READY" or not ready_only
    ]


def statistics(models: Iterable[ModelStatistics]) -> dict[str, Any]:
    """The response to GET /v2/models/stats and /v2/models/{m}/stats."""
    return {"model_stats": [_model_statistics(model) for model in models]}


def _model_statistics(model: ModelStatistics) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": VERSION,
        "last_inference": model.last_inference_ms,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": {
            "success": _duration(model.success),
            "fail": _duration(model.fail),
            "queue": _duration(model.queue),
            **_compute(model),
            "cache_hit": _duration(Duration()),
            "cache_miss": _duration(Duration()),
        },
        "response_stats": {},
        "batch_stats": [
            {"batch_size": batch.batch_size, **_compute(batch)}
            for batch in sorted(model.batches, key=lambda batch: batch.batch_size)
        ],
        "memory_usage": [],
    }


def _compute(measured: ModelStatistics | BatchStatistics) -> dict[str, Any]:
    return {
        "compute_input": _duration(measured.compute_input),
        "compute_infer": _duration(measured.compute_infer),
        "compute_output": _duration(measured.compute_output),
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
