"""What PromQL expressions name, and what the server exports: by name and label."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from policies.planning.prediction import Prediction
from policies.types import BatchKey, Launch, Request
from server.energy.meters import CountingMeter, LastReading
from server.telemetry.batch_record import BatchRecord
from server.telemetry.metrics import Metrics

ALWAYS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "severity"}}  # Prometheus' own
_WORDS = {
    *("sum", "count", "max", "by", "on", "group_left", "and", "or", "unless", "offset"),
    *("rate", "increase", "vector", "scalar", "absent", "histogram_quantile", "min_over_time", "avg_over_time"),
}


def names(expression: str) -> set[str]:
    """The metrics that an expression names."""
    bare = re.sub(r"""(["']).*?\1|\[[^\]]*\]|\$\w+""", "", expression)
    bare = re.sub(r"\{[^}]*\}", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right) *\([^)]*\)", r"\1", bare)
    return {word for word in re.findall(r"(?<![\w.])[a-zA-Z_:][\w:]*", bare) if word not in _WORDS}


def labels(expression: str) -> Iterator[tuple[str, str]]:
    """(metric, label) of each label matcher."""
    for metric, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+) *(?:=~|!~|!=|=)", matchers):
            yield metric, label


@cache
def exported() -> Mapping[str, frozenset[str]]:
    """What the server exports once everything has happened to it: names of samples and their labels."""
    found: dict[str, set[str]] = {}
    for sample in _samples():
        found.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return {name: frozenset(known) for name, known in found.items()}


def families() -> list[tuple[str, str, list[str], str]]:
    """Name without its prefix, type, labels and help of each metric."""
    return [
        (
            each.name.removeprefix("batchwright_"),
            each.type,
            sorted({label for sample in each.samples for label in sample.labels} - {"le"}),
            each.documentation,
        )
        for each in _families(of_each_kind=True)
    ]


def _samples() -> Iterator[Sample]:
    for family in _families():
        yield from (sample for sample in family.samples if not sample.name.endswith("_created"))  # serve-model has none


def _families(of_each_kind: bool = False) -> Iterable[Metric]:
    """The metrics of one model; `of_each_kind`: also those of pipelines, priority levels and predictions."""
    metrics = Metrics()
    request = Request(0, 0.0, BatchKey("m"), 0.5, 9.0, payload=None)
    request.started = 0.1
    metrics.watch("m", lambda: 0.0, lambda: 0.0, lambda: 0.0)
    metrics.weights("m", random=False)
    metrics.watch_backlog(lambda: 0.0)
    metrics.watch_device("d", lambda: True)
    meter = CountingMeter()
    metrics.watch_meter("d", meter.source, LastReading(meter))
    asyncio.run(metrics.read_meters())
    metrics.policy("m", "d", "greedy", "greedy")
    metrics.adapted("m", "drift")
    metrics.objective("m", 0.1, 0.95)
    metrics.objective_level("m", "d", 0)
    metrics.objective_margin("m", "d", 0.0)
    metrics.batch_completed(
        BatchRecord("d", "greedy", Launch([request]), 0, True, [request], 0.0, 0.1, 0.1, "nvml", cpu_time=0.1)
    )
    metrics.requests_completed("d", [request])
    metrics.call_completed("m", "d", 1.0, 1, 0.9)
    metrics.outcome("m", "ok")
    metrics.rejected("m", "queue_full", 1)
    metrics.device_fault("m", "RuntimeError")
    metrics.idle_gap("d", 0.001)
    metrics.restarted("d", "died")
    if of_each_kind:
        metrics.predicted("m", "d", Prediction(0.1, 0.2, 2.0))
        metrics.watch_pipeline("p", lambda: 0.0)
        metrics.pipeline_step("p", "m", 0.1)
        metrics.call_completed("m", "d", 1.0, 1, 0.9, level=1)
    found: Iterable[Metric] = text_string_to_metric_families(metrics.render().decode())
    return [family for family in found if not family.name.endswith("_created")]
