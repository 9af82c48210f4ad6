"""Fixtures of the tests of load generation."""

from multiprocessing import get_context

import pytest

from loadgen import processes


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of a run from one that has imported what they need, which takes a new process 0.4 s."""
    context = get_context("forkserver")
    context.set_forkserver_preload([processes.__name__])
    monkeypatch.setattr(processes, "get_context", lambda _: context)
