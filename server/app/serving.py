"""What serve-model runs: a server that speaks HTTP itself, or the serving process behind gateways."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client import disable_created_metrics

from policies.types import SpecError
from profiler.first_profile import FirstProfiles
from server.app.assembly import AssembledServer, assemble, keys_of
from server.app.gateway_hub import GatewayHub
from server.app.http_server import bind_path
from server.app.lifecycle import serve
from server.app.plan import ServerPlan, make_plan
from server.app.proxy import ProxiedApplication
from server.app.supervisor import number_of_gateways, stop_with_supervisor
from server.config import Settings, SettingsResult
from server.gateways.setup import HTTP_SOCKET
from server.transport.connection import Listener
from server.transport.connection_limits import TimeLimits
from server.transport.tls import load_tls

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright")
_UNLIMITED = TimeLimits(*[86400.0] * 5)  # of connections from gateways, which have the limits of their clients


def run(result: SettingsResult, started: float) -> int:
    """Serve by these settings; return the exit code. `started` is the time at which the command started, s."""
    plan = make_plan(result, FirstProfiles().cached, _CHECKS)
    settings = plan.settings
    with plan.bound as bound, tracing_of(settings) as tracing:
        server = _assembled(plan, tracing, started)
        listener = replace(_listener(settings), direct=server.app)
        files = {"API key file": server.keys, "TLS certificate": listener.tls}
        reloads = {name: file.reload for name, file in files.items() if file is not None}
        return serve(server.app, server.fleet, bound, settings.drain_delay_s, listener, reloads)


def run_behind_gateways(result: SettingsResult, folder: Path, pipe: int, started: float) -> int:
    """Serve as the serving process of a supervisor; return the exit code.

    Args:
        result: the settings.
        folder: that of the sockets.
        pipe: descriptor of the supervisor's pipe.
        started: the time at which the command started, s.
    """
    stop_with_supervisor(pipe, folder)
    plan = make_plan(result, FirstProfiles().cached, _CHECKS, lambda *_: bind_path(folder / HTTP_SOCKET))
    settings = plan.settings
    with plan.bound as bound, tracing_of(settings) as tracing:
        server = _assembled(plan, tracing, started)
        hub = GatewayHub(server.inference, settings, number_of_gateways(settings.gateways), folder)
        app, listener = ProxiedApplication(server.inner), Listener(_UNLIMITED)
        return serve(app, server.fleet, bound, settings.drain_delay_s, listener, {}, hub)


def _assembled(plan: ServerPlan, tracing: "Tracing | None", started: float) -> AssembledServer:
    settings = plan.settings
    if settings.api_key_file is None and not _is_loopback(settings.host):
        _log.warning(
            "clients that reach %s need no key to predict or to swap policies; give --api-key-file", settings.host
        )
    disable_created_metrics()  # type: ignore[no-untyped-call]
    server = assemble(plan, FirstProfiles(), tracing)
    _log.info("models are loaded and profiled, and policies solved, after %.1f s", monotonic() - started)
    return server


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listener(settings: Settings) -> Listener:
    return Listener(TimeLimits(*settings.time_limits), load_tls(settings.tls_cert, settings.tls_key))


@contextmanager
def tracing_of(settings: Settings) -> "Iterator[Tracing | None]":
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
    with tracing_of(settings):
        pass


_CHECKS: Sequence[Callable[[Settings], object]] = (keys_of, _listener, _check_tracing)
