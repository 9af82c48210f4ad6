"""Counters and histograms of the call path, against those of prometheus_client."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from server.telemetry.series import CounterSeries, HistogramSeries


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_histogram_is_exported_as_that_of_the_client_library() -> None:
    bounds, values = [0.5, 1.0, 2.0], [0.1, 0.5, 0.500001, 1.0, 2.0, 7.0, 7.0]
    own, reference = CollectorRegistry(), CollectorRegistry()
    series = HistogramSeries("x_seconds", "Text", bounds, ("model", "device"))
    own.register(series)
    expected = Histogram("x_seconds", "Text", ("model", "device"), buckets=bounds, registry=reference)
    assert lines(own) == lines(reference), "the description is exported before the first value, too"
    for value in values:
        series.observe(("m", "d"), value)
        expected.labels("m", "d").observe(value)
    series.observe(("other", "d"), 1.5, 3)
    for _ in range(3):
        expected.labels("other", "d").observe(1.5)
    assert lines(own) == lines(reference)


def test_a_counter_has_one_series_by_labels_and_exports_zero() -> None:
    registry = CollectorRegistry()
    series = CounterSeries("x", "Text", ("model",))
    registry.register(series)
    series.add(("a",), 0)
    series.add(("b",))
    series.add(("b",), 1.5)
    assert lines(registry)[-2:] == ['x_total{model="a"} 0.0', 'x_total{model="b"} 2.5']
