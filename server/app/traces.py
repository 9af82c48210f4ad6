"""The export of traces, as long as a process serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from policies.types import SpecError

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing


@contextmanager
def exported_traces(endpoint: str | None) -> "Iterator[Tracing | None]":
    """The exporter of traces, None without an endpoint; spans not yet exported are flushed at the end.

    Raises:
        SpecError: the extra packages are not installed.
    """
    if endpoint is None:
        yield None
        return
    try:
        from server.telemetry.tracing import tracing_to
    except ImportError as error:
        raise SpecError(
            f"--otlp-endpoint needs {error.name}; install the extra otel: "
            "pip install opentelemetry-exporter-otlp-proto-http"
        ) from error
    tracing = tracing_to(endpoint, version("batchwright"))
    try:
        yield tracing
    finally:
        tracing.close()
