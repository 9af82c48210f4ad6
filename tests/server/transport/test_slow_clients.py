"""Time limits for slow readers on a virtual clock, and the limit on the number of connections."""

import asyncio
import resource
from contextlib import closing

import pytest
from uvicorn.server import ServerState

from server.transport import connection_limits
from server.transport.connection import Connection, Listener
from server.transport.connection_limits import ConnectionLimits
from tests.server.transport.test_connection import echo
from tests.support.asgi import AsgiApp
from tests.support.virtual_clock import virtual_loop


class SlowTransport(asyncio.Transport):
    """A transport whose client reads `pace` bytes/s of what was written, on the loop's clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, pace: float) -> None:
        super().__init__()
        self._loop, self._size, self._pace = loop, size, pace
        self.closing = self.aborted = False

    def get_write_buffer_size(self) -> int:
        return max(0, round(self._size - self._pace * self._loop.time()))

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def resume_reading(self) -> None:
        pass


def time_until_abort(pace: float, leaving: bool) -> float:
    """Return the time until 1 MB is read or the connection is aborted, s."""
    with closing(virtual_loop()) as loop:
        transport = SlowTransport(loop, 10**6, pace)
        listener = Listener(ConnectionLimits(headers=10**6, reading=30.0, answer=2000.0))
        connection = Connection(listener, AsgiApp(echo), ServerState(), loop)
        connection.connection_made(transport)
        connection.pause_writing()
        if leaving:
            connection._close()

        while not transport.aborted and transport.get_write_buffer_size():
            loop.run_until_complete(asyncio.sleep(1.0))
        return loop.time()


@pytest.mark.parametrize("leaving", [False, True])
def test_a_slow_reader_is_kept_while_it_reads_and_within_the_whole_limit(leaving: bool) -> None:
    assert time_until_abort(1000.0, leaving) == pytest.approx(1000.0, abs=2.0)
    assert time_until_abort(0.0, leaving) == pytest.approx(30.0, abs=2.0)
    assert time_until_abort(100.0, leaving) == pytest.approx(2000.0, abs=2.0), "the limit for the whole response"


def test_the_connection_limit_leaves_files_for_other_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, connections in ((64, 32), (1024, 896), (10**6, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        assert connection_limits.max_connections() == connections
