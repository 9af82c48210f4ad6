"""The supervisor: what it does when a process cannot be started."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.app import supervisor
from server.app.supervisor import Supervisor


def test_a_gateway_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, tries, tried_again = supervisor._start, [], asyncio.Event()

    async def start(command: Sequence[str], *arguments: Any) -> asyncio.subprocess.Process:
        serving = "server.app.gateway" not in command[2]
        if not serving:
            tries.append(command)
            if len(tries) == 1:
                raise OSError(11, "Resource temporarily unavailable")
            tried_again.set()
        program = "import time; time.sleep(60)" if serving else "pass"
        return await begin([sys.executable, "-c", program], *arguments)

    async def scenario(bound: socket.socket) -> int:
        running = asyncio.ensure_future(Supervisor([], 1, bound, tmp_path).run(reloadable=False))
        await asyncio.wait_for(tried_again.wait(), 10.0)
        os.kill(os.getpid(), signal.SIGTERM)
        return await running

    monkeypatch.setattr(supervisor, "_start", start)
    with socket.socket() as bound:
        assert asyncio.run(scenario(bound)) == 128 + signal.SIGTERM  # of the serving process
    assert "cannot be started: Resource temporarily unavailable; it is started again" in caplog.text
