"""Checks a running server against its OpenAPI document, with valid and invalid calls drawn by schemathesis.

Checked of every answer: no 5xx but 503 and 504; a status, a content type, headers and a body that the document
describes; and 405 for methods that it does not list. A call that fits the document may fail (a schema cannot express
that a tensor's values fit its shape), and one that does not may succeed (the server treats null as absent).
"""

from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from benchmarks.support.hostile_inputs import IMAGES, images

_DOCUMENTED = (503, 504)
_CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
_POLICIES = [
    "greedy",
    "timeout:1",
    "static:2,max_wait_ms=5",
    "smdp:w2=1.6",
    "max-under-deadline:slo_ms=9",
    "rate-matching",
]
_ENCODED = st.sampled_from(IMAGES) | images().map(lambda case: bytes(case.arguments[0]))


def _register() -> None:
    """Register strategies for content types whose schema says nothing: images and binary tensors."""
    load_all_checks()
    for kind in ("image/jpeg", "image/png"):
        schemathesis.openapi.media_type(kind, _ENCODED)
    schemathesis.openapi.media_type("application/octet-stream", st.binary(max_size=400) | _ENCODED)


class Tally:
    """Results of calls.

    Attributes:
        statuses: number of calls by route and status.
        complaints: descriptions of failures.
    """

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.complaints: list[str] = []

    def check(self, case: Any, session: requests.Session) -> None:
        """Make one call and check its answer."""
        response = case.call(session=session, timeout=30)
        label = f"{case.operation.method.upper()} {case.operation.path}"
        self.statuses[f"{label}: {response.status_code}"] += 1
        if response.status_code >= 500 and response.status_code not in _DOCUMENTED:
            self.complaints.append(
                f"{label}: {response.status_code} {response.text[:300]} {case.as_curl_command()[:1000]}"
            )
        try:
            case.validate_response(response, checks=_CHECKS)
        except FailureGroup as group:
            self.complaints += [f"{label}: {str(error)[:600]}" for error in group.exceptions]


def check_routes(url: str, examples: int, round_: int = 0) -> Tally:
    """Make `examples` calls, half of them invalid, of every route of the server at `url`."""
    _register()
    tally = Tally()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    with requests.Session() as session:
        for result in schema.get_all_operations():
            assert isinstance(result, Ok), result
            operation = result.ok()
            for mode in GenerationMode:
                _check_operation(operation, mode, tally, (session, examples, round_))
            if operation.path.endswith("/unload"):
                session.post(
                    url + operation.path.replace("{model}", "googlenet").replace("/unload", "/load"), timeout=30
                )
        _check_methods(url, schema.raw_schema, tally, session)
    return tally


def _check_operation(operation: Any, mode: Any, tally: Tally, how: tuple[requests.Session, int, int]) -> None:
    session, examples, round_ = how
    parts = (operation.body, operation.query, operation.headers, operation.path_parameters)
    if mode is GenerationMode.NEGATIVE and not any(parts):
        return  # a call without parts cannot be invalid
    strategy: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=mode)
    if mode is GenerationMode.POSITIVE:
        strategy = st.one_of(strategy, *_good_calls(operation))
    limits = settings(
        max_examples=max(1, examples // 2),
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def one(case: Any) -> None:
        tally.check(case, session)

    seed(round_)(limits(given(strategy)(one)))()


def _good_calls(operation: Any) -> list[st.SearchStrategy[Any]]:
    """Calls that succeed, for routes where calls drawn from the schema hardly ever do."""
    if operation.path.endswith("/infer"):
        raw = {"headers": {"Inference-Header-Content-Length": "0"}, "media_type": "application/octet-stream"}
        return [operation.as_strategy(body=image, **raw) for image in IMAGES[:6]]
    if operation.path.endswith("/policy") and operation.method == "put":
        bodies = [{"policy": policy} for policy in _POLICIES]
        return [operation.as_strategy(body=body, media_type="application/json") for body in bodies]
    if operation.path.endswith("/{index}"):
        good = {"path_parameters": {"index": 0}, "media_type": "application/json"}
        return [operation.as_strategy(body={"serving": True}, **good)]
    return []


def _check_methods(url: str, document: dict[str, Any], tally: Tally, session: requests.Session) -> None:
    """Check that a method that the document does not list gets 405 and the JSON body of errors."""
    for path, operations in document["paths"].items():
        target = path.replace("{model}", "googlenet").replace("{version}", "1").replace("{index}", "0")
        for method in {"get", "post", "put", "delete", "patch"} - operations.keys():
            response = session.request(method, url + target, timeout=30)
            tally.statuses[f"{method.upper()} {path}: {response.status_code}"] += 1
            if response.status_code != 405 or set(response.json()) != {"error"}:
                tally.complaints.append(f"{method.upper()} {path}: {response.status_code} {response.text[:300]}")
