"""JSON bodies of the HTTP interface, as pydantic models from which FastAPI generates the OpenAPI document."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.models.signature import DTYPES

Count = Annotated[int, Field(ge=0)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Error(_Body):
    error: str


class Live(_Body):
    live: bool


class Ready(_Body):
    ready: bool


class ModelReady(_Body):
    name: str
    ready: bool


class Step(_Body):
    model: str
    batch_size: Count
    waiting_ms: float
    service_ms: float
    energy_mj: float | None


class _Served(_Body):
    batch_size: Count
    waiting_ms: float
    service_ms: float
    energy_mj: float | None
    energy_source: str
    cpu_ms: float | None = None
    steps: list[Step] | str | None = None  # of a pipeline; text in a parameter of the Open Inference Protocol


class Class(_Body):
    class_index: Count
    label: str
    probability: Annotated[float, Field(ge=0, le=1)]


class Prediction(_Served):
    model: str
    predictions: list[Class]


class Outputs(_Served):
    model: str
    outputs: Any


class TensorCall(_Body):
    inputs: dict[str, Any] | list[dict[str, Any]]


class Usage(_Body):
    prompt_tokens: int
    total_tokens: int


class Embedding(_Body):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class TextErrorDetail(_Body):
    message: str
    type: str
    param: None
    code: str | None


class TextError(_Body):
    error: TextErrorDetail | str


class Embeddings(_Body):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Rank(_Body):
    index: int
    score: float
    text: str | None = None


class Ranking(_Body):
    id: str
    model: str
    results: list[dict[str, Any]]
    usage: dict[str, int]


class ListedModel(_Body):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: Literal["batchwright"] = "batchwright"


class ModelList(_Body):
    object: Literal["list"] = "list"
    data: list[ListedModel]


class PolicyChange(_Body):
    policy: str = Field(max_length=1000, examples=["greedy", "smdp:w2=1.6", "timeout:20"])


class DeviceChange(_Body):
    model_config = ConfigDict(extra="forbid", strict=True)

    serving: bool


class DeviceModel(_Body):
    policy: str
    profile: str
    queue_length: Count
    oldest_age_ms: float
    arrival_rate_hz: float
    slowdown: float
    capacity_hz: float
    pid: int | None = None
    restarts: Count = 0
    last_fault: str | None = None


class Device(_Body):
    device: str
    serving: bool
    up: bool
    open_calls: Count
    models: dict[str, DeviceModel]


class PipelineStep(_Body):
    model: str
    requests: float | None
    queue_length: Count


class PipelineProcess(_Body):
    pid: int | None
    restarts: Count
    last_fault: str | None


class Pipeline(_Body):
    name: str
    open_calls: Count
    steps: list[PipelineStep]
    processes: list[PipelineProcess]


class PolicyMix(_Body):
    probability: float
    batch_size: list[Count] = []
    max_age_ms: list[float] = []


class PolicyRow(_Body):
    arrival_rate_hz: float
    load: float
    batch_size: list[Count] = []
    max_age_ms: list[float] = []
    max_batch_size: int | None = None
    mix: PolicyMix | None = None
    share_within: list[float] = []
    power_lower_bound_w: float | None = None
    resource_lower_bound: float | None = None


class Policy(_Body):
    name: str
    spec: str
    parameters: dict[str, Any]
    profile: str
    rows: list[PolicyRow]
    expected_response_time_ms: float | None
    expected_power_w: float | None
    resource: str
    resource_unit: str
    expected_resource: float | None
    arrival_rate_hz: float
    objective_ms: float | None
    age_margin_ms: float
    solved_for_sizes: int
    warnings: list[str]
    devices: dict[str, "Policy"] = {}


class ServerMetadata(_Body):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(_Body):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(_Body):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, Any]


class ConfiguredTensor(_Body):
    name: str
    data_type: str
    dims: list[int]


class TransactionPolicy(_Body):
    decoupled: bool


class ResponseCache(_Body):
    enable: bool


class ModelConfig(_Body):
    name: str
    platform: str
    backend: str
    max_batch_size: Count
    input: list[ConfiguredTensor]
    output: list[ConfiguredTensor]
    dynamic_batching: dict[str, Any]
    model_transaction_policy: TransactionPolicy
    response_cache: ResponseCache


class IndexRequest(BaseModel):
    ready: bool = False


class RepositoryParameters(BaseModel):
    unload_dependents: bool = False


class RepositoryRequest(BaseModel):
    parameters: RepositoryParameters = RepositoryParameters()


class IndexEntry(_Body):
    name: str
    version: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str


class Duration(_Body):
    count: Count
    ns: Count


class InferStatistics(_Body):
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchStatistics(_Body):
    batch_size: Count
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ModelStatistics(_Body):
    name: str
    version: str
    last_inference: Count
    inference_count: Count
    execution_count: Count
    inference_stats: InferStatistics
    response_stats: dict[str, Any]
    batch_stats: list[BatchStatistics]
    memory_usage: list[Any]


class Statistics(_Body):
    model_stats: list[ModelStatistics]


class _Binary(BaseModel):
    binary_data_size: Count = 0


class InputTensor(BaseModel):
    name: str
    shape: Annotated[list[int], Field(min_length=1)]
    datatype: Annotated[str, Field(json_schema_extra={"enum": [*DTYPES]})]
    parameters: _Binary = _Binary()
    data: list[Any] = []


class OutputParameters(BaseModel):
    binary_data: bool = False
    classification: Count = 0


class RequestedOutput(BaseModel):
    name: str
    parameters: OutputParameters = OutputParameters()


class InferParameters(BaseModel):
    timeout: Count = 0
    binary_data_output: bool = False


class InferRequest(BaseModel):
    id: str = ""
    parameters: InferParameters = InferParameters()
    inputs: Annotated[list[InputTensor], Field(min_length=1)]
    outputs: list[RequestedOutput] = []


class BinarySize(_Body):
    binary_data_size: Count


class OutputTensor(_Body):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any] = []
    parameters: BinarySize | None = None


class InferResponse(_Body):
    model_name: str
    model_version: str
    parameters: _Served
    outputs: list[OutputTensor]
    id: str = ""
