"""The documents that describe server and models, with the keys that clients read."""

import orjson
import pytest

from server.api.open_inference.documents import (
    ModelDescription,
    model_config,
    model_metadata,
    parse_index_request,
    repository_index,
    server_metadata,
    statistics,
)
from server.errors import BadInputError
from server.models.signature import Signature, TensorSpec
from server.telemetry.statistics import BatchStatistics, Duration, ModelStatistics

MODEL = ModelDescription(
    name="resnet50",
    platform="pytorch",
    signature=Signature(
        (TensorSpec("image", {"UINT8": (224, 224, 3), "BYTES": ()}),), (TensorSpec("logits", {"FP32": (1000,)}),)
    ),
    max_batch_size=32,
)


def test_the_server_metadata_lists_the_extensions() -> None:
    document = server_metadata("batchwright", "0.1.0")
    assert (document["name"], document["version"]) == ("batchwright", "0.1.0")
    assert {"classification", "model_repository", "model_configuration"} <= {*document["extensions"]}
    assert "schedule_policy" not in document["extensions"], "no call's priority is read"
    assert {"binary_tensor_data", "parameters", "statistics"} <= {*document["extensions"]}


def test_metadata_shapes_begin_with_the_number_of_samples() -> None:
    assert model_metadata(MODEL) == {
        "name": "resnet50",
        "versions": ["1"],
        "platform": "pytorch",
        "inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, 224, 224, 3]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 1000]}],
    }


def test_the_configuration_has_what_perf_analyzer_reads() -> None:
    config = model_config(MODEL)
    metadata = model_metadata(MODEL)
    assert config["max_batch_size"] == 32
    assert config["dynamic_batching"] == {}
    assert config["response_cache"] == {"enable": False}
    assert config["model_transaction_policy"] == {"decoupled": False}
    assert "sequence_batching" not in config
    assert config["platform"] != "ensemble"
    for section in ("input", "output"):
        names = [tensor["name"] for tensor in config[section]]
        assert names == [tensor["name"] for tensor in metadata[section + "s"]]


def test_the_configuration_leaves_the_number_of_samples_out_of_dims() -> None:
    config = model_config(MODEL)
    assert config["input"] == [{"name": "image", "data_type": "TYPE_UINT8", "dims": [224, 224, 3]}]
    assert config["output"] == [{"name": "logits", "data_type": "TYPE_FP32", "dims": [1000]}]


def test_bytes_are_called_string_in_the_configuration() -> None:
    model = ModelDescription("m", "pytorch", Signature((TensorSpec("text", {"BYTES": ()}),), ()), 1)
    assert model_config(model)["input"] == [{"name": "text", "data_type": "TYPE_STRING", "dims": []}]


@pytest.mark.parametrize(
    ("body", "ready_only"),
    [(b"", False), (b"  ", False), (b"{}", False), (b'{"ready": true}', True), (b'{"ready":false}', False)],
)
def test_the_index_body_may_be_empty(body: bytes, ready_only: bool) -> None:
    assert parse_index_request(body) is ready_only


@pytest.mark.parametrize("body", [b"[]", b"1", b"{", b'{"ready": 1}', b'{"ready": "true"}', b"\xff"])
def test_another_index_body_is_bad_input(body: bytes) -> None:
    with pytest.raises(BadInputError, match="send none or"):
        parse_index_request(body)


def test_the_index_is_a_bare_array_of_states() -> None:
    models = [("resnet50", "READY", ""), ("vit_b_16", "UNAVAILABLE", "unloaded")]
    ready = {"name": "resnet50", "version": "1", "state": "READY", "reason": ""}
    other = {"name": "vit_b_16", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert repository_index(models, ready_only=False) == [ready, other]
    assert repository_index(models, ready_only=True) == [ready]


def test_statistics_of_a_fresh_model_have_every_key() -> None:
    (stats,) = statistics([ModelStatistics("resnet50")])["model_stats"]
    zero = {"count": 0, "ns": 0}
    durations = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    assert stats == {
        "name": "resnet50",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys((*durations, "cache_hit", "cache_miss"), zero),
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def test_statistics_carry_their_numbers_and_batches_by_size() -> None:
    def batch(size: int) -> BatchStatistics:
        return BatchStatistics(size, Duration(2, 10), Duration(2, 1000 * size), Duration(2, 5))

    model = ModelStatistics(
        "resnet50",
        last_inference_ms=1_800_000_000_000,
        inference_count=20,
        execution_count=4,
        success=Duration(18, 7),
        fail=Duration(1, 3),
        queue=Duration(18, 2),
        compute_infer=Duration(4, 20_000),
        batches=(batch(8), batch(2)),
    )
    (stats,) = orjson.loads(orjson.dumps(statistics([model])))["model_stats"]
    assert (stats["last_inference"], stats["inference_count"], stats["execution_count"]) == (1_800_000_000_000, 20, 4)
    assert stats["inference_stats"]["success"] == {"count": 18, "ns": 7}
    assert stats["inference_stats"]["fail"] == {"count": 1, "ns": 3}
    assert stats["inference_stats"]["queue"] == {"count": 18, "ns": 2}
    assert stats["inference_stats"]["compute_infer"] == {"count": 4, "ns": 20_000}
    assert [row["batch_size"] for row in stats["batch_stats"]] == [2, 8]
    assert stats["batch_stats"][1] == {
        "batch_size": 8,
        "compute_input": {"count": 2, "ns": 10},
        "compute_infer": {"count": 2, "ns": 8000},
        "compute_output": {"count": 2, "ns": 5},
    }
