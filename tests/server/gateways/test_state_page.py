"""The published state: readers get whole states, also while they are written and after the writer has died."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.gateways.state_page import FleetState, ModelState, StatePage, create_page

ROOT = Path(__file__).parents[3]
WRITE = """
import sys
from server.gateways.state_page import FleetState, ModelState, StatePage
page = StatePage(int(sys.argv[1]))
n = 0
while True:
    n += 1
    models = {f"m{k}": ModelState(n, None, ("QueueFullError", str(n) * (n % 50), n), True, float(n)) for k in range(3)}
    page.write(FleetState(float(n), False, True, True, n, n, float(n), models))
"""


def state(n: int) -> FleetState:
    return FleetState(float(n), False, True, True, n, n, float(n), {"m": ModelState(n, None, None, True, float(n))})


def test_a_state_is_read_by_another_page_of_the_same_memory() -> None:
    memory = create_page(1)
    writer, reader = StatePage(memory), StatePage(memory)
    os.close(memory)
    assert reader.read() is None
    for n in range(3):
        writer.write(state(n))
        assert reader.read() == state(n)
        assert reader.read() is reader.read(), "a state is unpickled once"


def test_no_state_is_torn_while_another_process_writes() -> None:
    memory = create_page(3)
    reader = StatePage(memory)
    seen, latest = set[int](), 0
    with subprocess.Popen([sys.executable, "-c", WRITE, str(memory)], cwd=ROOT, pass_fds=[memory]) as process:
        try:
            while len(seen) < 2000:
                if (read := reader.read()) is None:
                    continue
                n = read.waiting
                assert n >= latest, "no state is older than the one before"
                latest = n
                assert (read.published, read.capacity, read.backlog) == (n, n, n)
                for model in read.models.values():
                    assert model.revision == model.least_response == n
                    assert model.rejected == ("QueueFullError", str(n) * (n % 50), n)
                seen.add(n)
        finally:
            process.kill()
    os.close(memory)


class _Died(Exception):  # noqa: N818
    pass


class _Header:
    """A header during which the writer dies."""

    def pack_into(self, *_: object) -> None:
        raise _Died


def test_after_a_writer_died_while_it_wrote_the_state_before_is_read_until_the_next_one_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = create_page(1)
    writer, reader = StatePage(memory), StatePage(memory)
    writer.write(state(1))
    assert reader.read() == state(1)
    monkeypatch.setattr("server.gateways.state_page._HEADER", _Header())
    with pytest.raises(_Died):
        writer.write(state(2))
    monkeypatch.undo()
    assert reader.read() == state(1)
    assert StatePage(memory).read() is None, "a new gateway knows nothing yet"
    StatePage(memory).write(state(3))
    assert reader.read() == state(3)
    os.close(memory)


def test_a_state_that_is_larger_than_the_page_is_refused() -> None:
    memory = create_page(0)
    page = StatePage(memory)
    page.write(state(1))
    with pytest.raises(ValueError, match="over the page"):
        page.write(state(2)._replace(models={"m" * 5000: state(2).models["m"]}))
    assert StatePage(memory).read() == state(1)
    os.close(memory)
