"""What the page at / asks: /live once a second, /live/policy when the policy is another one."""

import asyncio
import secrets
import time
from dataclasses import dataclass
from math import log
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from policies.actions import actions, how_it_decides, weighs_the_mean_rate
from policies.catalog import Chosen
from policies.profile import Profile
from server.documents import Duration
from server.errors import BadInputError
from server.inference import Inference

_STEP = log(1.1)  # of the mean rate, between two charts
_AFTER = 0.02  # s past the full second: timers may fire early, and would make a second of nothing
_HEADERS = {"cache-control": "no-store"}


@dataclass(slots=True)
class _Shown:
    """The policy of one model as it was last shown; `chart` is the answer of that name, once somebody asked."""

    chosen: Chosen
    version: int = 1
    chart_of: str = ""
    chart: bytes = b""


class Live:
    """The state of all models, for a page that polls."""

    def __init__(self, inference: Inference) -> None:
        """`inference` is what serves."""
        self._inference = inference
        self._dispatcher = inference.dispatcher
        self._history = inference.metrics.history
        self._run = secrets.token_hex(4)  # so that a page notices another run of the server
        self._shown: dict[str, _Shown] = {}
        self._drawing = asyncio.Lock()

    def routes(self) -> list[Route]:
        """For a router."""
        return [Route("/live", self.state), Route("/live/policy", self.policy)]

    async def watch(self) -> None:
        """End a second of the history every second, until cancelled."""
        while True:
            await asyncio.sleep(1.0 + _AFTER - time.time() % 1.0)
            now = time.time()
            for model in self._inference.models:
                length, rate = self._dispatcher.queue_length(model), self._dispatcher.arrival_rate(model)
                self._history.tick(model, now, length, rate)

    async def state(self, request: Request) -> Response:
        """GET /live?model=M&since=SEQ: how things stand, and the points after SEQ."""
        model, since = self._model(request), request.query_params.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 16):
            raise BadInputError(f"since is {since[:20]!r}; send the number of the last point you have")
        return _json(self._state(model) | {"points": self._history.points(model, int(since))})

    async def policy(self, request: Request) -> Response:
        """GET /live/policy?model=M: the policy as a chart, and the profile."""
        model = self._model(request)
        async with self._drawing:  # once for all who ask
            name, shown = self._chart_name(model), self._of(model)
            if shown.chart_of != name:
                mean_rate = self._mean_rate(model)
                shown.chart = await asyncio.to_thread(_chart, shown.chosen, model, mean_rate, name)
                shown.chart_of = name
            return Response(shown.chart, media_type="application/json", headers=_HEADERS)

    def _model(self, request: Request) -> str:
        first = next(iter(self._inference.models))
        return self._inference.model(request.query_params.get("model", first)).name

    def _of(self, model: str) -> _Shown:
        chosen, shown = self._dispatcher.chosen[model], self._shown.get(model)
        if shown is None or shown.chosen is not chosen:
            shown = self._shown[model] = _Shown(chosen, 1 if shown is None else shown.version + 1)
        return shown

    def _mean_rate(self, model: str) -> float | None:
        """As the policy sees it, in steps of a tenth; None where nobody measures it, or it changes nothing."""
        chosen = self._dispatcher.chosen[model]
        if not weighs_the_mean_rate(chosen):
            return None
        rates = chosen.monitor.mean_rates(self._dispatcher.now())
        mean = sum(rate for kind, rate in rates.items() if kind.model == model)
        return float(1.1 ** round(log(mean) / _STEP)) if mean > 0.0 else None

    def _chart_name(self, model: str) -> str:
        mean_rate = self._mean_rate(model)
        return f"{self._run}-{self._of(model).version}-{mean_rate or 0:.4g}"

    def _policy(self, model: str) -> dict[str, Any]:
        shown = self._of(model)
        chart = self._chart_name(model)
        return {"name": shown.chosen.name, "spec": shown.chosen.spec, "version": shown.version, "chart": chart}

    def _state(self, model: str) -> dict[str, Any]:
        dispatcher, chosen = self._dispatcher, self._of(model).chosen
        statistics = self._inference.metrics.statistics.of(model)
        return {
            "run": self._run,
            "now": time.time(),
            "model": model,
            "models": [*self._inference.models],
            "status": _status(dispatcher.alive, dispatcher.ready),
            "weights": self._inference.models[model].weights,
            "queue_length": dispatcher.queue_length(model),
            "arrival_rate_hz": dispatcher.arrival_rate(model),
            "policy": self._policy(model),
            "slo_ms": 1e3 * chosen.slo,  # infinity is null
            "seq": self._history.seq(model),
            "batches": self._history.batches(model),
            "observed": [[b.batch_size, b.compute_infer.count, _mean_ms(b.compute_infer)] for b in statistics.batches],
        }


def _mean_ms(total: Duration) -> float:
    return total.ns / 1e6 / total.count


def _status(alive: bool, ready: bool) -> str:
    if not alive:
        return "broken"
    return "ready" if ready else "draining"


def _chart(chosen: Chosen, model: str, mean_rate: float | None, name: str) -> bytes:
    shown = actions(chosen, model, mean_rate)
    return orjson.dumps(
        {
            "chart": name,
            "spec": chosen.spec,
            "how": how_it_decides(chosen),
            "queue_lengths": shown.queue_lengths,
            "rates_hz": shown.rates,
            "batch_size": shown.batch_size,
            "mean_rate_hz": mean_rate,
            "profile": _profile(chosen.profile),
        }
    )


def _profile(profile: Profile) -> dict[str, Any]:
    energies = profile.energies
    return {
        "name": profile.name,
        "source": profile.source,
        "energy_source": profile.energy_source,
        "max_batch_size": profile.max_batch_size,
        "capacity_hz": profile.capacity,
        "service_ms": [1e3 * seconds for seconds in profile.service_times],
        "energy_mj": None if energies is None else [1e3 * joules for joules in energies],
    }


def _json(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json", headers=_HEADERS)
