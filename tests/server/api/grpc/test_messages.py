"""The messages against those that NVIDIA's client has."""

from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2

from server.api.grpc.messages import message_class

# By name, and the name of the client's message
MESSAGES = {
    **{name: name for name in ("ModelInferRequest", "ModelInferResponse", "ModelConfigResponse")},
    **{name: name for name in ("ModelMetadataResponse", "ModelStatisticsResponse", "RepositoryIndexRequest")},
    **{name: name for name in ("RepositoryIndexResponse", "ServerMetadataResponse", "ServerLiveResponse")},
    **{name: name for name in ("ServerReadyResponse", "ModelReadyResponse")},
    "ModelRequest": "ModelStatisticsRequest",
    "RepositoryModelRequest": "RepositoryModelLoadRequest",
}


def assert_same_fields(ours: Any, theirs: Any) -> None:
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), field
        if field.message_type is not None:
            assert_same_fields(field.message_type, other.message_type)
        if field.enum_type is not None:
            numbers = [{value.name: value.number for value in each.enum_type.values} for each in (field, other)]
            assert numbers[0] == numbers[1]


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_has_the_number_and_the_type_of_the_protocol(name: str) -> None:
    theirs = getattr(service_pb2, MESSAGES[name]).DESCRIPTOR
    assert_same_fields(message_class(name).DESCRIPTOR, theirs)


@pytest.mark.parametrize("method", ["ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"])
def test_one_message_stands_for_those_with_equal_fields(method: str) -> None:
    sent = getattr(service_pb2, f"{method}Request")(name="m", version="2").SerializeToString()
    received = message_class("ModelRequest").FromString(sent)
    assert (received.name, received.version) == ("m", "2")


def test_a_parameter_has_one_value() -> None:
    parameter = message_class("InferParameter")(int64_param=1)
    parameter.string_param = "a"
    assert parameter.WhichOneof("parameter_choice") == "string_param"
    assert MessageToDict(parameter, preserving_proto_field_name=True) == {"string_param": "a"}
