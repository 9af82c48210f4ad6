"""Profiles: service time l(b) and energy zeta(b) of a model on a device, by batch size b and, where known, by length.

A profile is a JSON file ("batchwright.profile/1"). A `Profile` is dense: one value for each size 1..max_batch_size.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar, get_args

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from policies.files import first_error, read_text
from policies.types import ParameterError, SpecError

Source = Literal["measured", "literature", "modelled"]
EnergySource = Literal["nvml", "rapl", "literature", "modelled", "none"]
Resource = Literal["energy", "cpu_time", "busy_time"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
_T = TypeVar("_T")
# Values beyond these bounds (s, J, W) are errors; arithmetic with them would overflow.
_Time = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]
_NonNegative = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_BySize = Annotated[list[_T], Field(max_length=4096, fail_fast=True)]
_Row = Annotated[list[_Time], Field(min_length=1, max_length=4096, fail_fast=True)]


class ProfileFile(BaseModel):
    """Schema of the profile file."""

    model_config = ConfigDict(extra="forbid")

    schema_: Literal["batchwright.profile/1"] = Field(alias="schema")
    name: str = Field(min_length=1)
    model: str = ""
    device: str = ""
    source: Source = "modelled"
    note: str = ""
    batch_size: _BySize[Annotated[int, Field(ge=1, le=4096)]] = Field(min_length=1)
    service_time_s: _BySize[_Time]
    service_time_cv: _BySize[_NonNegative] | None = None
    energy_j: _BySize[_NonNegative] | None = None
    energy_total_j: _BySize[_NonNegative] | None = None
    idle_power_w: _NonNegative | None = None
    energy_source: EnergySource = "none"
    cost_unit: str = Field("J", min_length=1, max_length=20)
    cpu_time_s: _BySize[_Time] | None = None
    resource: Resource | None = None
    stage_service_time_s: _BySize[_Row] | None = None
    length: Annotated[list[Annotated[int, Field(ge=1, le=10**9)]], Field(min_length=1, max_length=4096)] | None = None
    length_service_time_s: _BySize[_Row] | None = None
    max_batch_tokens: int | None = Field(None, ge=1)
    generates: bool | None = Field(None, deprecated="of earlier versions, without effect")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if (self.length is None) != (self.length_service_time_s is None):
            raise ValueError("length and length_service_time_s go together: give both or neither")
        for row in self.length_service_time_s or ():
            if len(row) != len(self.length or ()):
                raise ValueError(f"length_service_time_s has {len(row)} values for {len(self.length or ())} lengths")
        if self.length is not None and sorted(set(self.length)) != self.length:
            raise ValueError(f"length must ascend, not {self.length[:6]}")
        return self

    @model_validator(mode="after")
    def _check_resource(self) -> Self:
        for resource, key in (("energy", "energy_j"), ("cpu_time", "cpu_time_s")):
            if self.resource == resource and getattr(self, key) is None:
                raise ValueError(f"resource is {resource}, but there is no {key}")
        return self

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        if self.stage_service_time_s is not None and len({len(row) for row in self.stage_service_time_s}) > 1:
            raise ValueError("stage_service_time_s must have the same number of stages at every batch size")
        if self.batch_size[0] != 1 or sorted(set(self.batch_size)) != self.batch_size:
            raise ValueError(f"batch_size must ascend from 1, not {self.batch_size[:6]}")
        for name in (
            "service_time_s",
            "service_time_cv",
            "energy_j",
            "energy_total_j",
            "cpu_time_s",
            "stage_service_time_s",
            "length_service_time_s",
        ):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.batch_size):
                raise ValueError(f"{name} has {len(values)} values for {len(self.batch_size)} batch sizes")
        return self


@dataclass(frozen=True)
class Profile:
    """Service time and energy for every batch size 1..max_batch_size.

    Attributes:
        service_times: l(b), s; index b - 1.
        cvs: standard deviation over mean of the service time, by size; None where unknown.
        energies: zeta(b), the energy charged to a batch, J; None where unknown.
        total_energies: energy of a batch, including that of the device's idle power, J.
        idle_power: W.
        cost_unit: unit of the energies: J, or another cost of a batch such as money (journal, remark 2).
        cpu_times: user and system time of the device's process for a batch, s; None where unknown.
        resource: what goals save; None for the first of energy, CPU time and busy time that is known.
        stage_service_times: l of each stage, s; index [b - 1][stage].
        lengths: request lengths at which service times are known, ascending; None if the service time does not depend
            on lengths. A length is the size of the dimension that is padded.
        length_service_times: l of a batch by the length of its longest request, s; index [b - 1][index of the length].
        max_batch_tokens: the largest product of batch size and longest length; None for no limit.
    """

    name: str
    service_times: tuple[float, ...]
    model: str = ""
    device: str = ""
    source: Source = "modelled"
    note: str = ""
    cvs: tuple[float, ...] | None = None
    energies: tuple[float, ...] | None = None
    total_energies: tuple[float, ...] | None = None
    idle_power: float | None = None
    energy_source: EnergySource = "none"
    cost_unit: str = "J"
    cpu_times: tuple[float, ...] | None = None
    resource: Resource | None = None
    stage_service_times: tuple[tuple[float, ...], ...] | None = None
    lengths: tuple[int, ...] | None = None
    length_service_times: tuple[tuple[float, ...], ...] | None = None
    max_batch_tokens: int | None = None

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Profile":
        """Load a shipped profile by name, or a profile file by path.

        Raises:
            SpecError: there is no such profile, or the file is invalid.
        """
        return load_profile(str(name_or_path))

    @classmethod
    def from_measurements(
        cls,
        name: str,
        batch_size: Sequence[int],
        service_time_s: Sequence[float],
        energy_j: Sequence[float] | None = None,
    ) -> "Profile":
        """Return the profile of measured values; sizes between the given ones are interpolated linearly.

        Args:
            name: of the profile.
            batch_size: measured sizes, ascending from 1.
            service_time_s: of a batch of each size, s.
            energy_j: of a batch of each size, J; None where unknown.

        Raises:
            SpecError: the numbers of values differ, or a value is out of range.
        """
        fields = {"batch_size": batch_size, "service_time_s": service_time_s, "energy_j": energy_j}
        values = {key: np.asarray(value).tolist() for key, value in fields.items() if value is not None}
        return parse_profile(json.dumps({"schema": "batchwright.profile/1", "name": name, **values}), name)

    @property
    def max_batch_size(self) -> int:
        """The largest batch size of the profile."""
        return len(self.service_times)

    def service_time(self, batch_size: int, length: float | None = None) -> float:
        """Return l(b), s; `length` is that of the longest request of the batch.

        Interpolated linearly between the lengths, extrapolated above them, constant below the first. A profile without
        lengths ignores the length.
        """
        if length is None or self.lengths is None or self.length_service_times is None:
            return self.service_times[batch_size - 1]
        times, i = self.length_service_times[batch_size - 1], bisect_right(self.lengths, length)
        if i == 0 or len(times) == 1:
            return times[0]
        i = min(i, len(times) - 1)
        low, high = self.lengths[i - 1], self.lengths[i]
        return times[i - 1] + (times[i] - times[i - 1]) * (length - low) / (high - low)

    def time_alone(self, length: float) -> float:
        """Return the service time of a request alone, s, which is its size; 0 if the profile has no lengths."""
        return 0.0 if self.lengths is None else self.service_time(1, length)

    def length_alone(self, time: float) -> float:
        """Return the length of a request that takes a time alone, s, the inverse of `time_alone`; 0 without lengths."""
        if self.lengths is None or self.length_service_times is None:
            return 0.0
        return float(np.interp(time, self.length_service_times[0], self.lengths))

    @property
    def saved(self) -> Resource:
        """The resource that goals save."""
        if self.resource is not None:
            return self.resource
        if self.energies is not None:
            return "energy"
        return "busy_time" if self.cpu_times is None else "cpu_time"

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """What a batch of 1, 2, ... takes of that resource: J, CPU s, or busy s, which is l(b)."""
        known = {"energy": self.energies, "cpu_time": self.cpu_times, "busy_time": self.service_times}[self.saved]
        assert known is not None  # a profile that names a resource has it
        return known

    @property
    def rate_unit(self) -> str:
        """Unit of the costs per second: W (or the cost unit per second), cores, or busy share."""
        if self.saved != "energy":
            return "cores" if self.saved == "cpu_time" else "busy share"
        return "W" if self.cost_unit == "J" else f"{self.cost_unit}/s"

    @cached_property
    def charged(self) -> "Profile":
        """The profile with its costs in place of its energies, for simulations that add them up; its unit is theirs."""
        return replace(self, energies=self.costs, total_energies=None, resource="energy")

    def saving(self, resource: Resource | None) -> "Profile":
        """Return the profile with this resource as the one that goals save; None keeps it.

        Raises:
            SpecError: the profile does not know it.
        """
        if resource is None:
            return self
        if (resource == "energy" and self.energies is None) or (resource == "cpu_time" and self.cpu_times is None):
            key = "energy_j" if resource == "energy" else "cpu_time_s"
            raise ParameterError(
                *("resource", resource),
                f"is not in profile {self.name!r}; give a profile with {key}, or resource=busy_time",
            )
        return replace(self, resource=resource)

    def energy(self, batch_size: int) -> float | None:
        """Return zeta(b), J; None where the profile has no energies."""
        return None if self.energies is None else self.energies[batch_size - 1]

    @cached_property
    def powers(self) -> tuple[float, ...]:
        """Costs per second while a batch of 1, 2, ... is served: W, cores, or busy share, which is 1."""
        return tuple(cost / time for cost, time in zip(self.costs, self.service_times, strict=True))

    @cached_property
    def capacity(self) -> float:
        """The largest service rate, max over b of b / l(b), 1/s."""
        return max((b + 1) / t for b, t in enumerate(self.service_times))

    @property
    def stages(self) -> int:
        """Number of stages K; 1 where no stage times are known."""
        return 1 if self.stage_service_times is None else len(self.stage_service_times[0])

    def span(self, batch_size: int, first: int = 0, last: int | None = None) -> float:
        """Return the summed time of the stages first..last - 1 (None: to the end) for batches of that size, s.

        This is the sum of NodeLatency(n) in LazyBatching. Stages beyond the last one take no time.
        """
        times = self._cumulative_stage_times[batch_size - 1]
        end = len(times) - 1
        return times[end if last is None else min(last, end)] - times[min(first, end)]

    def launch_time(self, batch_size: int, first: int = 0, last: int | None = None) -> float:
        """Return the time of a launch of these stages, s; a launch of all stages has no overhead between stages."""
        whole = first == 0 and (last is None or last >= self.stages)
        return self.service_time(batch_size) if whole else self.span(batch_size, first, last)

    def launch_energy(self, batch_size: int, first: int = 0, last: int | None = None) -> float | None:
        """Return the energy of a launch, J, split among stages in proportion to their time; None where unknown."""
        energy = self.energy(batch_size)
        if energy is None or (first == 0 and (last is None or last >= self.stages)):
            return energy
        return energy * self.span(batch_size, first, last) / self.span(batch_size)

    @property
    def stage_overhead(self) -> tuple[float, ...]:
        """The sum of the stage times l_i(b) over l(b), by size; above 1 by the overhead between stages."""
        return tuple(self.span(b) / t for b, t in enumerate(self.service_times, 1))

    @cached_property
    def _cumulative_stage_times(self) -> tuple[tuple[float, ...], ...]:
        """By size, the time from the start of the batch to the start of each stage and to the end, s."""
        rows = self.stage_service_times or tuple((t,) for t in self.service_times)
        return tuple(tuple(accumulate(row, initial=0.0)) for row in rows)

    def in_stages(self, stages: int) -> "Profile":
        """Return the profile with this many stages of equal length and no overhead; measured stage times are dropped.

        Raises:
            SpecError: fewer than one stage.
        """
        if stages < 1:
            raise SpecError(f"{stages} stages are invalid: give 1 or more")
        return replace(self, stage_service_times=tuple((t / stages,) * stages for t in self.service_times))

    def time_to_serve(self, requests: int) -> float:
        """Return the time to serve that many requests in batches as large as possible, s."""
        full, rest = divmod(requests, self.max_batch_size)
        return full * self.service_times[-1] + (self.service_times[rest - 1] if rest else 0.0)

    def min_time_to_serve(self, requests: int) -> float:
        """Return the time to serve that many requests of the least length in batches as large as possible, s."""
        time, largest = self.time_to_serve(requests), self.max_batch_size
        if self.lengths is None:
            return time
        return self.service_time(largest, self.lengths[0]) / self.service_time(largest) * time

    def truncated(self, max_batch_size: int | None) -> "Profile":
        """Return the profile cut at `max_batch_size`; None keeps all sizes.

        Raises:
            SpecError: the profile does not have that size.
        """
        if max_batch_size is None or max_batch_size == self.max_batch_size:
            return self
        if not 1 <= max_batch_size < self.max_batch_size:
            raise ParameterError(
                *("max_batch_size", f"{max_batch_size}"),
                f"is outside 1..{self.max_batch_size}, the sizes of profile {self.name!r}; choose one of those, or "
                f"profile the model up to {max_batch_size}",
            )
        b = max_batch_size
        return replace(
            self,
            service_times=self.service_times[:b],
            cvs=self.cvs and self.cvs[:b],
            energies=self.energies and self.energies[:b],
            total_energies=self.total_energies and self.total_energies[:b],
            cpu_times=self.cpu_times and self.cpu_times[:b],
            stage_service_times=self.stage_service_times and self.stage_service_times[:b],
            length_service_times=self.length_service_times and self.length_service_times[:b],
        )

    def to_json(self) -> str:
        """Return the text of the profile file, with every size."""
        content = {
            "schema": "batchwright.profile/1",
            "name": self.name,
            "model": self.model,
            "device": self.device,
            "source": self.source,
            "note": self.note,
            "batch_size": list(range(1, self.max_batch_size + 1)),
            "service_time_s": self.service_times,
            "service_time_cv": self.cvs,
            "energy_j": self.energies,
            "energy_total_j": self.total_energies,
            "idle_power_w": self.idle_power,
            "energy_source": self.energy_source,
            "cost_unit": None if self.cost_unit == "J" else self.cost_unit,
            "cpu_time_s": self.cpu_times,
            "resource": self.resource,
            "stage_service_time_s": self.stage_service_times,
            "length": self.lengths,
            "length_service_time_s": self.length_service_times,
            "max_batch_tokens": self.max_batch_tokens,
        }
        return json.dumps({k: v for k, v in content.items() if v is not None}, indent=1) + "\n"

    @property
    def varies_by_length(self) -> bool:
        """Whether the service time depends on the lengths of the requests."""
        return self.lengths is not None

    def without_lengths(self) -> "Profile":
        """Return the profile with the service times by batch size alone."""
        return replace(self, lengths=None, length_service_times=None)

    def min_service_time(self, batch_size: int, first: int = 0) -> float:
        """Return the least service time of a batch from stage `first` to the end, s: that of the least length."""
        batch_size = min(batch_size, self.max_batch_size)
        if self.lengths is None:
            return self.launch_time(batch_size, first)
        return self.service_time(batch_size, self.lengths[0])

    def max_service_time(self, batch_size: int, first: int = 0) -> float:
        """Return the greatest service time of a batch from stage `first` to the end, s: that of the greatest length."""
        if self.lengths is None:
            return self.min_service_time(batch_size, first)
        return self.service_time(batch_size, self.lengths[-1])


def resource_of(text: str | None) -> Resource | None:
    """Return the resource of this name; None stays.

    Raises:
        ParameterError: there is none.
    """
    for resource in RESOURCES:
        if text == resource:
            return resource
    if text is not None:
        raise ParameterError("resource", repr(text), f"is none of {', '.join(RESOURCES)}; give one of them")
    return None


def shipped_profiles() -> list[str]:
    """Return the names of the profiles shipped with the package."""
    folder = resources.files("policies") / "profiles"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def load_profile(name_or_path: str) -> Profile:
    """Load a shipped profile by name, or a profile file by path.

    Raises:
        SpecError: there is no such profile, or the file is invalid.
    """
    shipped = resources.files("policies") / "profiles" / f"{name_or_path}.json"
    if name_or_path in shipped_profiles():
        return parse_profile(shipped.read_text(), name_or_path)
    try:
        return parse_profile(read_text(name_or_path), name_or_path)
    except OSError as error:
        known = ", ".join(shipped_profiles())
        remedy = f"give a readable file, or one of {known}"
        raise SpecError(f"no profile {name_or_path!r} ({error.strerror}): {remedy}") from error


def parse_profile(text: str, origin: str) -> Profile:
    """Parse a profile from its JSON text; sizes between the given ones are interpolated linearly.

    Raises:
        SpecError: the text is not a valid profile; the message names `origin`.
    """
    try:
        return _dense(ProfileFile.model_validate_json(text))
    except ValidationError as error:
        raise SpecError(f"profile {origin!r} is malformed: {first_error(error)}; correct the file") from error


def _dense(file: ProfileFile) -> Profile:
    def dense(values: Sequence[float] | None) -> tuple[float, ...] | None:
        return None if values is None else interpolate(file.batch_size, values)

    return Profile(
        name=file.name,
        service_times=interpolate(file.batch_size, file.service_time_s),
        model=file.model,
        device=file.device,
        source=file.source,
        note=file.note,
        cvs=dense(file.service_time_cv),
        energies=dense(file.energy_j),
        total_energies=dense(file.energy_total_j),
        idle_power=file.idle_power_w,
        energy_source=file.energy_source,
        cost_unit=file.cost_unit,
        cpu_times=dense(file.cpu_time_s),
        resource=file.resource,
        stage_service_times=_dense_rows(file.batch_size, file.stage_service_time_s),
        lengths=None if file.length is None else tuple(file.length),
        length_service_times=_dense_rows(file.batch_size, file.length_service_time_s),
        max_batch_tokens=file.max_batch_tokens,
    )


def _dense_rows(sizes: Sequence[int], rows: Sequence[Sequence[float]] | None) -> tuple[tuple[float, ...], ...] | None:
    if rows is None:
        return None
    columns = [interpolate(sizes, column) for column in zip(*rows, strict=True)]
    return tuple(zip(*columns, strict=True))


def interpolate(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, ...]:
    """Return a value for every size 1..sizes[-1], interpolated linearly; `sizes` ascend from 1."""
    if len(sizes) == sizes[-1]:  # already dense: keep the values exactly
        return tuple(values)
    return tuple(np.interp(np.arange(1, sizes[-1] + 1), sizes, values).tolist())


@dataclass(frozen=True)
class AffineFit:
    """The line slope * b + intercept, and its largest relative error over the fitted sizes."""

    slope: float
    intercept: float
    max_relative_error: float

    def at(self, batch_size: int) -> float:
        """Return the fitted value for a batch size, in the unit of the samples."""
        return self.slope * batch_size + self.intercept


@dataclass(frozen=True)
class IsotonicFit:
    """The non-decreasing values nearest to the samples, one for each fitted size."""

    values: tuple[float, ...]
    max_relative_error: float


def fit_affine(batch_sizes: Sequence[int], values: Sequence[float]) -> AffineFit:
    """Fit a line by least squares of the relative error, so that small and large batches have equal weight."""
    b, y = np.asarray(batch_sizes, float), np.asarray(values, float)
    if len(b) == 1:
        return AffineFit(0.0, float(y[0]), 0.0)
    design = np.column_stack([b, np.ones_like(b)]) / y[:, None]
    slope, intercept = np.linalg.lstsq(design, np.ones_like(y), rcond=None)[0].tolist()
    return AffineFit(slope, intercept, _largest_relative_error(slope * b + intercept, y))


def fit_isotonic(values: Sequence[float]) -> IsotonicFit:
    """Fit by isotonic regression in order of batch size, weighted by 1 / value^2 (relative error)."""
    y = np.asarray(values, float)
    fitted = np.asarray(scipy.optimize.isotonic_regression(y, weights=1.0 / y**2).x)
    return IsotonicFit(tuple(fitted.tolist()), _largest_relative_error(fitted, y))


def _largest_relative_error(fitted: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(np.max(np.abs(fitted / y - 1.0)))
