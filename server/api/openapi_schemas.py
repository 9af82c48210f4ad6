"""The schemas of the OpenAPI document: the keys and types of each JSON body."""

from collections.abc import Mapping
from typing import Any

_Json = dict[str, Any]

_TEXT: _Json = {"type": "string"}
_NUMBER: _Json = {"type": "number"}
_FLAG: _Json = {"type": "boolean"}
_FREE: _Json = {"type": "object"}
_COUNT: _Json = {"type": "integer", "minimum": 0}
_MAYBE: _Json = {"type": ["number", "null"]}
_SHAPE: _Json = {"type": "array", "items": {"type": "integer"}}


def reference(name: str) -> _Json:
    """Return a reference to a named schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def array_of(name: str) -> _Json:
    """Return the schema of an array of a named schema."""
    return {"type": "array", "items": reference(name)}


def _texts() -> _Json:
    return {"type": "array", "items": _TEXT}


def _object(optional: Mapping[str, _Json] | None = None, /, **required: _Json) -> _Json:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": [*required], "properties": properties, "additionalProperties": False}


_SERVED = {
    "batch_size": {"type": "integer", "minimum": 1},
    "waiting_ms": _NUMBER,
    "service_ms": _NUMBER,
    "energy_mj": _MAYBE,
    "energy_source": _TEXT,
}
_DURATIONS = ("compute_input", "compute_infer", "compute_output")
_COMPUTE = {name: reference("Duration") for name in _DURATIONS}
_CALLS = {name: reference("Duration") for name in ("success", "fail", "queue", *_DURATIONS, "cache_hit", "cache_miss")}
_SIZE = _object({"binary_data_size": _COUNT})
_ASKED = {"binary_data": _FLAG, "classification": _COUNT}
_NAMED = {"name": _TEXT, "datatype": _TEXT, "shape": _SHAPE}
_FIELD = _object({"optional": _FLAG}, name=_TEXT, data_type=_TEXT, dims=_SHAPE)
_LENGTH = {"max_new_tokens": _COUNT, "ignore_eos": _FLAG}

INFER_HEADERS: Mapping[str, _Json] = {
    "Inference-Header-Content-Length": {
        "description": "Bytes of JSON before the binary tensors; absent if all outputs are JSON",
        "schema": _COUNT,
    }
}

SCHEMAS: Mapping[str, _Json] = {
    "Error": _object(error=_TEXT),
    "Live": _object(live=_FLAG),
    "Ready": _object(ready=_FLAG),
    "ModelReady": _object(name=_TEXT, ready=_FLAG),
    "Class": _object(class_index=_COUNT, label=_TEXT, probability={"type": "number", "minimum": 0, "maximum": 1}),
    "Prediction": _object(model=_TEXT, predictions=array_of("Class"), **_SERVED),
    "TextCall": {
        "type": "object",
        "required": ["text"],
        "properties": {"text": _TEXT, **_LENGTH},
        "additionalProperties": False,
    },
    "Generation": _object(model=_TEXT, text=_TEXT, new_tokens=_COUNT, **_SERVED),
    "PolicyChange": _object(policy=_TEXT | {"examples": ["greedy", "smdp:w2=1.6", "timeout:20"]}),
    "DeviceChange": _object(serving=_FLAG),
    "DeviceModel": _object(
        policy=_TEXT, profile=_TEXT, queue_length=_COUNT, arrival_rate_hz=_NUMBER, capacity_hz=_NUMBER
    ),
    "Device": _object(
        device=_TEXT,
        serving=_FLAG,
        up=_FLAG,
        open_calls=_COUNT,
        models={"type": "object", "additionalProperties": reference("DeviceModel")},
    ),
    "PolicyRow": _object(arrival_rate_hz=_NUMBER, load=_NUMBER, batch_size={"type": "array", "items": _COUNT}),
    "Policy": _object(
        {"devices": {"type": "object", "additionalProperties": reference("Policy")}},
        name=_TEXT,
        spec=_TEXT,
        parameters=_FREE,
        profile=_TEXT,
        rows=array_of("PolicyRow"),
        expected_response_time_ms=_MAYBE,
        expected_power_w=_MAYBE,
        arrival_rate_hz=_NUMBER,
    ),
    "ServerMetadata": _object(name=_TEXT, version=_TEXT, extensions=_texts()),
    "TensorMetadata": _object(**_NAMED),
    "ModelMetadata": _object(
        name=_TEXT,
        versions=_texts(),
        platform=_TEXT,
        inputs=array_of("TensorMetadata"),
        outputs=array_of("TensorMetadata"),
        parameters=_FREE,
    ),
    "ModelConfig": _object(
        name=_TEXT,
        platform=_TEXT,
        backend=_TEXT,
        max_batch_size=_COUNT,
        input={"type": "array", "items": _FIELD},
        output={"type": "array", "items": _FIELD},
        dynamic_batching=_FREE,
        model_transaction_policy=_object(decoupled=_FLAG),
        response_cache=_object(enable=_FLAG),
    ),
    "IndexEntry": _object(name=_TEXT, version=_TEXT, state={"enum": ["READY", "UNAVAILABLE"]}, reason=_TEXT),
    "Duration": _object(count=_COUNT, ns=_COUNT),
    "BatchStatistics": _object(batch_size=_COUNT, **_COMPUTE),
    "ModelStatistics": _object(
        name=_TEXT,
        version=_TEXT,
        last_inference=_COUNT,
        inference_count=_COUNT,
        execution_count=_COUNT,
        inference_stats=_object(**_CALLS),
        response_stats=_FREE,
        batch_stats=array_of("BatchStatistics"),
        memory_usage={"type": "array"},
    ),
    "Statistics": _object(model_stats=array_of("ModelStatistics")),
    "InputTensor": {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"enum": ["image", "input_ids", "max_new_tokens"]},
            "shape": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "datatype": {"enum": ["UINT8", "BYTES", "INT64", "INT32"]},
            "parameters": {"type": "object", "properties": {"binary_data_size": _COUNT}},
            "data": {"type": "array"},
        },
    },
    "AskedOutput": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"enum": ["logits", "output_ids"]},
            "parameters": {"type": "object", "properties": _ASKED},
        },
    },
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": _TEXT,
            "parameters": {"type": "object", "properties": {"timeout": _COUNT, "binary_data_output": _FLAG, **_LENGTH}},
            "inputs": {"type": "array", "items": reference("InputTensor"), "minItems": 1, "maxItems": 2},
            "outputs": {"type": "array", "items": reference("AskedOutput"), "maxItems": 1},
        },
    },
    "OutputTensor": _object({"data": {"type": "array"}, "parameters": _SIZE}, **_NAMED),
    "InferResponse": _object(
        {"id": _TEXT},
        model_name=_TEXT,
        model_version=_TEXT,
        parameters=_object(**_SERVED),
        outputs=array_of("OutputTensor"),
    ),
}
