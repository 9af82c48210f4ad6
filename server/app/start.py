"""The start of a server from its settings: alone, or as the serving process behind gateways."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from policies.types import SpecError
from server.app.assembly import assemble, keys_of
from server.app.backend import ProfileSource
from server.app.gateway_hub import GatewayHub, bind_in
from server.app.lifecycle import serve
from server.app.plan import make_plan
from server.app.supervisor import number_of_gateways, stop_with_supervisor
from server.config import Settings, SettingsResult
from server.transport.auth import Keys
from server.transport.connection import Listener
from server.transport.connection_limits import TimeLimits
from server.transport.tls import Tls, load_tls

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright")


def serve_alone(result: SettingsResult, profiles: ProfileSource, started: float) -> int:
    """Serve in this process; returns the exit code. `started` is the time at which the command started, s.

    Raises:
        SpecError: the settings are wrong.
    """
    plan = make_plan(result, profiles.cached, _CHECKS)
    settings = plan.settings
    if settings.api_key_file is None and not _is_loopback(settings.host):
        _log.warning(
            "clients that reach %s need no key to predict or to swap policies; give --api-key-file", settings.host
        )
    with plan.bound as bound, _tracing(settings) as tracing:
        server = assemble(plan, profiles, tracing)
        _log.info("models are loaded and profiled, and policies solved, after %.1f s", monotonic() - started)
        listener = replace(_listener(settings), direct=server.app)
        reloads = _reloads(server.keys, listener.tls)
        return serve(server.app, server.fleet, bound, settings.drain_delay_s, listener, reloads)


def serve_behind_gateways(
    result: SettingsResult, profiles: ProfileSource, started: float, folder: Path, pipe: int
) -> int:
    """Serve as the serving process of a supervisor, by its folder and its pipe; otherwise as `serve_alone`."""
    stop_with_supervisor(pipe)
    plan = make_plan(result, profiles.cached, _CHECKS, lambda *_: bind_in(folder))
    settings = plan.settings
    with plan.bound as bound, _tracing(settings) as tracing:
        server = assemble(plan, profiles, tracing)
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
