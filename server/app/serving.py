"""What serve-model runs: a server, from its plan to its exit code."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from ipaddress import ip_address
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client import disable_created_metrics

from policies.types import SpecError
from server.app.assembly import AssembledServer, assemble, keys_of
from server.app.backend import ProfileSource
from server.app.http_server import bind_grpc, raise_file_limit
from server.app.lifecycle import serve
from server.app.start_checks import ServerPlan, make_plan
from server.app.traces import exported_traces
from server.config import Settings, SettingsResult
from server.transport.connection import Listener
from server.transport.connection_limits import ConnectionLimits
from server.transport.tls import load_tls
from server.workers.worker import end_idle, shared_memory

if TYPE_CHECKING:
    from server.api.grpc.server import GrpcServer
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright")


def run(result: SettingsResult, profiles: ProfileSource, started: float) -> int:
    """Serve by these settings; return the exit code. `started` is the time at which the command started, s."""
    plan = make_plan(result, profiles.cached, _CHECKS)
    settings = plan.settings
    raise_file_limit()  # before there are processes of models
    if settings.gateways is not None:
        _log.warning(
            "--gateways %s has no effect: one process serves HTTP; leave it out, and for more run several servers "
            "behind a load balancer: docs/operation.md",
            settings.gateways,
        )
    reserved = bind_grpc(settings) or nullcontext()
    with plan.bound as bound, reserved as grpc_bound, exported_traces(settings.otlp_endpoint) as tracing:
        server = _assembled(plan, profiles, tracing, started)
        listener = _listener(settings)
        make_grpc = _grpc_server(settings)
        grpc = None
        if make_grpc is not None and grpc_bound is not None:
            grpc = make_grpc(server.app, server.inference, listener, grpc_bound.getsockname()[:2])
        files = {"API key file": server.keys, "TLS certificate": listener.tls}
        reloads = {name: file.reload for name, file in files.items() if file is not None}
        return serve(server.app, server.fleet, bound, settings.drain_delay_s, listener, reloads, grpc=grpc)


def _assembled(plan: ServerPlan, profiles: ProfileSource, tracing: "Tracing | None", started: float) -> AssembledServer:
    settings = plan.settings
    if settings.api_key_file is None and not _is_loopback(settings.host):
        _log.warning(
            "clients that reach %s need no key to predict or to swap policies; give --api-key-file", settings.host
        )
    disable_created_metrics()  # type: ignore[no-untyped-call]
    server = assemble(plan, profiles, tracing)
    end_idle()
    _log.info("models are loaded and policies solved, after %.1f s", monotonic() - started)
    return server


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listener(settings: Settings) -> Listener:
    tls = load_tls(settings.tls_cert, settings.tls_key)
    limits = ConnectionLimits(
        headers=settings.header_timeout_s,
        body=settings.body_timeout_s,
        reading=settings.read_timeout_s,
        answer=settings.answer_timeout_s,
    )
    return Listener(limits, tls, buffers=shared_memory().buffer)


def _check_tracing(settings: Settings) -> None:
    with exported_traces(settings.otlp_endpoint):
        pass


def _grpc_server(settings: Settings) -> "type[GrpcServer] | None":
    """The class of the gRPC server; None without --grpc-port.

    Raises:
        SpecError: the extra packages are not installed, or the port is that of HTTP.
    """
    if settings.grpc_port is None:
        return None
    if settings.grpc_port == settings.port != 0:
        raise SpecError(f"--port and --grpc-port are both {settings.port}; choose another --grpc-port")
    try:
        from server.api.grpc.server import GrpcServer
    except ImportError as error:
        raise SpecError(
            f"--grpc-port needs {error.name}; install the extra grpc: pip install grpcio protobuf"
        ) from error
    return GrpcServer


_CHECKS: Sequence[Callable[[Settings], object]] = (keys_of, _listener, _check_tracing, _grpc_server)
