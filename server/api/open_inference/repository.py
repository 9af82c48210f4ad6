"""The model repository extension of the Open Inference Protocol: list the models, load them again, unload them."""

from collections.abc import Sequence
from typing import Literal, Protocol

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from server.api import schemas
from server.api.open_inference.documents import parse_index_request, repository_index
from server.api.openapi import KEYED_ERRORS, MODEL, MODEL_ERRORS, documented, json_content
from server.errors import BadInputError, quote
from server.json_body import parse_object
from server.transport.memory_budget import MemoryBudget
from server.transport.request import BodyLimit, RequestContext

_BODY = BodyLimit(1024, "send none")
State = Literal["READY", "LOADING", "UNAVAILABLE"]


class ModelRepository(Protocol):
    """The models that the server's configuration lists."""

    def states(self) -> Sequence[tuple[str, State, str]]:
        """Name and state of each model, and the reason if it is not ready."""
        ...

    async def load(self, model: str) -> None:
        """Load a model from its files as they are now, in place of the one in service.

        Raises:
            NotFoundError: the configuration does not list it.
            SpecError: it cannot be loaded or served; the one in service stays.
            DrainingError: the server is stopping.
        """
        ...

    async def unload(self, model: str) -> None:
        """Reject new calls of a model, and serve the accepted ones.

        Raises:
            NotFoundError: the configuration does not list it.
            DrainingError: the server is stopping.
        """
        ...


def add_repository(app: FastAPI, repository: ModelRepository, budget: MemoryBudget) -> None:
    """Add the routes below /v2/repository."""

    async def read(request: Request) -> bytes:
        context: RequestContext = request.scope["state"]["context"]
        with budget.reservation() as memory:
            return bytes(await context.read_body(_BODY, memory.grow_to))

    async def index(request: Request) -> Response:
        """POST /v2/repository/index: a bare array."""
        entries = repository_index(repository.states(), parse_index_request(await read(request)))
        return Response(orjson.dumps(entries), media_type="application/json")

    async def load(request: Request) -> Response:
        """POST /v2/repository/models/{m}/load."""
        _check_parameters(await read(request))
        await repository.load(request.path_params["model"])
        return Response()

    async def unload(request: Request) -> Response:
        """POST /v2/repository/models/{m}/unload; nothing depends on a model, so there is nothing more to unload."""
        _check_parameters(await read(request), "unload_dependents")
        await repository.unload(request.path_params["model"])
        return Response()

    body = json_content(schemas.IndexRequest)
    listing = documented("The models of the server", list[schemas.IndexEntry], (*KEYED_ERRORS, 413), body=body)
    listing["openapi_extra"]["requestBody"]["required"] = False
    app.post("/v2/repository/index", **listing)(index)
    for verb, endpoint, summary in (
        ("load", load, "Load the model from its files again, while the server serves"),
        ("unload", unload, "Serve the accepted calls of the model, and reject new ones"),
    ):
        errors = (*MODEL_ERRORS, 413, 500, 503)
        body = json_content(schemas.RepositoryRequest)
        route = documented(summary, None, errors, parameters=[MODEL], body=body)
        route["openapi_extra"]["requestBody"]["required"] = False
        app.post(f"/v2/repository/models/{{model}}/{verb}", response_class=Response, **route)(endpoint)


def _check_parameters(body: bytes, *allowed: str) -> None:
    """Check the body of a load or unload call: none, or an object with no other parameters than these booleans.

    Raises:
        BadInputError: there are others.
    """
    document = parse_object(body, "body", "none") if body.strip() else {}
    parameters = document.get("parameters", {})
    if (
        document.keys() - {"parameters"}
        or type(parameters) is not dict
        or any(key not in allowed or type(value) is not bool for key, value in parameters.items())
    ):
        raise BadInputError(f"the body is {quote(document)}; send none, a model is loaded as the server is configured")
