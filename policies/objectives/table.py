"""Policy tables over a grid of loads: solving, and the policy file ("batchwright.policy/1")."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from policies.files import first_error, read_text, write_atomically
from policies.percentile.ages import AgeSolution, actions_of_ages
from policies.profile import Resource
from policies.solver.model import Problem, build_model, check_actions
from policies.solver.solver import Solution, solve
from policies.types import MaxAges, Mix, SpecError

_Rate = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Actions = Annotated[list[Annotated[int, Field(ge=0, le=4096)]], Field(min_length=2, fail_fast=True)]
_Ages = Annotated[list[_Figure], Field(min_length=2, fail_fast=True)]
_NEVER_MS = 1e12  # a maximum age of at least this in a file is infinite


@dataclass(frozen=True, slots=True)
class TableRow:
    """The policy at one load, and its averages there.

    Attributes:
        arrival_rate: 1/s.
        load: rho.
        w2: weight of the mean power, per W or unit of another resource.
        batch_size: action for queue length 0, 1, 2, ...; the last repeats.
        mix: the second table of a randomised policy.
        mean_response_time: s; None where unknown.
        mean_power: W, or of another resource cores or busy share; None where unknown.
        max_ages: the table of maximum ages of a row for a percentile; `batch_size` then has the actions for requests
            that have just arrived.
        share_within: of a row for percentiles, the share of the requests within each bound, in the model.
        power_lower_bound: in the same unit; see `AgeSolution`. None where unknown.
    """

    arrival_rate: float
    load: float
    w2: float
    batch_size: tuple[int, ...]
    mix: Mix | None = None
    mean_response_time: float | None = None
    mean_power: float | None = None
    max_ages: MaxAges | None = None
    share_within: tuple[float, ...] = ()
    power_lower_bound: float | None = None


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """Rows ascending in arrival rate, for one profile.

    Attributes:
        profile: name of the profile.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W or unit of another resource; None where a bound chose one for each row.
        max_batch_size: the largest batch.
        rows: at least one.
        bound: name and value of the bound that chose the weights; None without one.
        resource: whose use per second the mean powers and their lower bounds are.
    """

    profile: str
    w1: float
    w2: float | None
    max_batch_size: int
    rows: tuple[TableRow, ...]
    bound: Mapping[str, float | str] | None = None
    resource: Resource = "energy"


def default_loads() -> list[float]:
    """Return the grid of the server: 49 loads from 0.02 to 0.98."""
    return [round(0.02 * n, 2) for n in range(1, 50)]


def nearest_load(load: float) -> float:
    """The load of that grid that is nearest to a load."""
    grid = default_loads()
    return min(grid, key=lambda each: abs(each - load))


def solve_table(
    problem: Problem,
    loads: Sequence[float],
    find: Callable[[Problem], Solution] = solve,
    bound: Mapping[str, float | str] | None = None,
) -> PolicyTable:
    """Solve a table: the policy of least cost at each load.

    Args:
        problem: the system and the weights; its arrival rate is ignored.
        loads: ascending within 0..1, both excluded.
        find: solves the problem at one load.
        bound: name and value of the bound that chooses the weights, if any.

    Raises:
        SpecError: a load is outside (0, 1), or the problem is malformed.
    """
    model = build_model(problem)
    solutions = (find(replace(problem, arrival_rate=load * model.capacity)) for load in loads)
    return table_of(problem, tuple(solutions), bound)


def table_of(
    problem: Problem, solutions: Sequence[Solution], bound: Mapping[str, float | str] | None = None
) -> PolicyTable:
    """Build the table of these solutions, ascending in arrival rate, with the bound that chose them."""
    rows = tuple(_row_of_solution(solution) for solution in solutions)
    largest = problem.max_batch_size or problem.profile.max_batch_size
    w2 = problem.w2 if bound is None else None
    return PolicyTable(problem.profile.name, problem.w1, w2, largest, rows, bound, problem.profile.saved)


def _row_of_solution(solution: Solution) -> TableRow:
    row = TableRow(
        arrival_rate=solution.arrival_rate,
        load=solution.load,
        w2=solution.w2,
        batch_size=solution.batch_size,
        mix=solution.mix,
        mean_response_time=solution.mean_response_time,
        mean_power=solution.mean_power,
    )
    if not isinstance(solution, AgeSolution):
        return row
    bound = solution.power_lower_bound if solution.power_lower_bound < inf else None
    return replace(row, max_ages=solution.max_ages, share_within=solution.share_within, power_lower_bound=bound)


class _ActionsFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    batch_size: _Actions | None = None
    max_age_ms: _Ages | None = None

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.batch_size is None) == (self.max_age_ms is None):
            raise ValueError("give either batch_size or max_age_ms")
        return self


class _MixFile(_ActionsFile):
    probability: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _RowFile(_ActionsFile):
    arrival_rate_hz: _Rate
    load: _Rate
    w2: _Figure = 0.0
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    mix: _MixFile | None = None
    mean_response_time_ms: _Figure | None = None
    mean_power_w: _Figure | None = None
    share_within: list[Annotated[float, Field(ge=0, le=1)]] = []
    power_lower_bound_w: _Figure | None = None
    mean_resource: _Figure | None = None
    resource_lower_bound: _Figure | None = None

    @property
    def tables(self) -> list[_ActionsFile]:
        return [self] if self.mix is None else [self, self.mix]

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if len({table.batch_size is None for table in self.tables}) > 1:
            raise ValueError("both tables of a mix must have batch_size, or max_age_ms")
        if self.max_batch_size is not None and self.max_age_ms is None:
            raise ValueError("max_batch_size of a row belongs to max_age_ms; leave it out, or give max_age_ms")
        return self


class _PolicyFile(BaseModel):
    """Schema of the policy file; `note` is a comment."""

    model_config = ConfigDict(extra="forbid")

    schema_: Literal["batchwright.policy/1"] = Field(alias="schema")
    profile: str
    policy: str = "smdp"
    note: str = ""
    w1: _Figure = 1.0
    w2: _Figure | None = None
    bound: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)] | str] | None = None
    max_batch_size: int = Field(ge=1, le=4096)
    resource: Resource = "energy"
    rows: Annotated[list[_RowFile], Field(min_length=1, fail_fast=True)]

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        rates = [row.arrival_rate_hz for row in self.rows]
        if sorted(set(rates)) != rates:
            raise ValueError("rows must ascend in arrival_rate_hz")
        for row in self.rows:
            for each in row.tables:
                if each.batch_size is not None:
                    check_actions(each.batch_size, 1, self.max_batch_size)
        return self


def parse_table(text: str, origin: str) -> PolicyTable:
    """Parse a policy file from its text.

    Raises:
        SpecError: the text is not a valid policy file; the message names `origin`.
    """
    try:
        file = _PolicyFile.model_validate_json(text)
    except ValidationError as error:
        raise SpecError(f"policy file {origin!r} is malformed: {first_error(error)}; solve it again") from error
    rows = tuple(_row_of_file(row, file.max_batch_size) for row in file.rows)
    w2 = 0.0 if file.w2 is None and file.bound is None else file.w2
    return PolicyTable(file.profile, file.w1, w2, file.max_batch_size, rows, file.bound, file.resource)


def _row_of_file(row: _RowFile, largest: int) -> TableRow:
    mix, ages = row.mix, None
    if row.max_age_ms is not None:
        others = () if mix is None else _seconds(mix.max_age_ms or ())
        probability = 0.0 if mix is None else mix.probability
        ages = MaxAges(_seconds(row.max_age_ms), probability, others, row.max_batch_size)
    return TableRow(
        arrival_rate=row.arrival_rate_hz,
        load=row.load,
        w2=row.w2,
        batch_size=tuple(row.batch_size or ()) if ages is None else actions_of_ages(ages, largest),
        mix=None if mix is None or mix.batch_size is None else Mix(mix.probability, tuple(mix.batch_size)),
        mean_response_time=None if row.mean_response_time_ms is None else row.mean_response_time_ms / 1e3,
        mean_power=row.mean_resource if row.mean_power_w is None else row.mean_power_w,
        max_ages=ages,
        share_within=tuple(row.share_within),
        power_lower_bound=row.resource_lower_bound if row.power_lower_bound_w is None else row.power_lower_bound_w,
    )


def _seconds(max_age_ms: Sequence[float]) -> tuple[float, ...]:
    return tuple(age / 1e3 if age < _NEVER_MS else inf for age in max_age_ms)


def _milliseconds(ages: Sequence[float]) -> list[float]:
    return [min(1e3 * age, _NEVER_MS) for age in ages]


def load_table(path: str) -> PolicyTable:
    """Load a policy file.

    Raises:
        SpecError: the file does not exist, or it is malformed.
    """
    try:
        return parse_table(read_text(path), path)
    except OSError as error:
        raise SpecError(
            f"no policy file {path!r} ({error.strerror}): give a readable file, or write one with solve-policy --output"
        ) from error


def to_json(table: PolicyTable) -> str:
    """Return the text of the policy file."""
    content = {
        "schema": "batchwright.policy/1",
        "profile": table.profile,
        "policy": "smdp",
        "w1": table.w1,
        **({"w2": table.w2} if table.bound is None else {"bound": dict(table.bound)}),
        "max_batch_size": table.max_batch_size,
        **({} if table.resource == "energy" else {"resource": table.resource}),
        "rows": [_row_json(row, table.resource) for row in table.rows],
    }
    return json.dumps(content, indent=1) + "\n"


def ages_json(ages: MaxAges) -> dict[str, Any]:
    """Return max_age_ms, and mix if there is one, as in policy files and JSON results."""
    table: dict[str, Any] = {"max_age_ms": _milliseconds(ages.max_age)}
    if ages.max_batch_size is not None:
        table["max_batch_size"] = ages.max_batch_size
    if ages.others:
        table["mix"] = {"probability": ages.probability, "max_age_ms": _milliseconds(ages.others)}
    return table


def actions_json(row: TableRow) -> dict[str, Any]:
    """Return batch_size or max_age_ms, and mix if there is one, as in policy files."""
    if row.max_ages is not None:
        return ages_json(row.max_ages)
    if row.mix is None:
        return {"batch_size": row.batch_size}
    return {
        "batch_size": row.batch_size,
        "mix": {"probability": row.mix.probability, "batch_size": row.mix.batch_size},
    }


def certificate_json(row: TableRow, resource: Resource) -> dict[str, Any]:
    """Return the share within the bounds and the lower bound on the resource, where known, as in policy files."""
    key = "power_lower_bound_w" if resource == "energy" else "resource_lower_bound"
    shares = {"share_within": row.share_within} if row.share_within else {}
    return shares | ({} if row.power_lower_bound is None else {key: row.power_lower_bound})


def _row_json(row: TableRow, resource: Resource) -> dict[str, Any]:
    response = None if row.mean_response_time is None else 1e3 * row.mean_response_time
    content = {
        "arrival_rate_hz": row.arrival_rate,
        "load": row.load,
        "w2": row.w2,
        **actions_json(row),
        "mean_response_time_ms": response,
        "mean_power_w" if resource == "energy" else "mean_resource": row.mean_power,
        **certificate_json(row, resource),
    }
    return {key: value for key, value in content.items() if value is not None}


def save_table(table: PolicyTable, path: Path) -> None:
    """Write the policy file atomically.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(path, to_json(table))
