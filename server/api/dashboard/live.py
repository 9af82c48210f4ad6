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

from policies.catalog import Chosen
from policies.charts.action_table import actions, depends_on_mean_rate, describe_policy
from policies.profile import Profile
from server.api.admin import describe_devices
from server.api.inference import Inference
from server.errors import BadInputError
from server.telemetry.statistics import Duration

_STEP = log(1.1)  # of the mean rate, between two charts
_AFTER = 0.02  # s past the full second: timers may fire early, and would make a second of nothing
_HEADERS = {"cache-control": "no-store"}

_Place = tuple[str, int]  # model, and index of a device


@dataclass(slots=True)
class _Shown:
    """The policy of a model on a device as it was last shown; `chart` is the answer of that name, once asked for."""

    chosen: Chosen
    version: int = 1
    chart_of: str = ""
    chart: bytes = b""


class Live:
    """The state of all models, for a page that polls."""

    def __init__(self, inference: Inference) -> None:
        """`inference` is what serves."""
        self._inference = inference
        self._fleet = inference.fleet
        self._history = inference.metrics.history
        self._run = secrets.token_hex(4)  # so that a page notices another run of the server
        self._shown: dict[_Place, _Shown] = {}
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
                self._history.tick(model, now, self._fleet.queue_length(model), self._fleet.arrival_rate(model))

    async def state(self, request: Request) -> Response:
        """GET /live?model=M&device=INDEX&since=SEQ: how things stand, and the points after SEQ."""
        place, since = self._place(request), request.query_params.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 16):
            raise BadInputError(f"since is {since[:20]!r}; send the number of the last point you have")
        return _json(self._state(place) | {"points": self._history.points(place[0], int(since))})

    async def policy(self, request: Request) -> Response:
        """GET /live/policy?model=M&device=INDEX: the policy as a chart, and the profile."""
        place = self._place(request)
        async with self._drawing:  # once for all who ask
            name, shown = self._chart_name(place), self._of(place)
            if shown.chart_of != name:
                mean_rate = self._mean_rate(place)
                shown.chart = await asyncio.to_thread(_chart, shown.chosen, place[0], mean_rate, name)
                shown.chart_of = name
            return Response(shown.chart, media_type="application/json", headers=_HEADERS)

    def _place(self, request: Request) -> _Place:
        """The model asked for, and the index of the device."""
        first = next(iter(self._inference.models))
        model, devices = request.query_params.get("model", first), self._fleet.dispatchers
        device = request.query_params.get("device", "0")
        if device not in map(str, range(len(devices))):
            raise BadInputError(f"no device {device[:20]!r} here; there are {len(devices)}, counted from 0")
        return self._inference.model(model).name, int(device)

    def _of(self, place: _Place) -> _Shown:
        model, device = place
        chosen, shown = self._fleet.dispatchers[device].chosen[model], self._shown.get(place)
        if shown is None or shown.chosen is not chosen:
            shown = self._shown[place] = _Shown(chosen, 1 if shown is None else shown.version + 1)
        return shown

    def _mean_rate(self, place: _Place) -> float | None:
        """As the policy sees it, in steps of a tenth; None where nobody measures it, or it changes nothing."""
        model, dispatcher = place[0], self._fleet.dispatchers[place[1]]
        chosen = dispatcher.chosen[model]
        if not depends_on_mean_rate(chosen):
            return None
        rates = chosen.monitor.mean_rates(dispatcher.now())
        mean = sum(rate for kind, rate in rates.items() if kind.model == model)
        return float(1.1 ** round(log(mean) / _STEP)) if mean > 0.0 else None

    def _chart_name(self, place: _Place) -> str:
        mean_rate = self._mean_rate(place)
        return f"{self._run}-{place[1]}-{self._of(place).version}-{mean_rate or 0:.4g}"

    def _policy(self, place: _Place) -> dict[str, Any]:
        shown = self._of(place)
        chart = self._chart_name(place)
        return {"name": shown.chosen.name, "spec": shown.chosen.spec, "version": shown.version, "chart": chart}

    def _state(self, place: _Place) -> dict[str, Any]:
        model, fleet, chosen = place[0], self._fleet, self._of(place).chosen
        statistics = self._inference.metrics.statistics.of(model)
        observed = [[b.batch_size, b.compute_infer.count, _mean_ms(b.compute_infer)] for b in statistics.batches]
        return {
            "run": self._run,
            "now": time.time(),
            "model": model,
            "models": [*self._inference.models],
            "device": place[1],
            "devices": describe_devices(fleet),
            "status": _status(fleet.alive, fleet.ready),
            "weights": self._inference.models[model].weights,
            "queue_length": fleet.queue_length(model),
            "arrival_rate_hz": fleet.arrival_rate(model),
            "policy": self._policy(place),
            "slo_ms": 1e3 * chosen.slo,  # infinity is null
            "seq": self._history.seq(model),
            "batches": self._history.batches(model),
            "observed": observed if len(fleet.dispatchers) == 1 else [],  # by no one's profile
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
            "how": describe_policy(chosen),
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
