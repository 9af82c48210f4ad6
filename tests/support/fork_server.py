"""Processes forked from one that has imported what servers import, which takes a new process most of a second."""

import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from struct import Struct
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any, Self, cast

from benchmarks.support.harness import start_process as start_by_command
from benchmarks.support.harness import wait_until
from server.scheduling import solver_process
from tests.support.forked_worker import user_of

_MODULE = "server.cli"
_SERVERS = (_MODULE, "benchmarks.servers.", "tests.support.short_stop_timeout")  # prefixes of module names
_THIS = "tests.support.fork_server"  # `__name__` is "__main__" in a forked server, which may start a fork server
_CODE = Struct("i")
_ENVIRONMENT = dict(os.environ)  # before any test changes it
_IMPORTED = (  # all but the module itself, and what these import while a server starts
    "server.app.serving",
    "server.telemetry.printed",
    "profiler.first_profile",
    "policies.command_line.common",
    "pydantic.v1",
    "scipy.special",
    "typer",
    "uvicorn.lifespan.on",
)
_MOST = 2**17  # bytes of a message, which contains the environment
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_COMM = Path("/proc/self/comm")  # the name of a process, which a forked one has from its parent


class ForkedProcess:
    """A forked process, with the part of subprocess.Popen that servers need.

    Attributes:
        pid: its process id.
        returncode: as in subprocess.Popen.
    """

    def __init__(self, pid: int, status: socket.socket) -> None:
        """The process with this id, whose exit code `status` will receive."""
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, or minus the signal; None while the process runs."""
        return self._receive(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code, at most `timeout`, s, after which subprocess.TimeoutExpired is raised."""
        code = self._receive(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal if the process runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _receive(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is None:
                self._status.settimeout(timeout)
                try:
                    received = self._status.recv(_CODE.size)
                except (BlockingIOError, TimeoutError):
                    return None
                self.returncode = _CODE.unpack(received)[0] if received else -signal.SIGKILL
                self._status.close()
            return self.returncode


class _ForkServer:
    """A connection to the process that forks, which all processes of a test run share.

    The first one starts it. It ends when the last one has closed its connection, or has died.
    """

    def __init__(self, *imported: str) -> None:
        run = os.environ.setdefault("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))  # for the servers, too
        name = f"\0batchwright-tests-{run}-{'torch' if 'torch' in imported else 'emulated'}"
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            try:
                listening.bind(name)
            except OSError:  # another process has started it, and may not listen yet
                wait_until(lambda: self._control.connect_ex(name) == 0, 30.0, interval=0.01)
            else:
                listening.listen()
                self._control.connect(name)
                command = [sys.executable, "-m", _THIS, str(listening.fileno()), *imported]
                listening.set_inheritable(True)
                no_input = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
                # it may end after this process: not waited for
                os.posix_spawn(sys.executable, command, _ENVIRONMENT, file_actions=no_input)

    def close(self) -> None:
        self._control.close()

    def start(self, line: Sequence[str], environment: dict[str, str], out: int, err: int, *more: int) -> ForkedProcess:
        request = {"line": line, "folder": str(Path.cwd()), "environment": environment}
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock, theirs:
            socket.send_fds(self._control, [json.dumps(request).encode()], [out, err, *more, theirs.fileno()])
        received = status.recv(_CODE.size)
        if not received:
            raise RuntimeError("the process that forks servers has ended, see its traceback")
        return ForkedProcess(_CODE.unpack(received)[0], status)


@cache
def _fork_server(*imported: str) -> _ForkServer:
    server = _ForkServer(*imported)
    atexit.register(server.close)
    return server


def import_early() -> None:
    """Start the fork server, so that its imports do not delay the first tests."""
    _fork_server(*_IMPORTED)


def _start(
    line: Sequence[str], environment: Mapping[str, str] = MappingProxyType({}), out: int = 1, err: int = 2
) -> ForkedProcess:
    """Start a module with its arguments."""
    return _fork_server(*_IMPORTED).start(line, {**os.environ, **environment}, out, err)


def start_process(
    command: Sequence[str], stderr: int, files: int | None = None
) -> "ForkedProcess | subprocess.Popen[bytes]":
    """Run serve-model, or a server of the benchmarks or tests, in a forked process, any other command as usual.

    Args:
        command: the command line.
        stderr: descriptor of the process's standard error.
        files: its limit of open files, for which no process is forked; None: that of this process.
    """
    if files is None and [*command[:2]] == [sys.executable, "-m"] and command[2].startswith(_SERVERS):
        return _start(command[2:], err=stderr)
    return start_by_command(command, stderr, files)


def run_process(command: Sequence[str], within: float | None = None) -> "subprocess.CompletedProcess[str]":
    """Run one of the project's commands in a forked process, as `harness.run_process` in a new one."""
    python, flag, *line = command
    assert [python, flag] == [sys.executable, "-m"]
    return _run_to_end(line, within)


def run_serve_model(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run serve-model in a forked process until it exits, at most two minutes; return its exit code and output."""
    return _run_to_end((_MODULE, *arguments), 120.0, environment)


def _run_to_end(
    line: Sequence[str], within: float | None, environment: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.CompletedProcess[str]":
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = _start(line, environment, out.fileno(), err.fileno())
        try:
            code = process.wait(within)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([*line], code, out.read(), err.read())


# In the process that forks


def _serve_forks(listening: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request; return the request and its descriptors in the new processes, None in this one."""
    running: dict[int, tuple[int, int]] = {}  # process id and descriptor of its status, by descriptor of the process
    connections = [listening.accept()[0]]
    with selectors.DefaultSelector() as selector:
        for found in (listening, *connections):
            selector.register(found, selectors.EVENT_READ, found)
        while connections:
            for key, _ in selector.select():
                if isinstance(key.fileobj, int):
                    selector.unregister(key.fd)
                    pid, status = running.pop(key.fd)
                    with suppress(BrokenPipeError):  # the process that waits for it has died
                        os.write(status, _CODE.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                    os.close(status)
                    os.close(key.fd)
                    continue
                control: socket.socket = key.data
                if control is listening:
                    accepted = listening.accept()[0]
                    if user_of(accepted) != os.getuid():
                        accepted.close()
                        continue
                    connections.append(accepted)
                    selector.register(accepted, selectors.EVENT_READ, accepted)
                    continue
                message, files = b"", list[int]()
                with suppress(ConnectionResetError):  # it has died
                    message, files, _, _ = socket.recv_fds(control, _MOST, 4)
                if not message:
                    selector.unregister(control)
                    connections.remove(control)
                    control.close()
                    continue
                status = files.pop()
                pid = os.fork()
                if not pid:
                    for other in (status, *running, *(status for _, status in running.values())):
                        os.close(other)
                    for each in connections:
                        each.close()
                    return json.loads(message), files
                for file in files:
                    os.close(file)
                watched = os.pidfd_open(pid)
                running[watched] = pid, status
                selector.register(watched, selectors.EVENT_READ)
                with suppress(BrokenPipeError):
                    os.write(status, _CODE.pack(pid))
    return None


def _run(request: dict[str, Any], files: list[int], imported: Sequence[str]) -> None:
    """Run a module, or a program, as a new Python process would.

    Args:
        request: what to run, with its arguments, folder and environment.
        files: descriptors of standard output and error, and of standard input if it is not the present one.
        imported: modules that the process that forks has imported; it forks for a server that solves a policy, too.
    """
    for number, file in zip((1, 2, 0), files, strict=False):
        os.dup2(file, number)
        os.close(file)
    gc.enable()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    module, *sys.argv[1:] = request["line"]
    sys.path[0] = request["folder"]
    solver_process._start = cast("Any", partial(_Solver, imported))
    if module == "-c":
        os.setsid()  # signals to the tests end the server, and with it this process
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


# In a server


class _Solver:
    """The process that solves a policy, with the part of subprocess.Popen that a server needs.

    It is forked by the process that has forked the server, because many threads run in a server.
    """

    def __init__(self, imported: Sequence[str], niceness: int) -> None:
        theirs, ours = os.pipe()
        self.stdin = os.fdopen(ours, "wb")
        ours, out = os.pipe()
        self.stdout = os.fdopen(ours, "rb")
        self._server = _ForkServer(*imported)
        self._process = self._server.start(("-c", solver_process.program(niceness)), dict(os.environ), out, 2, theirs)
        os.close(theirs)
        os.close(out)

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal, after the end."""
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        with suppress(BrokenPipeError):
            self.stdin.close()
        self._process.wait()
        self._server.close()


def main() -> None:
    """Import modules, fork for the processes that connect to a socket, and run a module in each fork."""
    _, descriptor, *imported = sys.argv
    gc.disable()
    for name in imported:
        import_module(name)
    if "torch" in imported:
        import_module("server.models.images.torchvision_source").import_torchvision_models()
    gc.freeze()  # a collection in a fork would copy the memory of all modules
    with socket.socket(fileno=int(descriptor)) as listening:
        job = _serve_forks(listening)
    if job is not None:
        _run(*job, imported)


if __name__ == "__main__":
    main()
