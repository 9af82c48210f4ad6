"""A Ray Serve replica: a complete server with dispatcher and device, behind Ray's HTTP proxy.

This module does not import Ray. Ray calls the methods by name, all on the event loop that serves.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from prometheus_client import disable_created_metrics
from starlette.types import ASGIApp, Receive, Scope, Send

from policies.catalog import ModelPolicy
from policies.types import SpecError
from profiler.first_profile import FirstProfiles
from server.app.assembly import AssembledServer, assemble, keys_of
from server.app.start_checks import check_objectives, make_plan, policy_of
from server.config import Settings, load_settings, read_settings
from server.errors import BadInputError
from server.scheduling.policy_swap import swap
from server.telemetry.logs import configured_logging
from server.transport.asgi_context import AsgiContext, below_root

_log = logging.getLogger("batchwright")
_RECONFIGURABLE = ("policy", "slo_p95_ms", "w2")  # settings that can change while serving
_ADDRESS = {"host": "127.0.0.1", "port": 0}  # unused, since Ray's proxy listens
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class _UnchangeableError(BadInputError):
    """A change of one replica that has to be made for the whole deployment."""

    status = 405


class Replica:
    """A server that is one replica of a Ray Serve deployment."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` have the keys of a configuration file; Ray sets address and TLS."""
        self._settings = {**settings, **_ADDRESS}
        self._logs = ExitStack()
        self._changing = asyncio.Lock()  # keeps changes in order
        self._serving = False
        self._server: AssembledServer

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Load the models, profile and solve them if necessary, and return the ASGI application.

        Raises:
            SpecError: the settings are invalid.
        """
        result = read_settings(self._settings, None)
        with ExitStack() as logs:
            logs.enter_context(configured_logging(*result.log_options))
            disable_created_metrics()  # type: ignore[no-untyped-call]
            profiles = FirstProfiles()  # one, since it keeps the state of the device before models are loaded
            plan = await asyncio.to_thread(make_plan, result, profiles.cached, (keys_of,))
            plan.bound.close()
            self._server = await asyncio.to_thread(assemble, plan, profiles)
            self._logs = logs.pop_all()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(scope, receive, send)

        return app

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})  # Ray's proxy sends none
        if scope["type"] == "http":
            scope = below_root(scope)  # the application's route_prefix
        method, path = scope.get("method", "GET"), scope.get("path", "")  # a lifespan scope has neither
        if (method, path) == ("GET", "/metrics"):
            body = merge_metrics(await self.metrics_by_replica()).encode()
            await AsgiContext(scope, receive, send).respond(200, body, [(b"content-type", _TEXT)])
        elif method != "GET" and path.startswith("/admin/"):
            await AsgiContext(scope, receive, send).respond_error(
                _UnchangeableError("a call can change only one replica; change the deployment's user_config instead")
            )
        else:
            await self._server.app(scope, receive, send)

    async def metrics_by_replica(self) -> Mapping[str, str]:
        """Metrics in Prometheus' text format, by replica; here only those of this replica, named ""."""
        return {"": await self.render_metrics()}

    async def render_metrics(self) -> str:
        """Metrics of this replica in Prometheus' text format."""
        await self._server.metrics.read_meters()
        return self._server.metrics.render().decode()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Swap the policies to those of `policy`, `slo_p95_ms` and `w2`.

        Ray ends a replica whose method raises, so a serving replica only logs an invalid change and keeps its policies.

        Raises:
            SpecError: the change is invalid, and the replica does not serve yet.
        """
        try:
            await self._change(user_config)
        except SpecError as error:
            if not self._serving:
                raise
            _log.error("the user_config is invalid, the policies are unchanged: %s", error)

    async def _change(self, user_config: Mapping[str, Any]) -> None:
        fixed = [key for key in user_config if key not in _RECONFIGURABLE]
        if fixed:
            raise SpecError(
                f"{fixed[0]!r} cannot change while serving, only {', '.join(_RECONFIGURABLE)}; set it in args"
            )
        settings = load_settings({**self._settings, **user_config}, None)
        check_objectives(settings)
        async with self._changing:
            choosing = {model: partial(_chosen, settings, model) for model in settings.specs}
            await swap(self._server.fleet, self._server.metrics, choosing)

    def check_health(self) -> None:
        """Check that batches are launched and completed; Ray replaces a replica that fails the check.

        Raises:
            RuntimeError: the dispatcher has failed, or a batch has timed out.
        """
        self._serving = True  # Ray's first health check comes after it has configured the replica
        if not self._server.fleet.alive:
            raise RuntimeError("the dispatcher has failed or a batch has timed out; see the log of the replica")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Inputs of the autoscaling policy: backlog_s, the minimum time to serve all requests here, and load."""
        fleet = self._server.fleet
        load = sum(fleet.arrival_rate(m) / fleet.capacity(m) for m in fleet.models if fleet.capacity(m))
        return {"backlog_s": fleet.backlog(), "load": load}


def _chosen(settings: Settings, model: str, current: ModelPolicy) -> ModelPolicy:
    return policy_of(settings, model, current.profile)


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge the metrics of several replicas; each sample gets the label `replica`.

    Works on lines rather than with prometheus_client's parser, which is slower and would block the serving event loop.

    Args:
        texts: metrics in Prometheus' text format, by replica.
    """
    samples: dict[str, list[str]] = {}  # by the lines "# HELP" and "# TYPE" of a metric
    for replica, text in texts.items():
        for metric in re.split(r"^(?=# HELP )", text, flags=re.MULTILINE)[1:]:
            about, kind, *lines = metric.splitlines()
            samples.setdefault(f"{about}\n{kind}", []).extend(_labelled(line, replica) for line in lines)
    return "".join(f"{head}\n" + "".join(f"{line}\n" for line in lines) for head, lines in samples.items())


def _labelled(sample: str, replica: str) -> str:
    name, separator, rest = re.split(r"([{ ])", sample, maxsplit=1)
    return f'{name}{{replica="{replica}",{rest}' if separator == "{" else f'{name}{{replica="{replica}"}} {rest}'
