"""What a replica of the deployment holds: a whole server, its dispatcher and its device, behind Ray's HTTP.

Nothing here knows Ray: it calls these methods by their names, all on the event loop that serves.
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

from policies.catalog import Chosen
from policies.types import SpecError
from profiler.first_profile import FirstProfiles
from server.app.assembly import Assembled, assemble, keys_of
from server.app.plan import make_plan, policy_of
from server.config import Settings, load_settings, read_settings
from server.errors import BadInputError
from server.scheduling.policy_swap import swap
from server.telemetry.logs import logging_to
from server.transport.asgi import below_root, respond, respond_error

_log = logging.getLogger("batchwright")
_CHANGES = ("policy", "slo_p95_ms", "w2")  # what may be changed while it serves
_NOWHERE = {"host": "127.0.0.1", "port": 0}  # Ray listens
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class _UnchangeableError(BadInputError):
    """One replica is asked for what all have to do."""

    status = 405


class Replica:
    """One server of several that are alike."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` by their names in a configuration file; where to listen, and TLS, are Ray's."""
        self._settings = {**settings, **_NOWHERE}
        self._logs = ExitStack()
        self._changing = asyncio.Lock()  # in the order in which they came
        self._serving = False
        self._server: Assembled

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Load, profile where no profile is known, and solve; what answers HTTP.

        Raises:
            SpecError: the settings cannot be used.
        """
        reading = read_settings(self._settings, None)
        with ExitStack() as logs:
            logs.enter_context(logging_to(*reading.voice))
            disable_created_metrics()  # type: ignore[no-untyped-call]
            plan = await asyncio.to_thread(make_plan, reading, FirstProfiles().kept, (keys_of,))
            plan.bound.close()
            self._server = await asyncio.to_thread(assemble, plan, FirstProfiles())
            self._logs = logs.pop_all()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answer(scope, receive, send)

        return app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})  # Ray's proxy sends none
        if scope["type"] == "http":
            scope = below_root(scope)  # the application's route_prefix
        method, path = scope.get("method", "GET"), scope.get("path", "")  # a lifespan has neither
        if (method, path) == ("GET", "/metrics"):
            await respond(send, merged(await self.everybodys_metrics()).encode(), _TEXT)
        elif method != "GET" and path.startswith("/admin/"):
            await respond_error(
                send,
                _UnchangeableError("one replica of several would change alone; change the deployment's user_config"),
            )
        else:
            await self._server.app(scope, receive, send)

    async def everybodys_metrics(self) -> Mapping[str, str]:
        """By replica, the text that Prometheus scrapes; of this one alone, where nobody knows the others."""
        return {"": await self.render_metrics()}

    async def render_metrics(self) -> str:
        """The text that Prometheus scrapes, of this replica."""
        await self._server.metrics.read_meters()
        return self._server.metrics.render().decode()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Let other policies decide from now on, those that `policy`, `slo_p95_ms` and `w2` ask for.

        Ray ends every replica whose method raises. So one that serves logs what it cannot use, and its policies stay.

        Raises:
            SpecError: the policies cannot be had, and it does not serve yet.
        """
        try:
            await self._change(user_config)
        except SpecError as error:
            if not self._serving:
                raise
            _log.error("the user_config is refused, the policies stay as they are: %s", error)

    async def _change(self, user_config: Mapping[str, Any]) -> None:
        strange = [key for key in user_config if key not in _CHANGES]
        if strange:
            raise SpecError(
                f"{strange[0]!r} cannot change while it serves, only {', '.join(_CHANGES)}; give it in args"
            )
        settings = load_settings({**self._settings, **user_config}, None)
        async with self._changing:
            choosing = {model: partial(_chosen, settings, model) for model in settings.specs}
            await swap(self._server.fleet, self._server.metrics, choosing)

    def check_health(self) -> None:
        """Whether batches are launched and come back; Ray starts another replica in the place of one that fails.

        Raises:
            RuntimeError: the dispatcher is broken, or overdue.
        """
        self._serving = True  # Ray asks for the first time when it has configured the replica
        if not self._server.fleet.alive:
            raise RuntimeError("the dispatcher is broken or a batch never came back; the log of the replica says which")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas is decided by: backlog_s, the least time to serve everybody here, and load."""
        fleet = self._server.fleet
        load = sum(fleet.arrival_rate(model) / fleet.capacity(model) for model in fleet.first.chosen)
        return {"backlog_s": fleet.backlog(), "load": load}


def _chosen(settings: Settings, model: str, now: Chosen) -> Chosen:
    return policy_of(settings, model, now.profile)


def merged(texts: Mapping[str, str]) -> str:
    """What several replicas say, as one text: every sample with the label `replica`, the samples of a metric together.

    Args:
        texts: by replica, in Prometheus' text format.
    """
    samples: dict[str, list[str]] = {}  # by the two lines that head a metric
    for replica, text in texts.items():
        for metric in re.split(r"^(?=# HELP )", text, flags=re.MULTILINE)[1:]:
            about, kind, *lines = metric.splitlines()
            samples.setdefault(f"{about}\n{kind}", []).extend(_labelled(line, replica) for line in lines)
    return "".join(f"{head}\n" + "".join(f"{line}\n" for line in lines) for head, lines in samples.items())


def _labelled(sample: str, replica: str) -> str:
    name, separator, rest = re.split(r"([{ ])", sample, maxsplit=1)
    return f'{name}{{replica="{replica}",{rest}' if separator == "{" else f'{name}{{replica="{replica}"}} {rest}'
