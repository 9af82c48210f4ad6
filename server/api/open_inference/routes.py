"""The routes of the Open Inference Protocol v2: descriptions of the server and its models, and their documentation."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.api import schemas
from server.api.inference import Inference
from server.api.open_inference.documents import (
    VERSION,
    ModelDescription,
    model_config,
    model_metadata,
    server_metadata,
    statistics,
)
from server.api.open_inference.infer import version_error
from server.api.openapi import (
    BINARY,
    INFERENCE_ERRORS,
    JSON_LENGTH,
    KEYED_ERRORS,
    MODEL,
    MODEL_ERRORS,
    TIMEOUT,
    VERSION_PARAMETER,
    documented,
    json_content,
    route_outside_fastapi,
)
from server.models.model import ServedModel


def model_description(model: ServedModel) -> ModelDescription:
    """The model as the protocol's documents describe it."""
    return ModelDescription(
        name=model.name,
        platform=model.platform,
        signature=model.signature,
        max_batch_size=model.max_batch_size,
    )


def _check_version(version: str | None) -> None:
    if version not in (None, VERSION):
        raise version_error(version)


class DescriptionRoutes:
    """The endpoints that describe the server and its models."""

    def __init__(self, inference: Inference, version: str) -> None:
        """`version` is that of the server."""
        self._inference = inference
        self._version = version

    def _model(self, request: Request) -> ServedModel:
        _check_version(request.path_params.get("version"))
        return self._inference.model(request.path_params["model"])

    async def server(self, _: Request) -> Response:
        """GET /v2."""
        return JSONResponse(server_metadata("batchwright", self._version))

    async def metadata(self, request: Request) -> Response:
        """GET /v2/models/{m}; the parameters are the origin of the weights and what limits the inputs."""
        model = self._model(request)
        parameters = {"weights": model.weights, **model.codec.metadata_parameters()}
        return JSONResponse(model_metadata(model_description(model)) | {"parameters": parameters})

    async def config(self, request: Request) -> Response:
        """GET /v2/models/{m}/config."""
        return JSONResponse(model_config(model_description(self._model(request))))

    async def ready(self, request: Request) -> Response:
        """GET /v2/models/{m}/ready."""
        model = self._model(request)
        ready = self._inference.is_ready(model.name)
        return JSONResponse({"name": model.name, "ready": ready}, 200 if ready else 503)

    async def model_statistics(self, request: Request) -> Response:
        """GET /v2/models/{m}/stats."""
        model = self._model(request)
        return JSONResponse(statistics([self._inference.metrics.statistics.of(model.name)]))

    async def all_statistics(self, _: Request) -> Response:
        """GET /v2/models/stats."""
        return JSONResponse(statistics(self._inference.metrics.statistics.of(name) for name in self._inference.names))


def add_open_inference(app: FastAPI, routes: DescriptionRoutes) -> None:
    """Add the routes of the protocol."""
    model_routes = {
        "": (routes.metadata, "The model's inputs and outputs", schemas.ModelMetadata),
        "/ready": (routes.ready, "Whether the model is ready", schemas.ModelReady),
        "/config": (routes.config, "The model's configuration", schemas.ModelConfig),
        "/stats": (routes.model_statistics, "The model's statistics", schemas.Statistics),
    }
    server_route = documented("The server and its extensions", schemas.ServerMetadata, KEYED_ERRORS)
    app.get("/v2", **server_route)(routes.server)
    statistics_route = documented("Statistics of all models", schemas.Statistics, KEYED_ERRORS)
    app.get("/v2/models/stats", **statistics_route)(routes.all_statistics)
    for base, parameters in (
        ("/v2/models/{model}", [MODEL]),
        ("/v2/models/{model}/versions/{version}", [MODEL, VERSION_PARAMETER]),
    ):
        for path, (endpoint, summary, response) in model_routes.items():
            route = documented(summary, response, MODEL_ERRORS, parameters=parameters)
            if path == "/ready":
                route["responses"][503] = {"model": response, "description": "The model is not ready"}
            app.get(f"{base}{path}", **route)(endpoint)
        app.post(
            f"{base}/infer",
            **documented(
                "Infer",
                schemas.InferResponse,
                INFERENCE_ERRORS,
                parameters=[*parameters, JSON_LENGTH, TIMEOUT],
                body=json_content(schemas.InferRequest) | {"application/octet-stream": BINARY},
                content={"application/octet-stream": BINARY},
            ),
        )(route_outside_fastapi)
