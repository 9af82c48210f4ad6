"""The admin routes: read and swap the policies, list devices, and take them out of service."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from policies.catalog import ModelPolicy, names_file
from policies.objectives.table import actions_json, certificate_json
from policies.planning.reachability import Neighbour, objective_warnings
from policies.profile import ProfileFile
from server.api.inference import Inference
from server.api.openapi import KEYED_ERRORS, MODEL_ERRORS, documented, json_content
from server.api.schemas import Device, DeviceChange, Pipeline, Policy, PolicyChange
from server.errors import BadInputError
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.scheduling.policy_swap import swap
from server.scheduling.solver_process import choose_in_process, solve_again_in_process
from server.transport.memory_budget import MemoryBudget
from server.transport.request import BodyLimit, RequestContext

_MAX_CHANGE = 2**16  # bytes of a request body
_Change = TypeVar("_Change", bound=BaseModel)


def add_admin(app: FastAPI, inference: Inference) -> None:
    """Add the routes below /admin."""
    _add_policies(app, inference)
    _add_devices(app, inference)


def _add_policies(app: FastAPI, inference: Inference) -> None:
    fleet = inference.fleet
    swapping = asyncio.Lock()  # swaps run in order of arrival

    async def swap_policy(model: str, spec_of: Callable[[ModelPolicy], str]) -> dict[str, Any]:
        name = inference.name_with_policy(model)

        def choose_policy(current: ModelPolicy) -> ModelPolicy:
            known = current.solved_sizes or current.solved_shares  # which are kept
            if known and spec_of(current) == current.spec:
                return solve_again_in_process(current, current.profile, 1.0, current.margin)
            chosen = choose_in_process(spec_of(current), current.profile, current.defaults)
            return replace(chosen, promised=current.promised)

        async with swapping:
            await swap(fleet, inference.metrics, {name: choose_policy})
        return await describe(name)

    async def describe(name: str) -> dict[str, Any]:
        policies: dict[str, dict[str, Any]] = {}
        for dispatcher in fleet.devices_of(name):
            chosen = dispatcher.chosen[name]
            warnings = await asyncio.to_thread(objective_warnings, chosen, neighbours_of(dispatcher, name))
            policies[dispatcher.device] = describe_policy(chosen, dispatcher.queue.arrival_rate(name), warnings)
        first = policies[fleet.first_of(name).device]
        return first if len(policies) == 1 else first | {"devices": policies}

    reading = documented("The current policy, its expected response time and power", Policy, MODEL_ERRORS)
    profile_route = documented(
        "The profile of the model's first device as it is known now, as a profile file", ProfileFile, MODEL_ERRORS
    )
    changed = documented("Swap the policy", Policy, (*MODEL_ERRORS, 413), body=json_content(PolicyChange))
    solved = documented("Solve again for the current profile", Policy, (*MODEL_ERRORS, 413))

    @app.get("/admin/models/{model}/policy", response_model_exclude_unset=True, **reading)
    async def read_policy(model: str) -> dict[str, Any]:
        return await describe(inference.name_with_policy(model))

    @app.get("/admin/models/{model}/profile", **profile_route)
    async def read_profile(model: str) -> Response:
        name = inference.name_with_policy(model)
        return Response(fleet.first_of(name).learned(name).to_json(), media_type="application/json")

    @app.put("/admin/models/{model}/policy", response_model_exclude_unset=True, **changed)
    async def set_policy(model: str, request: Request) -> dict[str, Any]:
        change = await _read_change(request, inference.budget, PolicyChange, '{"policy": "SPEC"}')
        if names_file(change.policy):
            raise BadInputError(
                f"the policy {change.policy[:80]!r} is a file, and requests cannot name files; "
                "start the server with it, or send a policy spec"
            )
        return await swap_policy(model, lambda _: change.policy)

    @app.post("/admin/models/{model}/solve", response_model_exclude_unset=True, **solved)
    async def solve(model: str) -> dict[str, Any]:
        return await swap_policy(model, lambda current: current.spec)


def _add_devices(app: FastAPI, inference: Inference) -> None:
    fleet = inference.fleet

    reading = documented("The devices", list[Device], KEYED_ERRORS)
    errors = (*MODEL_ERRORS, 413, 503)
    changed = documented("Retire or resume a device", Device, errors, body=json_content(DeviceChange))

    @app.get("/admin/devices", **reading)
    async def read_devices() -> list[dict[str, Any]]:
        return describe_devices(fleet)

    @app.get("/admin/pipelines", **documented("The pipelines", list[Pipeline], KEYED_ERRORS))
    async def read_pipelines() -> list[dict[str, Any]]:
        return describe_pipelines(inference)

    @app.put("/admin/devices/{index}", **changed)
    async def set_device(index: int, request: Request) -> dict[str, Any]:
        change = await _read_change(request, inference.budget, DeviceChange, '{"serving": true}, or false')
        fleet.set_serving(index, change.serving)
        return describe_devices(fleet)[index]


async def _read_change(request: Request, budget: MemoryBudget, kind: type[_Change], expected: str) -> _Change:
    context: RequestContext = request.scope["state"]["context"]
    with budget.reservation() as memory:
        limit = BodyLimit(_MAX_CHANGE, f"send {expected}")
        body = bytes(await context.read_body(limit, memory.grow_to))
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        what = "policy" if kind is PolicyChange else "device"
        raise BadInputError(f"the body is not a valid {what} change ({message}); send {expected}") from error


def describe_pipelines(inference: Inference) -> list[dict[str, Any]]:
    """Describe the pipelines for the admin routes and the dashboard."""
    fleet, pipelines = inference.fleet, inference.pipelines
    return [
        {
            "name": name,
            "open_calls": each.open_calls,
            "steps": [
                {
                    "model": model,
                    "requests": each.steps.get(model),
                    "queue_length": pipelines[model].open_calls if model in pipelines else fleet.queue_length(model),
                }
                for model in each.models
            ],
            "processes": each.processes(),
        }
        for name, each in pipelines.items()
    ]


def describe_devices(fleet: Fleet) -> list[dict[str, Any]]:
    """Describe the devices for the admin routes and the dashboard."""
    return [
        {
            "device": dispatcher.device,
            "serving": fleet.serves(dispatcher),
            "up": dispatcher.up,
            "open_calls": dispatcher.open_calls,
            "models": {model: _describe_model(dispatcher, model) for model in dispatcher.chosen},
        }
        for dispatcher in fleet.dispatchers
    ]


def neighbours_of(dispatcher: Dispatcher, model: str) -> list[Neighbour]:
    """The other models of a device, by their rates as measured now."""
    others = {name: chosen for name, chosen in dispatcher.chosen.items() if name != model}
    return [Neighbour(name, each.profile, dispatcher.queue.arrival_rate(name)) for name, each in others.items()]


def _describe_model(dispatcher: Dispatcher, model: str) -> dict[str, Any]:
    chosen, find_worker = dispatcher.chosen[model], getattr(dispatcher.executor, "worker_of", None)
    return {
        "policy": chosen.spec,
        "profile": chosen.profile.name,
        "queue_length": dispatcher.queue.length(model),
        "oldest_age_ms": round(1e3 * dispatcher.queue.oldest_age(model), 3),
        "arrival_rate_hz": dispatcher.queue.arrival_rate(model),
        "slowdown": round(dispatcher.queue.slowdown(model), 3),
        "capacity_hz": chosen.profile.capacity,
        **({} if find_worker is None else find_worker(model)),
    }


def describe_policy(chosen: ModelPolicy, arrival_rate: float, warnings: Sequence[str]) -> dict[str, Any]:
    """Describe a policy for the admin routes, with the expected values of the table's row for this rate, 1/s."""
    rows = [] if chosen.table is None else chosen.table.rows
    response, power = _expected(chosen, arrival_rate)
    resource = chosen.profile.saved if chosen.table is None else chosen.table.resource
    metered = resource == "energy"
    return {
        "name": chosen.name,
        "spec": chosen.spec,
        "parameters": dict(chosen.parameters),
        "profile": chosen.profile.name,
        "rows": [
            {
                "arrival_rate_hz": row.arrival_rate,
                "load": row.load,
                **actions_json(row),
                **certificate_json(row, resource),
            }
            for row in rows
        ],
        "expected_response_time_ms": None if response is None else 1e3 * response,
        "expected_power_w": power if metered else None,
        "resource": resource,
        "resource_unit": replace(chosen.profile, resource=resource).rate_unit,
        "expected_resource": None if metered else power,
        "arrival_rate_hz": arrival_rate,
        "objective_ms": 1e3 * chosen.objective if isfinite(chosen.objective) else None,
        "age_margin_ms": 1e3 * chosen.margin,
        "solved_for_sizes": len(chosen.solved_sizes),
        "warnings": [*warnings],
    }


def _expected(chosen: ModelPolicy, arrival_rate: float) -> tuple[float | None, float | None]:
    """Return mean response time, s, and mean power of a solved table at this rate; None without a table."""
    if chosen.table is None:
        return None, None
    rows = chosen.table.rows
    if arrival_rate < rows[0].arrival_rate / 2:  # every request is launched at once, nearly always alone
        known = chosen.table.resource == chosen.profile.saved  # a policy file may save another resource
        return chosen.profile.service_time(1), arrival_rate * chosen.profile.costs[0] if known else None
    row = min(rows, key=lambda row: abs(row.arrival_rate - arrival_rate))
    return row.mean_response_time, row.mean_power
