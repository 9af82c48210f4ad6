"""The supervisor: starts the serving process and the gateways, starts those again that were killed, and stops all.

It holds the listening socket, which all gateways share, so that no connection is lost when one of them dies, and the
table of rate limits. The gateways end when it closes a pipe that only it holds open. So all processes also end when it
is killed.
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from policies.cpus import available_cpus
from policies.types import SpecError
from server.gateways.shared_buckets import create_table

if TYPE_CHECKING:
    from server.config import Settings

_log = logging.getLogger("batchwright.gateways")
_LEAST_CPUS, _MOST_GATEWAYS = 4, 6
_NVIDIA_DRIVER = Path("/dev/nvidiactl")
ROLE = "_BATCHWRIGHT_SERVING"  # environment variable: the fields of `ServingRole`
_STOP_TIMEOUT = 15.0  # s for a process to end after the supervisor has closed the pipe
_RESTART_DELAY = 0.1  # s, doubled for each process that is killed within `_SETTLED`
_MAX_RESTART_DELAY = 10.0  # s
_SETTLED = 30.0  # s after which a process is taken to work
_MAX_FOLDER = 90  # characters; the path of a socket has at most 107
_SERVE = "from batchwright.commands import serve_model; serve_model()"
_SERVE_AS_MODULE = "import runpy; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
_GATEWAY = "import batchwright.commands; from server.app.gateway import main; main()"


class Supervisor:
    """The processes of a server."""

    def __init__(
        self, arguments: Sequence[str], gateways: int, bound: socket.socket, folder: Path, grpc_port: int = 0
    ) -> None:
        """Run this number of gateways on a socket, and a serving process with these arguments of serve-model.

        `grpc_port` is the port of gRPC in the gateways, 0 without gRPC.
        """
        self._arguments = arguments
        self._number = gateways
        self._bound = bound
        self._grpc_port = grpc_port
        self._folder = folder
        self._table = create_table()
        self._alive, self._held = os.pipe()
        self._stopping = asyncio.Event()
        self._serving: asyncio.subprocess.Process | None = None
        self._gateways: set[asyncio.subprocess.Process] = set()

    async def run(self, reloadable: bool) -> int:
        """Run until the serving process ends by itself, or after a signal; return its exit code.

        Args:
            reloadable: whether SIGHUP has gateways read files again, and does not end the server.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        if reloadable:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        gateways = [asyncio.create_task(self._keep_gateway(number)) for number in range(1, self._number + 1)]
        try:
            return await self._keep_serving()
        finally:
            self._stopping.set()
            os.close(self._held)
            await asyncio.wait(gateways, timeout=_STOP_TIMEOUT)
            for process in self._gateways:
                _send(process, signal.SIGKILL)

    def _stop(self, number: signal.Signals) -> None:
        """Have the serving process drain, and then end the gateways; SIGINT, for a second signal, ends the drain."""
        if self._serving is not None:
            _send(self._serving, signal.SIGINT if self._stopping.is_set() else number)
        self._stopping.set()

    def _reload(self) -> None:
        for process in self._gateways:
            _send(process, signal.SIGHUP)

    async def _keep_serving(self) -> int:
        """Run the serving process, again if it was killed; return its exit code."""
        delay = _RESTART_DELAY
        descriptors = self._bound.fileno(), self._alive
        environment = {**os.environ, ROLE: ":".join(map(str, (self._folder, *descriptors, self._grpc_port)))}
        while not self._stopping.is_set():
            began = time.monotonic()
            process = await _start((*_python(_serve_program()), *self._arguments), descriptors, environment)
            self._serving = process
            if self._stopping.is_set():  # by a signal that arrived meanwhile
                _send(process, signal.SIGTERM)
            code = await process.wait()
            if code >= 0:
                return code
            if self._stopping.is_set():
                return 128 - code
            for path in self._folder.iterdir():
                path.unlink()
            _log.critical("the serving process was killed by signal %d; it is started again", -code)
            delay = await self._wait(delay, began)
        return 0

    async def _keep_gateway(self, number: int) -> None:
        """Run a gateway, again if it ends before the server stops."""
        delay = _RESTART_DELAY
        descriptors = (self._bound.fileno(), self._table, self._alive)
        words = map(str, (self._folder, number, *descriptors))
        command = (*_python(_GATEWAY), *words)
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                process = await _start(command, descriptors, dict(os.environ))
            except OSError as error:  # such as a limit on processes
                how = f"cannot be started: {error.strerror}"
            else:
                self._gateways.add(process)
                code = await process.wait()
                self._gateways.discard(process)
                how = f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}"
            if not self._stopping.is_set():
                _log.error("gateway %d %s; it is started again", number, how)
                delay = await self._wait(delay, began)

    async def _wait(self, delay: float, began: float) -> float:
        """Wait before a process that was started at `began` is started again; return the delay of the next time, s."""
        if time.monotonic() - began > _SETTLED:
            delay = _RESTART_DELAY
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)
        return min(2 * delay, _MAX_RESTART_DELAY)


async def _start(
    command: Sequence[str], descriptors: Sequence[int], environment: dict[str, str]
) -> asyncio.subprocess.Process:
    """Start a process in a session of its own, so that Ctrl-C reaches the supervisor alone."""
    return await asyncio.create_subprocess_exec(*command, pass_fds=descriptors, env=environment, start_new_session=True)


def _serve_program() -> str:
    """The program of the serving process: the module that this process runs, or else serve-model."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return _SERVE if spec is None else _SERVE_AS_MODULE.format(spec.name)


def _python(program: str) -> tuple[str, ...]:
    """The command line of a program that imports from the same folders as this process."""
    return sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        process.send_signal(number)


def supervise(
    arguments: Sequence[str],
    gateways: int,
    bound: socket.socket,
    reloadable: bool,
    grpc: socket.socket | None = None,
) -> int:
    """Run a server of several processes; return its exit code.

    Args:
        arguments: of serve-model.
        gateways: number of gateways.
        bound: socket that they listen on.
        reloadable: whether SIGHUP has them read files again.
        grpc: socket that reserves the port of gRPC for them; None without gRPC.

    Raises:
        SpecError: there is no folder for the sockets of the processes.
    """
    try:
        folder = TemporaryDirectory(prefix="batchwright-")
    except OSError as error:
        raise SpecError(
            f"gateways need a temporary folder: {error.strerror}; set TMPDIR to a writable one, or give --gateways 0"
        ) from error
    with folder as name:
        if len(name) > _MAX_FOLDER:
            raise SpecError(f"the temporary folder {name!r} is too long for a socket; set TMPDIR to a shorter one")

        async def run() -> int:
            port = 0 if grpc is None else grpc.getsockname()[1]
            return await Supervisor(arguments, gateways, bound, Path(name), port).run(reloadable)

        return asyncio.run(run())


def stop_with_supervisor(pipe: int, folder: Path) -> None:
    """Send this process SIGINT when the supervisor has closed its pipe, or has died; end it 15 s later.

    Args:
        pipe: descriptor of the pipe.
        folder: is removed then, since a supervisor that was killed cannot do it.
    """

    def wait() -> None:
        os.read(pipe, 1)
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGINT)  # after which nothing waits for load balancers
        time.sleep(_STOP_TIMEOUT)
        os._exit(1)

    threading.Thread(target=wait, name="supervisor", daemon=True).start()


def exit_on_sigterm() -> None:
    """Exit on SIGTERM until another handler is set; process 1 of a container would ignore the signal by default."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def number_of_gateways(settings: "Settings") -> int:
    """The number of gateways by the settings.

    With `auto`: none with fewer than four processors, or if no device is a GPU or another server, since one process
    then keeps the devices busy; else one for each two processors, but one less, and at most six.
    """
    if settings.gateways != "auto":
        return int(settings.gateways)
    cpus, devices = available_cpus(), [one.device for one in settings.by_device()]
    return min(_MOST_GATEWAYS, cpus // 2 - 1) if cpus >= _LEAST_CPUS and any(map(_is_fast, devices)) else 0


def _is_fast(device: str) -> bool:
    return device.startswith(("cuda", "oip:")) or (device == "auto" and _NVIDIA_DRIVER.exists())


class ServingRole(NamedTuple):
    """What the serving process of a supervisor is given.

    Attributes:
        folder: that of the sockets between the processes.
        bound: descriptor of the socket that gateways listen on.
        pipe: descriptor of the supervisor's pipe.
        grpc_port: port of gRPC in the gateways; 0 without gRPC.
    """

    folder: Path
    bound: int
    pipe: int
    grpc_port: int = 0


def role_of_this_process() -> ServingRole | None:
    """The role of this process if it is the serving process of a supervisor, else None."""
    folder, *numbers = os.environ.get(ROLE, "").rsplit(":", 3)
    return ServingRole(Path(folder), *map(int, numbers)) if folder else None
