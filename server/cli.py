"""serve-model: the command line, and the start of a server from its settings."""

import inspect
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from prometheus_client import disable_created_metrics
from pydantic.fields import FieldInfo

from policies.command import run
from policies.types import SpecError
from profiler.first_profile import FirstProfiles
from server.app.assembly import assemble, keys_of
from server.app.gateway_hub import GatewayHub, bind_in
from server.app.http_server import bind
from server.app.lifecycle import exit_on_sigterm, serve
from server.app.plan import ServerPlan, make_plan
from server.app.supervisor import number_of_gateways, role_of_this_process, stop_with_supervisor, supervise
from server.config import Settings, SettingsResult, read_settings
from server.telemetry.logs import configured_logging
from server.telemetry.printed import printed_to_log
from server.transport.auth import Keys
from server.transport.connection import Listener
from server.transport.connection_limits import TimeLimits
from server.transport.tls import Tls, load_tls

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright")
app = typer.Typer(add_completion=False)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """The flag of a setting, or the argument MODEL...; its value is None if it is not given."""
    text, default = field.description, field.default
    if name == "models":
        option: object = typer.Argument(metavar="MODEL...", help=text)
    else:
        shown = f"{default:g}" if isinstance(default, float) else default
        option = typer.Option(help=text if default in (None, []) else f"{text} (default {shown})")
    types = (each for each in (list[str], int, float, Path) if field.annotation in (each, each | None))
    flag_type: Any = next(types, str)  # the settings parse other types from a string
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[flag_type | None, option]
    )


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each setting in place of its `**flags`."""
    (config, _) = inspect.signature(command).parameters.values()
    flags = [_flag(name, field) for name, field in Settings.model_fields.items()]
    command.__signature__ = inspect.Signature([*flags, config])  # type: ignore[attr-defined]  # typer reads it
    return command


@app.command()
@_with_flags
def serve_model(
    *,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, such as queue_capacity: 512")] = None,
    **flags: Any,
) -> None:
    """Serve models over HTTP, in batches that a policy launches."""
    started = monotonic()
    exit_on_sigterm()
    result = read_settings({name: value for name, value in flags.items() if value not in (None, [])}, config)
    role = role_of_this_process()
    with configured_logging(*result.log_options), printed_to_log():
        bound = None if role is not None else _bound_for_gateways(result.settings)
        if role is not None:
            code = _serve_behind_gateways(result, *role, started)
        elif bound is not None:
            code = supervise(sys.argv[1:], *bound)
        else:
            code = _run(make_plan(result, FirstProfiles().cached, _CHECKS), started)
    logging.shutdown()
    os._exit(code)  # a thread in a hung device call or sensor would block a normal exit


def _run(plan: ServerPlan, started: float) -> int:
    """Serve as planned; returns the exit code. `started` is the time at which the command started, s."""
    settings = plan.settings
    if settings.api_key_file is None and not _is_loopback(settings.host):
        _log.warning(
            "clients that reach %s need no key to predict or to swap policies; give --api-key-file", settings.host
        )
    with plan.bound as bound, _tracing(settings) as tracing:
        server = assemble(plan, FirstProfiles(), tracing)
        _log.info("models are loaded and profiled, and policies solved, after %.1f s", monotonic() - started)
        listener = replace(_listener(settings), direct=server.app)
        reloads = _reloads(server.keys, listener.tls)
        return serve(server.app, server.fleet, bound, settings.drain_delay_s, listener, reloads)


def _bound_for_gateways(settings: Settings | None) -> tuple[int, socket.socket] | None:
    """The number of gateways and their bound address; None without gateways, or if the address cannot be bound.

    Planning then reports all that is wrong with the settings together.
    """
    if settings is None or not (gateways := number_of_gateways(settings.gateways)):
        return None
    with suppress(SpecError):
        return gateways, bind(settings.host, settings.port)
    return None


def _serve_behind_gateways(result: SettingsResult, folder: Path, pipe: int, started: float) -> int:
    """Serve as the serving process of a supervisor; returns the exit code."""
    stop_with_supervisor(pipe)
    plan = make_plan(result, FirstProfiles().cached, _CHECKS, lambda *_: bind_in(folder))
    settings = plan.settings
    with plan.bound as bound, _tracing(settings) as tracing:
        server = assemble(plan, FirstProfiles(), tracing)
        _log.info("models are loaded and profiled, and policies solved, after %.1f s", monotonic() - started)
        hub = GatewayHub(server.inference, settings, number_of_gateways(settings.gateways), folder)
        listener = Listener(TimeLimits(*settings.time_limits))
        return serve(server.inner, server.fleet, bound, settings.drain_delay_s, listener, {"": lambda: None}, hub)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listener(settings: Settings) -> Listener:
    return Listener(TimeLimits(*settings.time_limits), load_tls(settings.tls_cert, settings.tls_key))


def _reloads(keys: Keys | None, tls: Tls | None) -> dict[str, Callable[[], None]]:
    """The functions that read the server's files again on SIGHUP, by the name of the file."""
    files = {"API key file": keys, "TLS certificate": tls}
    return {name: file.reload for name, file in files.items() if file is not None}


@contextmanager
def _tracing(settings: Settings) -> "Iterator[Tracing | None]":
    """The exporter of traces, None without an endpoint; spans not yet exported are flushed at the end."""
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


_CHECKS: Sequence[Callable[[Settings], object]] = (keys_of, _listener, _check_tracing)


def main() -> None:
    """The console entry point."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    run(app, "serve-model")


if __name__ == "__main__":
    main()
