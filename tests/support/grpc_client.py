"""Calls of inference.GRPCInferenceService, and servers that have it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from server.api.grpc.messages import message_class
from tests.support.logged_server import LoggedServer, logged_server

SERVICE = "/inference.GRPCInferenceService/"
Metadata = Sequence[tuple[str, str]]


@contextmanager
def grpc_server(folder: Path, *arguments: str) -> Iterator[tuple[LoggedServer, str]]:
    """Run serve-model with gRPC on a free port; return the server and the address of gRPC."""
    with logged_server(folder, *arguments, "--grpc-port", "0") as server:
        yield server, server.logged("gRPC on")[0]["event"].split()[2]


def infer_request(model: str, **inputs: NDArray[Any]) -> bytes:
    """The message of a call with uint8 or float32 arrays by input name, in raw contents."""
    request = message_class("ModelInferRequest")(model_name=model)
    for name, array in inputs.items():
        datatype = {"uint8": "UINT8", "float32": "FP32"}[array.dtype.name]
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    message: bytes = request.SerializeToString()
    return message


def infer_response(message: bytes) -> NDArray[np.float32]:
    """The first output of a response, which is FP32."""
    response = message_class("ModelInferResponse").FromString(message)
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)


def call(
    channel: grpc.Channel, method: str, message: bytes = b"", metadata: Metadata = (), timeout: float | None = None
) -> tuple[grpc.StatusCode, str, dict[str, str], bytes]:
    """Make a call; return its status, the text of its error, its trailing metadata and its response."""
    made = channel.unary_unary(f"{SERVICE}{method}").future(message, metadata=metadata, timeout=timeout)
    error = made.exception()
    trailing = dict(made.trailing_metadata() or ())
    return made.code(), made.details() or "", trailing, b"" if error is not None else made.result()
