"""Fixtures of the tests of load generation."""

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from loadgen import processes
from policies.charts.figure_file import save_figure


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of a run from one that has imported what they need, which takes a new process 0.4 s."""
    context = get_context("forkserver")
    context.set_forkserver_preload([processes.__name__])
    monkeypatch.setattr(processes, "get_context", lambda _: context)


@pytest.fixture
def coarse_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write plots with few pixels, whose compression takes most of the time."""

    def save(figure: Any, path: Path, dpi: int) -> None:
        save_figure(figure, path, dpi // 4)

    monkeypatch.setattr("loadgen.plots.save_figure", save)
