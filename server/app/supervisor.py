"""The supervisor: starts the serving process and the gateways, starts those again that were killed, and stops all.

It holds the listening socket, which all gateways share, so that no connection is lost when one of them dies. The others
end when it dies, since they notice the end of a pipe that only the supervisor holds open.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

_log = logging.getLogger("batchwright.gateways")
ROLE = "_BATCHWRIGHT_SERVING"  # environment variable: folder and descriptor of the pipe, in the serving process
_STOP_TIMEOUT = 20.0  # s for gateways to end after the serving process
_RESTART_DELAY = 0.1  # s, doubled for each process that is killed within `_SETTLED`
_MAX_RESTART_DELAY = 10.0  # s
_SETTLED = 30.0  # s after which a process is taken to work
_SERVE = "from batchwright.commands import serve_model; serve_model()"


class Supervisor:
    """The processes of a server."""

    def __init__(self, arguments: Sequence[str], gateways: int, bound: socket.socket) -> None:
        """Run this number of gateways on a socket, and a serving process with these arguments of serve-model."""
        self._arguments = arguments
        self._bound = bound
        self._gateways = gateways
        self._stopping = False
        self._serving: asyncio.subprocess.Process | None = None
        self._running: set[asyncio.subprocess.Process] = set()

    async def run(self) -> int:
        """Run until the serving process ends by itself, or after a signal; return its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        alive, self._held = os.pipe()
        with TemporaryDirectory(prefix="batchwright-") as name:
            self._folder, self._alive = Path(name), alive
            gateways = [asyncio.create_task(self._keep_gateway(index)) for index in range(self._gateways)]
            try:
                return await self._keep_serving()
            finally:
                self._stopping = True
                await self._end(gateways)

    def _on_signal(self, number: signal.Signals) -> None:
        again, self._stopping = self._stopping, self._stopping or number != signal.SIGHUP
        if number == signal.SIGHUP or again:
            for process in self._running:
                _send(process, number)
        elif self._serving is not None:
            _send(self._serving, number)  # it drains, and then ends the gateways

    async def _keep_serving(self) -> int:
        """Run the serving process, again if it was killed; return its exit code."""
        delay = _RESTART_DELAY
        while True:
            began = asyncio.get_running_loop().time()
            environment = {**os.environ, ROLE: f"{self._folder}:{self._alive}"}
            command = (sys.executable, "-c", _SERVE, *self._arguments)
            process = self._serving = await self._start(command, (self._alive,), environment)
            code = await process.wait()
            self._running.discard(process)
            if code >= 0:
                return code
            if self._stopping:
                return 128 - code
            for path in self._folder.iterdir():
                path.unlink()
            _log.critical("the serving process was killed by signal %d; it is started again", -code)
            delay = await self._wait(delay, began)

    async def _keep_gateway(self, index: int) -> None:
        """Run a gateway, again if it ends before the server stops."""
        delay = _RESTART_DELAY
        while not self._stopping:
            began = asyncio.get_running_loop().time()
            descriptors = (self._bound.fileno(), self._alive)
            command = (sys.executable, "-m", "server.app.gateway", str(self._folder), *map(str, descriptors))
            process = await self._start(command, descriptors, dict(os.environ))
            code = await process.wait()
            self._running.discard(process)
            if self._is_stopping():
                return
            _log.error("gateway %d ended with code %d; it is started again", index, code)
            delay = await self._wait(delay, began)

    def _is_stopping(self) -> bool:
        return self._stopping

    async def _start(
        self, command: Sequence[str], descriptors: Sequence[int], environment: dict[str, str]
    ) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *command, pass_fds=descriptors, env=environment, start_new_session=True
        )
        self._running.add(process)
        return process

    async def _wait(self, delay: float, began: float) -> float:
        """Wait before a process that was started at `began` is started again; return the delay of the next time, s."""
        if asyncio.get_running_loop().time() - began > _SETTLED:
            delay = _RESTART_DELAY
        await asyncio.sleep(delay)
        return min(2 * delay, _MAX_RESTART_DELAY)

    async def _end(self, gateways: Sequence["asyncio.Task[None]"]) -> None:
        """End the gateways that have not ended with the serving process."""
        for process in self._running:
            _send(process, signal.SIGTERM)
        _, late = await asyncio.wait(gateways, timeout=_STOP_TIMEOUT)
        for process in self._running:
            _send(process, signal.SIGKILL)
        for task in late:
            task.cancel()


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        process.send_signal(number)


def supervise(arguments: Sequence[str], gateways: int, bound: socket.socket) -> int:
    """Run a server of several processes; return its exit code."""
    return asyncio.run(Supervisor(arguments, gateways, bound).run())


def stop_with_supervisor(pipe: int) -> None:
    """Send this process SIGTERM when its supervisor has died, by the descriptor of the supervisor's pipe."""

    def wait() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="supervisor", daemon=True).start()


def number_of_gateways(setting: str) -> int:
    """The number of gateways by the setting: itself, or with `auto` that which is best on this machine."""
    return 0 if setting == "auto" else int(setting)


def role_of_this_process() -> tuple[Path, int] | None:
    """The folder and the pipe of the supervisor if this is its serving process, else None."""
    folder, _, pipe = os.environ.get(ROLE, "").rpartition(":")
    return (Path(folder), int(pipe)) if folder else None
