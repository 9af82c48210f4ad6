"""Statistics of each model since the start, as the Open Inference Protocol defines them."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Duration:
    """Number of events and their total duration in ns, the unit of the Open Inference Protocol."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Durations of the batches of one size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Statistics of one model since the start.

    Attributes:
        name: the model's name.
        last_inference_ms: Unix time of the last inference in ms; 0 before the first.
        inference_count: number of samples served.
        execution_count: number of batches run.
        success: successful calls, from arrival to response.
        fail: failed calls, from arrival to response.
        queue: waiting times of calls.
        compute_input: preparation of inputs of calls.
        compute_infer: execution of calls.
        compute_output: extraction of outputs of calls.
        batches: statistics by batch size; they count batches.
    """

    name: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    batches: tuple[BatchStatistics, ...] = ()


@dataclass(slots=True)
class _Tally:
    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    def duration(self) -> Duration:
        return Duration(self.count, round(1e9 * self.seconds))


@dataclass(slots=True)
class _Model:
    samples: int = 0
    last_ms: int = 0
    success: _Tally = field(default_factory=_Tally)
    fail: _Tally = field(default_factory=_Tally)
    queue: _Tally = field(default_factory=_Tally)
    decode: _Tally = field(default_factory=_Tally)
    infer: _Tally = field(default_factory=_Tally)
    batches: dict[int, _Tally] = field(default_factory=dict)


class Statistics:
    """Counts and durations of calls and batches."""

    def __init__(self) -> None:
        """Start without counts."""
        self._models: dict[str, _Model] = {}

    def batch_completed(self, model: str, finished: int, whole: tuple[int, float] | None) -> None:
        """Add a batch that completed `finished` samples.

        Args:
            model: the model's name.
            finished: number of samples.
            whole: batch size and service time, s; None if the batch ran stage by stage.
        """
        tally = self._of(model)
        tally.samples += finished
        tally.last_ms = time.time_ns() // 1_000_000
        if whole is not None:
            size, service = whole
            tally.batches.setdefault(size, _Tally()).add(service)

    def call_completed(self, model: str, decode: float, waiting: float, service: float, total: float) -> None:
        """Add a successful call; times in s."""
        tally = self._of(model)
        for part, seconds in (
            (tally.success, total),
            (tally.queue, waiting),
            (tally.decode, decode),
            (tally.infer, service),
        ):
            part.count += 1
            part.seconds += seconds

    def call_failed(self, model: str, total: float) -> None:
        """Add a failed call and its response time, s."""
        self._of(model).fail.add(total)

    def of(self, model: str) -> ModelStatistics:
        """Return the model's statistics since the start."""
        tally = self._of(model)
        nothing = Duration()
        return ModelStatistics(
            name=model,
            last_inference_ms=tally.last_ms,
            inference_count=tally.samples,
            execution_count=sum(t.count for t in tally.batches.values()),
            success=tally.success.duration(),
            fail=tally.fail.duration(),
            queue=tally.queue.duration(),
            compute_input=tally.decode.duration(),
            compute_infer=tally.infer.duration(),
            compute_output=Duration(tally.success.count, 0),
            batches=tuple(
                BatchStatistics(size, nothing, t.duration(), nothing) for size, t in sorted(tally.batches.items())
            ),
        )

    def _of(self, model: str) -> _Model:
        tally = self._models.get(model)
        if tally is None:
            tally = self._models[model] = _Model()
        return tally
