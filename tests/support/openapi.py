"""The OpenAPI document of the HTTP interface, without a running server."""

from types import SimpleNamespace
from typing import Any

from server.api.inference import Inference
from server.app.application import create_fastapi
from server.models.images.codec import emulated_model


def openapi_document() -> dict[str, Any]:
    """The document of a server with one model, googlenet."""
    parts: Any = SimpleNamespace(run=None, history=None)
    inference = Inference({"googlenet": emulated_model("googlenet", 8)}, parts, parts, parts, 1, parts)
    document: dict[str, Any] = create_fastapi(inference, "0", parts, {}).openapi()
    return document
