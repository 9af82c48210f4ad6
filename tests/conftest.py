"""Settings of the test processes, and of the processes that they start."""

import gc
import os
import signal
import sys
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
settings.load_profile("tests")

# Tests run side by side. The threads of a linear algebra library wait busily for each other, on processors that others
# use: small problems then take ten times as long.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

os.environ["GOGC"] = "1000"  # promtool takes a quarter less time if it rarely collects garbage

gc.disable()  # until all tests are collected: modules stay in memory, and a collection would visit all of their objects

_modules = set[str]()  # whose objects are excluded from garbage collection

# a background job of a shell inherits that SIGINT is ignored, and one of nohup that SIGHUP is
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Start servers and commands by a fork."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()  # this process collects no tests, but lets others run them
        config.option.testrunuid = config.option.testrunuid or uuid4().hex  # names the fork servers, also for workers
        os.environ["PYTEST_XDIST_TESTRUNUID"] = config.option.testrunuid
    from benchmarks.support import harness  # not at the top: numpy reads the environment when it is imported
    from tests.support.fork_server import run_process, start_process

    harness.start_process = start_process  # type: ignore[assignment]  # a ForkedProcess has what servers need of Popen
    harness.run_process = run_process


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Start the workers by forks, too."""
    from tests.support.fork_server import import_early
    from tests.support.forked_worker import fork_workers

    import_early()
    fork_workers(specs)


@pytest.hookimpl(trylast=True)  # after tests have been deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let two processes begin with slow tests and those that wait for servers, while the others compute.

    Each process gets a part of the list: the first one its start, and another one, if their number is even, its middle.
    """
    system = [item for item in items if item.nodeid.startswith("tests/system/")]
    slow = [item for item in items if item.get_closest_marker("slow")]
    files = sorted({item.path for item in system})
    second = [item for item in system if item.path in files[::2] and item not in slow]
    first = list(dict.fromkeys([*slow, *system, *items]))
    for item in second:
        first.remove(item)
    middle = len(items) // 2
    items[:] = [*first[:middle], *second, *first[middle:]]


def pytest_collection_finish() -> None:
    """Exclude the objects of all modules from garbage collection, which takes 0.3 s with them."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # collect more rarely: a collection takes some milliseconds
    gc.enable()
    _modules.update(sys.modules)


def pytest_runtest_logfinish() -> None:
    """Exclude the modules that tests import, too: with onnxscript a collection takes 0.15 s."""
    if len(sys.modules) > len(_modules) + 100:
        gc.collect()
        gc.freeze()
        _modules.update(sys.modules)


@pytest.fixture
def few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve tables for five loads instead of 49: each load of a bound on a percentile takes a fifth of a second."""
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.1, 0.3, 0.5, 0.7, 0.9])
