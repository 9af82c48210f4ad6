"""The methods of inference.GRPCInferenceService and grpc.health.v1.Health, with the HTTP routes that serve them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from server.api.grpc.http_request import HttpRequest, model_path
from server.api.grpc.infer import parameter_value
from server.api.grpc.messages import message_class
from server.errors import BadInputError

_MAX_MESSAGE = 2**16  # bytes of a message without tensors


class Route(NamedTuple):
    """How a method is served; its message is small.

    Attributes:
        request: class of the message.
        to_http: makes the HTTP request from the message.
        response: class of the response.
        to_fields: makes the fields of the response from the JSON document of the HTTP response.
        takes_message: whether the message is received; one without fields is not.
    """

    request: Any
    to_http: Callable[[Any], HttpRequest]
    response: Any
    to_fields: Callable[[Any], Mapping[str, Any]]
    takes_message: bool = True

    def read(self, message: bytes) -> HttpRequest:
        """The HTTP request of a call.

        Raises:
            BadInputError: the message is malformed or too large.
            NotFoundError: there can be no such model.
        """
        if len(message) > _MAX_MESSAGE:
            raise BadInputError(f"the message has {len(message)} bytes, over {_MAX_MESSAGE}; send the protocol's")
        try:
            return self.to_http(self.request.FromString(message))
        except DecodeError as error:
            raise BadInputError(
                f"the message is no {self.request.DESCRIPTOR.name} and cannot be decoded; send the protocol's"
            ) from error

    def write(self, body: bytes, _: Mapping[bytes, bytes]) -> bytes:
        """The message of a response; what it has no field for is left out."""
        fields = self.to_fields(orjson.loads(body or b"{}"))
        message: bytes = ParseDict(fields, self.response(), ignore_unknown_fields=True).SerializeToString()
        return message


def _get(path: str, response: str) -> Route:
    return _route(_Nothing, lambda _: HttpRequest("GET", path), response)._replace(takes_message=False)


def _of_model(suffix: str = "") -> Callable[[Any], HttpRequest]:
    return lambda message: HttpRequest("GET", model_path(message.name, message.version) + suffix)


def _health(message: Any) -> HttpRequest:
    """Readiness of the server, or of the model with the name of a service."""
    if message.service in ("", "inference.GRPCInferenceService"):
        return HttpRequest("GET", "/v2/health/ready")
    return HttpRequest("GET", f"{model_path(message.service, '')}/ready")


def _statistics(message: Any) -> HttpRequest:
    """Statistics of one model, or of all models without a name."""
    return _of_model("/stats")(message) if message.name else HttpRequest("GET", "/v2/models/stats")


def _index(message: Any) -> HttpRequest:
    return HttpRequest("POST", "/v2/repository/index", body=orjson.dumps({"ready": message.ready}))


def _change(verb: str) -> Callable[[Any], HttpRequest]:
    def to_http(message: Any) -> HttpRequest:
        model_path(message.model_name, "")
        parameters = {name: parameter_value(value) for name, value in message.parameters.items()}
        body = orjson.dumps({"parameters": parameters})
        return HttpRequest("POST", f"/v2/repository/models/{message.model_name}/{verb}", body=body)

    return to_http


def _route(
    request: str,
    to_http: Callable[[Any], HttpRequest],
    response: str,
    to_fields: Callable[[Any], Mapping[str, Any]] = lambda document: document,
) -> Route:
    return Route(message_class(request), to_http, message_class(response), to_fields)


_SERVING, _NOT_SERVING = 1, 2  # grpc.health.v1.HealthCheckResponse.ServingStatus
_Nothing = "RepositoryModelResponse"  # a message without fields
ROUTES = {
    "ServerLive": _get("/v2/health/live", "ServerLiveResponse"),
    "ServerReady": _get("/v2/health/ready", "ServerReadyResponse"),
    "ModelReady": _route("ModelRequest", _of_model("/ready"), "ModelReadyResponse"),
    "ServerMetadata": _get("/v2", "ServerMetadataResponse"),
    "ModelMetadata": _route("ModelRequest", _of_model(), "ModelMetadataResponse"),
    "ModelConfig": _route(
        "ModelRequest", _of_model("/config"), "ModelConfigResponse", lambda document: {"config": document}
    ),
    "ModelStatistics": _route("ModelRequest", _statistics, "ModelStatisticsResponse"),
    "RepositoryIndex": _route(
        "RepositoryIndexRequest", _index, "RepositoryIndexResponse", lambda document: {"models": document}
    ),
    "RepositoryModelLoad": _route("RepositoryModelRequest", _change("load"), _Nothing),
    "RepositoryModelUnload": _route("RepositoryModelRequest", _change("unload"), _Nothing),
}
HEALTH_ROUTES = {  # Watch is not served: its clients take UNIMPLEMENTED for healthy
    "Check": _route(
        "HealthCheckRequest",
        _health,
        "HealthCheckResponse",
        lambda document: {"status": _SERVING if document.get("ready") else _NOT_SERVING},
    ),
}
