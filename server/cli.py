"""serve-model: flags, and what is composed of them."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from prometheus_client import disable_created_metrics

from policies.command import run
from policies.types import SpecError
from profiler.first import FirstProfiles
from server.app.assembly import assemble, keys_of
from server.app.lifecycle import exit_on_sigterm, serve
from server.app.plan import Plan, make_plan
from server.config import Settings, read_settings
from server.telemetry.logs import logging_to
from server.transport.auth import Keys
from server.transport.connection import Listener, TimeLimits
from server.transport.tls import tls_of

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright")
app = typer.Typer(add_completion=False)


@app.command()
def serve_model(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="torchvision models; or NAME=SPEC for texts: text-classifier, translator, text-generator, a FOLDER as "
            "transformers saves it, or a configuration's FILE.json",
        ),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="[MODEL=]SPEC; auto if left out")] = None,
    profile: Annotated[list[str] | None, typer.Option(help="[MODEL=]PROFILE, a shipped name or a file")] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda:N or emulated:PROFILE; several with commas between")
    ] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="largest batch")] = None,
    weights: Annotated[str | None, typer.Option(help="auto, random or a FILE")] = None,
    guess: Annotated[
        str | None, typer.Option(help="limit, online or learned: how long a text will be, where it is not known")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="cut each network into so many, for lazy and catch-up")] = None,
    w2: Annotated[float | None, typer.Option(help="weight of power in the objective")] = None,
    slo_p95_ms: Annotated[float | None, typer.Option(help="95th percentile of the response time to keep")] = None,
    queue_capacity: Annotated[int | None, typer.Option(help="requests that may wait")] = None,
    queue_bytes: Annotated[int | None, typer.Option(help="bytes that all calls may hold")] = None,
    hung_after_s: Annotated[float | None, typer.Option(help="s after which a batch is held for hung")] = None,
    host: Annotated[str | None, typer.Option(help="address to bind")] = None,
    port: Annotated[int | None, typer.Option(help="port to bind; 0 takes a free one")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="lines: name scope sha256-of-key, calls a second if bounded")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the certificate, with its chain")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key")] = None,
    header_timeout_s: Annotated[float | None, typer.Option(help="s for a client to send its headers")] = None,
    body_timeout_s: Annotated[float | None, typer.Option(help="s for a client to send a body")] = None,
    read_timeout_s: Annotated[float | None, typer.Option(help="s for a client to take an answer")] = None,
    answer_timeout_s: Annotated[float | None, typer.Option(help="s for a client to take the whole answer")] = None,
    drain_delay_s: Annotated[float | None, typer.Option(help="s after SIGTERM in which calls are admitted yet")] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(help="URL of a collector for traces; extra otel")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, console or json")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings")] = None,
) -> None:
    """Serve models over HTTP, batching by policy."""
    flags = {name: value for name, value in locals().items() if name != "config" and value not in (None, [])}
    began = monotonic()
    exit_on_sigterm()
    reading = read_settings(flags, config)
    with logging_to(*reading.voice):
        code = _run(make_plan(reading, FirstProfiles().kept, _CHECKS), began)
    logging.shutdown()
    os._exit(code)  # a wedged device call or sensor would keep the interpreter from ending by itself


def _run(plan: Plan, began: float) -> int:
    """Serve as planned since `began`, s; the exit code."""
    settings = plan.settings
    if settings.api_key_file is None and not _is_loopback(settings.host):
        _log.warning("whoever reaches %s may predict and steer: give --api-key-file", settings.host)
    with plan.bound as bound, _tracing(settings) as tracing:
        server = assemble(plan, FirstProfiles(), tracing)
        _log.info("loaded, profiled and solved in %.1f s", monotonic() - began)
        return serve(server.app, server.fleet, bound, settings.drain_delay_s, _listener(settings, server.keys))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listener(settings: Settings, keys: Keys | None = None) -> Listener:
    limits = TimeLimits(
        settings.header_timeout_s, settings.body_timeout_s, settings.read_timeout_s, settings.answer_timeout_s
    )
    tls = tls_of(settings.tls_cert, settings.tls_key)
    files: dict[str, Callable[[], None]] = {} if keys is None else {"API key file": keys.reload}
    if tls is not None:
        files["TLS certificate"] = tls.reload
    return Listener(limits, tls, files)


@contextmanager
def _tracing(settings: Settings) -> "Iterator[Tracing | None]":
    """What traces; ends of spans that nobody has yet go out at the end."""
    if settings.otlp_endpoint is None:
        yield None
        return
    try:
        from server.telemetry.tracing import tracing_to
    except ImportError as error:
        raise SpecError(f"--otlp-endpoint needs {error.name}; in the clone pip install '.[otel]'") from error
    tracing = tracing_to(settings.otlp_endpoint, version("batchwright"))
    try:
        yield tracing
    finally:
        tracing.close()


def _check_tracing(settings: Settings) -> None:
    with _tracing(settings):
        pass


_CHECKS: Sequence[Callable[[Settings], object]] = (keys_of, _listener, _check_tracing)  # before anything starts


def main() -> None:
    """The console entry point."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    run(app, "serve-model")


if __name__ == "__main__":
    main()
