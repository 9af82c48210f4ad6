"""The messages of inference.GRPCInferenceService that this server reads and writes.

They are in a descriptor pool of their own, made at import: generated code would be tied to one major version of
protobuf, and could not be imported beside tritonclient's, which defines messages of the same names. Messages with equal
fields are one here, and fields that the server neither reads nor writes are left out: neither is visible to a client.
"""

import re
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "inference"
_DATA_TYPES = (  # numbered from 0
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)
_ONE_OF = {"InferParameter", "ModelRepositoryParameter"}  # of whose fields one is set
_MESSAGES = {
    "ModelRequest": "string name = 1; string version = 2",  # of ModelReady, -Metadata, -Config and -Statistics
    "ServerLiveResponse": "bool live = 1",
    "ServerReadyResponse": "bool ready = 1",
    "ModelReadyResponse": "bool ready = 1",
    "ServerMetadataResponse": "string name = 1; string version = 2; repeated string extensions = 3",
    "ModelMetadataResponse": "string name = 1; repeated string versions = 2; string platform = 3; "
    "repeated TensorMetadata inputs = 4; repeated TensorMetadata outputs = 5",
    "TensorMetadata": "string name = 1; string datatype = 2; repeated int64 shape = 3",
    "InferParameter": "bool bool_param = 1; int64 int64_param = 2; string string_param = 3; double double_param = 4; "
    "uint64 uint64_param = 5",
    "InferTensorContents": "repeated bool bool_contents = 1; repeated int32 int_contents = 2; "
    "repeated int64 int64_contents = 3; repeated uint32 uint_contents = 4; repeated uint64 uint64_contents = 5; "
    "repeated float fp32_contents = 6; repeated double fp64_contents = 7; repeated bytes bytes_contents = 8",
    "ModelInferRequest": "string model_name = 1; string model_version = 2; string id = 3; "
    "map<string, InferParameter> parameters = 4; repeated InferInputTensor inputs = 5; "
    "repeated InferRequestedOutputTensor outputs = 6; repeated bytes raw_input_contents = 7",
    "InferInputTensor": "string name = 1; string datatype = 2; repeated int64 shape = 3; "
    "map<string, InferParameter> parameters = 4; InferTensorContents contents = 5",
    "InferRequestedOutputTensor": "string name = 1; map<string, InferParameter> parameters = 2",
    "ModelInferResponse": "string model_name = 1; string model_version = 2; string id = 3; "
    "map<string, InferParameter> parameters = 4; repeated InferOutputTensor outputs = 5; "
    "repeated bytes raw_output_contents = 6",
    "InferOutputTensor": "string name = 1; string datatype = 2; repeated int64 shape = 3",
    "ModelConfigResponse": "ModelConfig config = 1",
    "ModelConfig": "string name = 1; string platform = 2; int32 max_batch_size = 4; repeated ModelInput input = 5; "
    "repeated ModelOutput output = 6; ModelDynamicBatching dynamic_batching = 11; string backend = 17; "
    "ModelTransactionPolicy model_transaction_policy = 19; ModelResponseCache response_cache = 24",
    "ModelInput": "string name = 1; DataType data_type = 2; repeated int64 dims = 4; bool optional = 8",
    "ModelOutput": "string name = 1; DataType data_type = 2; repeated int64 dims = 3",
    "ModelDynamicBatching": "",
    "ModelTransactionPolicy": "bool decoupled = 1",
    "ModelResponseCache": "bool enable = 1",
    "ModelStatisticsResponse": "repeated ModelStatistics model_stats = 1",
    "ModelStatistics": "string name = 1; string version = 2; uint64 last_inference = 3; uint64 inference_count = 4; "
    "uint64 execution_count = 5; InferStatistics inference_stats = 6; repeated InferBatchStatistics batch_stats = 7",
    "InferStatistics": "StatisticDuration success = 1; StatisticDuration fail = 2; StatisticDuration queue = 3; "
    "StatisticDuration compute_input = 4; StatisticDuration compute_infer = 5; StatisticDuration compute_output = 6; "
    "StatisticDuration cache_hit = 7; StatisticDuration cache_miss = 8",
    "InferBatchStatistics": "uint64 batch_size = 1; StatisticDuration compute_input = 2; "
    "StatisticDuration compute_infer = 3; StatisticDuration compute_output = 4",
    "StatisticDuration": "uint64 count = 1; uint64 ns = 2",
    "RepositoryIndexRequest": "string repository_name = 1; bool ready = 2",
    "RepositoryIndexResponse": "repeated ModelIndex models = 1",
    "ModelIndex": "string name = 1; string version = 2; string state = 3; string reason = 4",
    "RepositoryModelRequest": "string repository_name = 1; string model_name = 2; "  # of RepositoryModelLoad, -Unload
    "map<string, ModelRepositoryParameter> parameters = 3",
    "ModelRepositoryParameter": "bool bool_param = 1; int64 int64_param = 2; string string_param = 3; "
    "bytes bytes_param = 4",
    "RepositoryModelResponse": "",
    # of grpc.health.v1, whose status is an enumeration: a number, too
    "HealthCheckRequest": "string service = 1",
    "HealthCheckResponse": "int32 status = 1",
}
_FIELD = re.compile(r"(repeated |map<string, )?(\w+)>? (\w+) = (\d+)")


def message_class(name: str) -> Any:
    """The class of a message."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="batchwright/open_inference.proto", package=_PACKAGE, syntax="proto3")
    numbered = enumerate(_DATA_TYPES)
    values = [{"name": f"TYPE_{name}", "number": number} for number, name in numbered]
    file.enum_type.append(EnumDescriptorProto(name="DataType", value=values))
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _ONE_OF:
            message.oneof_decl.add(name="parameter_choice")
        for field in filter(None, fields.split("; ")):
            _add_field(message, field, name in _ONE_OF)
    return file


def _add_field(message: DescriptorProto, text: str, is_choice: bool) -> None:
    """Add a field that is written as in a .proto file."""
    match = _FIELD.fullmatch(text)
    assert match is not None, text
    label, kind, name, number = match.groups()
    field = message.field.add(name=name, number=int(number), label=FieldDescriptorProto.LABEL_REPEATED)
    if label is None:
        field.label = FieldDescriptorProto.LABEL_OPTIONAL
    if is_choice:
        field.oneof_index = 0
    if label is not None and label.startswith("map"):
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "string key = 1", False)
        _add_field(entry, f"{kind} value = 2", False)
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
    elif kind in _MESSAGES:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    elif kind == "DataType":
        field.type, field.type_name = FieldDescriptorProto.TYPE_ENUM, f".{_PACKAGE}.{kind}"
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")


_POOL = DescriptorPool()
_POOL.AddSerializedFile(_file().SerializeToString())
