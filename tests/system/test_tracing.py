"""The real server process and a collector of its traces."""

import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.support.harness import command_line, free_port, serving
from server.telemetry.tracing import tracing_to
from tests.support.http_client import Reply, ask, photograph
from tests.system.test_serve import EMULATED

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP collector: its URL, and the spans that it got."""
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


def predict_together(url: str, *traceparents: str) -> list[Reply]:
    def one(traceparent: str) -> Reply:
        headers = {"traceparent": traceparent} if traceparent else {}
        return ask(url, "/predict", photograph(), headers=headers)

    with ThreadPoolExecutor(len(traceparents)) as pool:
        return list(pool.map(one, traceparents))


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_requests_and_their_batch_are_linked_and_nothing_is_lost_at_the_end() -> None:
    with collector() as (url, spans):
        with serving(*EMULATED, "--policy", "static:4,max_wait_ms=inf", "--otlp-endpoint", url) as server:
            sampled, unsampled = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
            replies = predict_together(server.url, sampled, unsampled, "", "")
            assert ask(server.url, "/predict", b"no picture").status == 400
            assert ask(server.url, "/metrics").status == 200
        requests = {span.span_id.hex(): span for span in spans if span.name == "POST /predict"}
        (batch,) = (span for span in spans if span.name == "batch")
    assert len(spans) == 5  # three requests with their batch, and the refused one
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
    outward = [
        re.fullmatch(r"00-([\da-f]{32})-([\da-f]{16})-0([0-3])", reply.headers["traceparent"]) for reply in replies
    ]
    assert all(outward)
    assert [parts[3] for parts in outward if parts] == ["1", "0", "3", "3"]  # 2: the id is random
    assert outward[0] is not None
    assert outward[0][1] == TRACE
    assert requests[outward[0][2]].parent_span_id.hex() == PARENT
    refused = next(span for key, span in requests.items() if key not in linked)
    assert attributes(refused)["http.response.status_code"] == 400


def test_a_collector_that_is_not_there_costs_nobody_an_answer_and_not_the_end() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    with serving(*EMULATED, "--policy", "greedy", "--otlp-endpoint", endpoint) as server:
        assert [reply.status for reply in predict_together(server.url, *[""] * 8)] == [200] * 8
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def test_a_collector_that_accepts_and_stays_silent_is_given_up_at_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with serving(*EMULATED, "--policy", "greedy", "--otlp-endpoint", endpoint) as server:
            assert [reply.status for reply in predict_together(server.url, *[""] * 8)] == [200] * 8
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(9) == 0, "the exporter's own time-out is 10 s"


@pytest.mark.parametrize(("variable", "seconds"), [("OTEL_EXPORTER_OTLP_TIMEOUT", None), ("LANG", 2.0)])
def test_a_collector_has_two_seconds_unless_somebody_says_otherwise(
    variable: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "7")
    asked: list[float | None] = []

    class Exporter(OTLPSpanExporter):
        def __init__(self, endpoint: str, timeout: float | None) -> None:
            super().__init__(endpoint, timeout=timeout)
            asked.append(timeout)

    monkeypatch.setattr("server.telemetry.tracing.OTLPSpanExporter", Exporter)
    tracing_to("http://127.0.0.1:1", "0").close()
    assert asked == [seconds]


def test_a_disabled_sdk_costs_nobody_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with serving(*EMULATED, "--policy", "greedy", "--otlp-endpoint", f"http://127.0.0.1:{free_port()}") as server:
        assert [reply.status for reply in predict_together(server.url, "", f"00-{TRACE}-{PARENT}-01")] == [200] * 2


def test_a_wrong_endpoint_is_named() -> None:
    command = [*command_line("serve-model"), *EMULATED, "--otlp-endpoint", "localhost:4318"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "otlp_endpoint" in done.stderr
    assert "Traceback" not in done.stderr
