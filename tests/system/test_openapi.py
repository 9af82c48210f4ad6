"""The OpenAPI document agrees with the running server; benchmarks/fuzz.py is the long run."""

import inspect
import re
from types import SimpleNamespace
from typing import cast

from starlette.routing import Route

import server.api.admin
import server.app.application
from benchmarks.routes import check_routes
from benchmarks.serving import serving
from server.api.inference import Inference
from server.api.open_inference.routes import Documents, Infer, open_inference_routes
from server.api.openapi_document import api_document
from server.api.predict import Predict, predict_routes


def documented() -> set[tuple[str, str]]:
    paths = api_document(["googlenet"], "1").get("paths", {})
    return {(method, path) for path, operations in paths.items() for method in operations}


def test_the_document_lists_exactly_the_existing_routes() -> None:
    unused = cast(Inference, SimpleNamespace(models={}))
    listed = [*open_inference_routes(Infer(unused), Documents(unused, "1")), *predict_routes(Predict(unused))]
    routes = [route for route in listed if type(route) is Route]
    methods = {(method.lower(), route.path) for route in routes for method in (route.methods or ()) if method != "HEAD"}
    source = "".join(map(inspect.getsource, (server.app.application, server.api.admin)))
    assert documented() == methods | set(re.findall(r'@app\.(get|post|put|delete|patch)\("([^"]+)"', source))


def test_responses_to_generated_calls_conform_to_the_document() -> None:
    with serving("googlenet", "--device", "emulated:googlenet-tesla-p4", "--policy", "greedy") as running:
        tally = check_routes(running.url, 40)
    assert tally.complaints == []
    answered = {key.rpartition(":")[0] for key in tally.statuses if key.endswith(": 200")}
    assert answered == {f"{method.upper()} {path}" for method, path in documented()}, (
        "each route succeeded at least once"
    )
