"""Settings of the benchmarks' tests."""

import pytest


@pytest.fixture
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each launch of a network a few times in place of 30."""
    monkeypatch.setattr("benchmarks.support.gpu_kernels._REPEATS", 2)
