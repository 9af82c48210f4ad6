"""The dashboard's data, which the page fetches.

/live is polled for the state and new points. /live/policy is fetched after a policy change, /live/form for each model.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log
from typing import Any
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from policies.catalog import ModelPolicy
from policies.charts.action_table import actions, depends_on_mean_rate, describe_policy, max_ages_at_rates
from policies.planning.prediction import Prediction
from policies.planning.reachability import Neighbour, objective_warnings
from policies.profile import Profile
from server.api.admin import describe_devices, describe_pipelines, neighbours_of
from server.api.inference import Inference
from server.errors import BadInputError
from server.scheduling.fleet import Fleet
from server.scheduling.levels import levels_of
from server.scheduling.predictor import Comparison
from server.telemetry.statistics import Duration

_RATE_STEP = 1.1  # a chart is rendered again when the mean rate has changed by about this factor
_SLOWDOWN_STEP = 1.5  # or the slowdown by this one, which follows the short-term rates
_TICK_OFFSET = 0.02  # s after the full second; a timer that fires early would otherwise record an empty second
_HEADERS = {"cache-control": "no-store"}

_ModelOnDevice = tuple[str, int]  # name of the model, and index of the device


@dataclass(slots=True)
class _PolicyView:
    """The policy of a model on a device, its version, and its last rendered chart with the chart's name."""

    chosen: ModelPolicy
    version: int = 1
    chart_name: str = ""
    chart: bytes = b""


class DashboardData:
    """Routes with the state of all models, for the polling dashboard."""

    def __init__(self, inference: Inference) -> None:
        """Use the fleet and the metrics of `inference`."""
        self._inference = inference
        self._fleet = inference.fleet
        self._history = inference.metrics.history
        self._run = secrets.token_hex(4)  # identifies this run of the server
        self._views: dict[_ModelOnDevice, _PolicyView] = {}
        self._chart_lock = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [Route("/live", self.state), Route("/live/policy", self.policy), Route("/live/form", self.form)]

    async def record_history(self) -> None:
        """Add a point to the history of each model every second, until cancelled."""
        while True:
            await asyncio.sleep(1.0 + _TICK_OFFSET - time.time() % 1.0)
            now = time.time()
            for model in self._inference.models:
                self._history.tick(model, now, self._fleet.queue_length(model), self._fleet.arrival_rate(model))

    async def state(self, request: Request) -> Response:
        """GET /live?model=M&device=INDEX&since=SEQ: the current state, and the points after SEQ."""
        key, since = self._key(request), request.query_params.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 16):
            raise BadInputError(f"since is {since[:20]!r}; send the number of the last point received, 0 for all")
        return _json(self._state(key) | {"points": self._history.points(key[0], int(since))})

    async def policy(self, request: Request) -> Response:
        """GET /live/policy?model=M&device=INDEX: the policy as a chart, and the profile."""
        key = self._key(request)
        async with self._chart_lock:  # concurrent clients share one rendering
            name, view = self._chart_name(key), self._view(key)
            if view.chart_name != name:
                mean_rate, neighbours = self._mean_rate(key), self._neighbours(key)
                view.chart = await asyncio.to_thread(_chart, view.chosen, key[0], mean_rate, name, neighbours)
                view.chart_name = name
            return Response(view.chart, media_type="application/json", headers=_HEADERS)

    async def form(self, request: Request) -> Response:
        """GET /live/form?model=M: how POST /predict takes a sample, and a call for a shell."""
        model = self._inference.model(request.query_params.get("model", self._first))
        curl = curl_example(self._inference, model.name, str(request.base_url))
        return _json({"model": model.name, "id": model.id, **asdict(model.codec.form()), "curl": curl})

    @property
    def _first(self) -> str:
        return next(iter(self._inference.models))

    def _key(self, request: Request) -> _ModelOnDevice:
        """Return the requested model and the index of the device."""
        model, devices = request.query_params.get("model", self._first), self._fleet.dispatchers
        device = request.query_params.get("device", "0")
        if device not in map(str, range(len(devices))):
            raise BadInputError(f"there is no device {device[:20]!r}; send an index from 0 to {len(devices) - 1}")
        name, index = self._inference.name_with_policy(model), int(device)
        if name not in devices[index].chosen:  # the page keeps the device when another model is selected
            index = devices.index(self._fleet.first_of(name))
        return name, index

    def _view(self, key: _ModelOnDevice) -> _PolicyView:
        model, device = key
        chosen, view = self._fleet.dispatchers[device].chosen[model], self._views.get(key)
        if view is None or view.chosen is not chosen:
            view = self._views[key] = _PolicyView(chosen, 1 if view is None else view.version + 1)
        return view

    def _mean_rate(self, key: _ModelOnDevice) -> float | None:
        """Return the policy's mean arrival rate rounded to powers of 1.1, 1/s; None if it is unknown or unused."""
        model, dispatcher = key[0], self._fleet.dispatchers[key[1]]
        chosen = dispatcher.chosen[model]
        if not depends_on_mean_rate(chosen):
            return None
        rates = chosen.monitor.mean_rates(dispatcher.clock())
        mean = sum(rate for kind, rate in rates.items() if kind.model == model)
        mean /= _SLOWDOWN_STEP ** round(log(dispatcher.queue.slowdown(model)) / log(_SLOWDOWN_STEP))
        return float(_RATE_STEP ** round(log(mean) / log(_RATE_STEP))) if mean > 0.0 else None

    def _chart_name(self, key: _ModelOnDevice) -> str:
        mean_rate, busy = self._mean_rate(key), sum(each.load for each in self._neighbours(key))
        return f"{self._run}-{key[1]}-{self._view(key).version}-{mean_rate or 0:.4g}-{busy:.1f}"

    def _neighbours(self, key: _ModelOnDevice) -> list[Neighbour]:
        return neighbours_of(self._fleet.dispatchers[key[1]], key[0])

    def _policy(self, key: _ModelOnDevice) -> dict[str, Any]:
        view = self._view(key)
        chart = self._chart_name(key)
        return {"name": view.chosen.name, "spec": view.chosen.spec, "version": view.version, "chart": chart}

    def _state(self, key: _ModelOnDevice) -> dict[str, Any]:
        model, fleet, chosen = key[0], self._fleet, self._view(key).chosen
        statistics = self._inference.metrics.statistics.of(model)
        observed = [[b.batch_size, b.compute_infer.count, _mean_ms(b.compute_infer)] for b in statistics.batches]
        return {
            "run": self._run,
            "now": time.time(),
            "model": model,
            "models": [*self._inference.models],
            "pipelines": describe_pipelines(self._inference),
            "device": key[1],
            "devices": describe_devices(fleet),
            "status": _status(fleet, model),
            "weights": self._inference.models[model].weights,
            "id": self._inference.models[model].id,
            "queue_length": fleet.queue_length(model),
            "arrival_rate_hz": fleet.arrival_rate(model),
            "policy": self._policy(key),
            "slo_ms": 1e3 * chosen.objective,  # infinity is null
            "prediction": self._prediction(key),
            "levels": self._levels(key),
            "seq": self._history.seq(model),
            "batches": self._history.batches(model),
            "observed": observed if len(fleet.devices_of(model)) == 1 else [],  # several profiles cannot be compared
        }

    def _levels(self, key: _ModelOnDevice) -> list[dict[str, Any]]:
        """The queue and the response times of each priority level on a device; empty for one level."""
        model, dispatcher = key[0], self._fleet.dispatchers[key[1]]
        count, found = levels_of(dispatcher.levels, model).count, self._comparison(key)
        return [
            {
                "level": level,
                "queue_length": dispatcher.queue.length_of_level(model, level),
                "predicted": None if found is None else _times_ms(found.predicted.levels.get(level)),
                "measured": None if found is None else _times_ms(found.measured.levels.get(level)),
            }
            for level in (range(1, count + 1) if count > 1 else ())
        ]

    def _comparison(self, key: _ModelOnDevice) -> Comparison | None:
        predictor = self._inference.predictors.get(self._fleet.dispatchers[key[1]].device)
        return None if predictor is None else predictor.comparison(key[0])

    def _prediction(self, key: _ModelOnDevice) -> dict[str, Any] | None:
        found = self._comparison(key)
        if found is None:
            return None
        return {
            "rate_hz": found.rate,
            "neighbours": found.neighbours,
            "predicted": _figures(found.predicted),
            "measured": _figures(found.measured),
            "savings": None if found.predicted.savings is None else str(found.predicted.savings),
        }


def _times_ms(found: tuple[float, float] | None) -> dict[str, float] | None:
    return None if found is None else {"mean_ms": 1e3 * found[0], "p95_ms": 1e3 * found[1]}


def _figures(found: Prediction) -> dict[str, float]:
    return {"mean_ms": 1e3 * found.mean, "p95_ms": 1e3 * found.p95, "batch_size": found.batch_size}


def curl_example(inference: Inference, model: str, address: str) -> str:
    """A line for a shell that sends a sample to the model; `address` is the server's URL, with a slash at its end."""
    path = f"predict/{quote(model, safe='')}" if len(inference.names) > 1 else "predict"
    return inference.model(model).codec.form().curl(address + path)


def _mean_ms(total: Duration) -> float:
    return total.ns / 1e6 / total.count


def _status(fleet: Fleet, model: str) -> str:
    if not fleet.alive:
        return "broken"
    if model in fleet.unloaded:
        return "unloaded"
    if fleet.ready:
        return "ready"
    return "unavailable" if not any(dispatcher.up for dispatcher in fleet.dispatchers) else "draining"


def _chart(
    chosen: ModelPolicy, model: str, mean_rate: float | None, name: str, neighbours: Sequence[Neighbour]
) -> bytes:
    table = actions(chosen, model, mean_rate)
    return orjson.dumps(
        {
            "chart": name,
            "spec": chosen.spec,
            "how": describe_policy(chosen),
            "queue_lengths": table.queue_lengths,
            "rates_hz": table.rates,
            "batch_size": table.batch_size,
            "max_ages": max_ages_at_rates(chosen),
            "objective_ms": 1e3 * chosen.objective,  # infinity is null
            "mean_rate_hz": mean_rate,
            "warnings": objective_warnings(chosen, neighbours),
            "profile": _profile(chosen.profile),
        }
    )


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "source": profile.source,
        "energy_source": profile.energy_source,
        "max_batch_size": profile.max_batch_size,
        "capacity_hz": profile.capacity,
        "service_ms": [1e3 * seconds for seconds in profile.service_times],
        "resource": profile.saved,
        "rate_unit": profile.rate_unit,
        "cost": [1e3 * cost for cost in profile.costs],  # mJ, or ms
    }


def _json(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json", headers=_HEADERS)
