"""The OpenAPI document agrees with the running server; benchmarks/fuzz.py is the long run."""

from benchmarks.support.harness import serving
from benchmarks.support.openapi_fuzzing import check_routes
from tests.support.openapi import openapi_document


def documented() -> set[tuple[str, str]]:
    return {(method, path) for path, operations in openapi_document()["paths"].items() for method in operations}


def test_the_document_lists_every_route_of_the_contract() -> None:
    of_model = ["", "/ready", "/config", "/stats"]
    bases = ["/v2/models/{model}", "/v2/models/{model}/versions/{version}"]
    read = ["/", "/docs", "/metrics", "/v1/models", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats"]
    read += ["/admin/devices", "/admin/pipelines", "/admin/models/{model}/policy", "/admin/models/{model}/profile"]
    read += [*(base + path for base in bases for path in of_model)]
    posted = [
        "/v1/embeddings",
        "/rerank",
        "/predict",
        "/predict/{model}",
        "/v2/repository/index",
        "/admin/models/{model}/solve",
    ]
    posted += [f"{base}/infer" for base in bases]
    posted += [f"/v2/repository/models/{{model}}/{verb}" for verb in ("load", "unload")]
    written = ["/admin/models/{model}/policy", "/admin/devices/{index}"]
    expected = {("get", path) for path in read} | {("post", path) for path in posted}
    assert documented() == expected | {("put", path) for path in written}


def test_responses_to_generated_calls_conform_to_the_document() -> None:
    with serving("googlenet", "--device", "emulated:googlenet-tesla-p4", "--policy", "greedy") as running:
        tally = check_routes(running.url, 16)
    assert tally.complaints == []
    answered = {key.rpartition(":")[0] for key in tally.statuses if key.endswith(": 200")}
    of_encoders = {"POST /v1/embeddings", "POST /rerank"}  # which this server has none of
    assert answered == {f"{method.upper()} {path}" for method, path in documented()} - of_encoders
