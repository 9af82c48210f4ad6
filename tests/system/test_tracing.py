"""Traces of the real server process, received by an OTLP collector."""

import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.support.harness import free_port, serving
from server.telemetry.tracing import tracing_to
from tests.support.fork_server import run_serve_model
from tests.support.http_client import Response, fetch, photograph
from tests.system.test_serve import EMULATED

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Run an OTLP collector; yield its URL and the list of spans received."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", spans
        server.shutdown()


def predict_together(url: str, *traceparents: str) -> list[Response]:
    def one(traceparent: str) -> Response:
        headers = {"traceparent": traceparent} if traceparent else {}
        return fetch(url, "/predict", photograph(), headers=headers)

    with ThreadPoolExecutor(len(traceparents)) as pool:
        return list(pool.map(one, traceparents))


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_spans_of_requests_and_batch_are_linked_and_all_are_exported_at_shutdown() -> None:
    policy = ("--policy", "static:4,max_wait_ms=inf")
    with collector() as (url, spans):
        with serving(*EMULATED, *policy, "--otlp-endpoint", url) as server:
            sampled, unsampled = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
            replies = predict_together(server.url, sampled, unsampled, "", "")
            assert fetch(server.url, "/predict", b"no picture").status == 400
            assert fetch(server.url, "/metrics").status == 200
        requests = {span.span_id.hex(): span for span in spans if span.name == "POST /predict"}
        (batch,) = (span for span in spans if span.name == "batch")
    assert len(spans) == 5  # three requests with their batch, and the rejected one
    linked = [link.span_id.hex() for link in batch.links]
    assert sorted(linked) == sorted(key for key, span in requests.items() if span.links)
    assert len(linked) == 3
    for key in linked:
        (link,) = requests[key].links
        assert (link.trace_id, link.span_id) == (batch.trace_id, batch.span_id)
        assert requests[key].start_time_unix_nano <= batch.start_time_unix_nano
        assert batch.end_time_unix_nano <= requests[key].end_time_unix_nano
    found = attributes(batch)
    assert {key: found[f"batchwright.{key}"] for key in ("model", "policy", "batch_size")} == {
        "model": "googlenet",
        "policy": "static",
        "batch_size": 4,
    }
    traceparents = [
        re.fullmatch(r"00-([\da-f]{32})-([\da-f]{16})-0([0-3])", reply.headers["traceparent"]) for reply in replies
    ]
    assert all(traceparents)
    assert [parts[3] for parts in traceparents if parts] == ["1", "0", "3", "3"]  # 2: the id is random
    assert traceparents[0] is not None
    assert traceparents[0][1] == TRACE
    assert requests[traceparents[0][2]].parent_span_id.hex() == PARENT
    rejected = next(span for key, span in requests.items() if key not in linked)
    assert attributes(rejected)["http.response.status_code"] == 400


def test_an_unreachable_collector_delays_neither_responses_nor_shutdown() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    with serving(*EMULATED, "--policy", "greedy", "--otlp-endpoint", endpoint) as server:
        assert [reply.status for reply in predict_together(server.url, *[""] * 8)] == [200] * 8
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def test_a_collector_that_does_not_respond_delays_the_shutdown_only_by_the_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = ("--policy", "greedy", "--otlp-endpoint", endpoint)
        with serving(*EMULATED, *arguments) as server:
            assert [reply.status for reply in predict_together(server.url, *[""] * 8)] == [200] * 8
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(9) == 0, "the exporter's own time-out is 10 s"


@pytest.mark.parametrize(("variable", "seconds"), [("OTEL_EXPORTER_OTLP_TIMEOUT", None), ("LANG", 2.0)])
def test_the_export_time_out_is_two_seconds_unless_the_environment_sets_it(
    variable: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "7")
    timeouts: list[float | None] = []

    class Exporter(OTLPSpanExporter):
        def __init__(self, endpoint: str, timeout: float | None) -> None:
            super().__init__(endpoint, timeout=timeout)
            timeouts.append(timeout)

    monkeypatch.setattr("server.telemetry.tracing.OTLPSpanExporter", Exporter)
    tracing_to("http://127.0.0.1:1", "0").close()
    assert timeouts == [seconds]


def test_requests_are_served_with_the_sdk_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with serving(*EMULATED, "--policy", "greedy", "--otlp-endpoint", f"http://127.0.0.1:{free_port()}") as server:
        assert [reply.status for reply in predict_together(server.url, "", f"00-{TRACE}-{PARENT}-01")] == [200] * 2


def test_the_error_for_an_invalid_endpoint_names_the_setting() -> None:
    done = run_serve_model(*EMULATED, "--otlp-endpoint", "localhost:4318")
    assert done.returncode == 2
    assert "--otlp-endpoint: give a URL" in done.stderr
    assert "Traceback" not in done.stderr
