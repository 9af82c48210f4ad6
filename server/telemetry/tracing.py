"""OpenTelemetry tracing: one span per HTTP request, one per batch, and links between them. Needs the extra "otel".

The span of a batch has no parent, since its requests belong to different traces. It starts a trace of its own, with
links to the spans of its requests and links back from them. Sampling, the service's name and the exporter's headers are
configured by the environment variables of the OpenTelemetry specification (OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME,
OTEL_EXPORTER_OTLP_HEADERS, ...).
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.telemetry.batch_record import BatchRecord

_ROUTES = {
    "/predict": re.compile(r"/predict(?:/[^/]+)?"),
    "/v2/models/{model}/infer": re.compile(r"/v2/models/[^/]+(?:/versions/[^/]+)?/infer"),
    "/v1/embeddings": re.compile(r"/v1/embeddings"),
    "/rerank": re.compile(r"/rerank"),
    "/admin": re.compile(r"/admin/.*"),
    "/inference.GRPCInferenceService/ModelInfer": re.compile(r"/inference\.GRPCInferenceService/ModelInfer"),
}
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_TIMEOUT = 2.0  # s for an export; the SDK's default of 10 s would delay the shutdown of the server
_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Creates the spans of requests and batches."""

    def __init__(self, provider: TracerProvider, version: str) -> None:
        """Use a provider that samples and exports; `version` is this package's."""
        self._provider = provider
        self._tracer = provider.get_tracer("batchwright", version)

    def request(self, method: str, path: str, headers: Mapping[bytes, bytes], request_id: str) -> "RequestSpan":
        """Start the span of a request, a child of the span in its traceparent; it is current until it ends."""
        carrier = {
            n: headers[n.encode()].decode("latin-1") for n in ("traceparent", "tracestate") if n.encode() in headers
        }
        route = next((name for name, pattern in _ROUTES.items() if pattern.fullmatch(path)), "")
        span = self._tracer.start_span(
            f"{method} {route}".rstrip(),
            _W3C.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": method, "url.path": path[:200], "batchwright.request_id": request_id},
        )
        return RequestSpan(span)

    @contextmanager
    def step(self, model: str) -> Iterator[None]:
        """The span of a request of a pipeline, a child of the current span, and current in the `with` block."""
        with self._tracer.start_as_current_span(f"step {model}", attributes={"batchwright.model": model}):
            yield

    @staticmethod
    def current() -> Span | None:
        """Return the span of the current request, None if it is not recorded."""
        span = get_current_span()
        return span if span.is_recording() else None

    def batch(self, batch: BatchRecord) -> None:
        """Record the span of a completed batch, linked with the spans of its calls, if any of these is recorded."""
        calls = {id(request.payload.call): request for request in batch.launch.requests}.values()
        spans = [(call.span, request) for request in calls if (call := request.payload.call).span is not None]
        if not spans:
            return
        facts = batch.facts() | {"first_stage": batch.first_stage}
        attributes = {f"batchwright.{name}": value for name, value in facts.items() if value is not None}
        epoch = time.time_ns() - time.monotonic_ns()
        batch_span = self._tracer.start_span(
            "batch",
            context.Context(),  # a trace of its own
            SpanKind.INTERNAL,
            attributes,
            [Link(span.get_span_context()) for span, _ in spans],
            epoch + round(1e9 * batch.started),
        )
        for span, request in spans:
            if not span.is_recording():  # its client disconnected
                continue
            waited = {"batchwright.waiting_s": request.started - request.arrival}
            span.add_link(batch_span.get_span_context(), waited)
        batch_span.end(epoch + round(1e9 * batch.ended))

    def close(self) -> None:
        """Export the remaining spans, within the export timeout."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request, current from its start to its end."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._token: Token[context.Context] = context.attach(set_span_in_context(span))

    @property
    def traceparent(self) -> bytes | None:
        """The traceparent header of the response; None if the SDK is disabled."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(self._span))
        return carrier["traceparent"].encode() if carrier else None

    @property
    def trace_id(self) -> str:
        """The id of the span's trace, 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def end(self, status: int, ago: float = 0.0) -> None:
        """End the span, which ended some time ago, s, with the status of the response; 0 if the client disconnected."""
        context.detach(self._token)
        self._span.set_attribute("http.response.status_code", status or 499)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(time.time_ns() - round(1e9 * ago))


def tracing_to(endpoint: str, version: str) -> Tracing:
    """Return tracing that exports by OTLP over HTTP; `endpoint` is a collector's URL, such as http://localhost:4318."""
    resource = Resource.create({"service.name": "batchwright", "service.version": version})
    provider = TracerProvider(resource=resource)
    timeout = None if any(map(os.environ.get, _TIMEOUTS)) else _TIMEOUT
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=timeout)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, version)
