"""A Python for the processes of pytest-xdist, forked from one that has imported the large libraries of the tests.

Each process imports all tests, and with them these libraries: several seconds of a processor. execnet starts a process
as `python -u -c PROGRAM`; in place of `python`, this file has one forked, and waits for its end. What pytest rewrites,
tests and plugins, is not imported before.
"""

import gc
import os
import select
import shlex
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_IMPORTED = (
    "torch._dynamo",
    "transformers",
    "sklearn.base",
    "scipy.optimize",
    "scipy.stats",
    "matplotlib.pyplot",
    "aiohttp",
    "server.app.serving",
    "server.app.gateway",
    "server.models.texts.networks",
)
_MOST = 2**16  # bytes of a program


def fork_workers(specs: list[Any]) -> None:
    """Have execnet start the processes with these specifications by forks."""
    for spec in specs:
        spec.python = shlex.join([sys.executable, __file__])


def _run_in_fork(program: str) -> None:
    """Have a program run in a fork with the standard input and output of this process, and wait for its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork receives it as well, and ends in order
    name = f"\0batchwright-workers-{os.getppid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        if connection.connect_ex(name):  # this is the first one: they are started one after the other
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
                listening.bind(name)
                listening.listen()
                connection.connect(name)
                listening.set_inheritable(True)
                end, _ = os.pipe()  # the other end is closed when this process has ended
                command = [sys.executable, __file__, str(listening.fileno())]
                actions = [(os.POSIX_SPAWN_DUP2, end, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
                os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
        socket.send_fds(connection, [program.encode()], [0, 1])
        for descriptor in (0, 1):  # execnet waits until no process has them
            os.close(descriptor)
        connection.recv(1)  # returns when the fork, which has the other end, has ended


def _fork_for_each(listening: socket.socket) -> None:
    """Fork a process for each connection, until the process of the first one has ended."""
    gc.disable()
    sys.path[0] = str(Path(__file__).parents[2])  # not this folder, where libraries would find modules of their names
    with suppress(Exception):  # of an extra that is not installed, or for the tests to report
        import_module("server.models.images.torchvision_source").import_torchvision_models()
    for name in _IMPORTED:
        with suppress(Exception):
            import_module(name)
    gc.freeze()  # a collection in a fork would copy the memory of all modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork is waited for
    watched: list[Any] = [listening, 0]
    while listening in select.select(watched, [], [])[0]:
        connection = listening.accept()[0]
        program, descriptors, _, _ = socket.recv_fds(connection, _MOST, 2)
        if not os.fork():
            listening.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            gc.enable()
            exec(program, {"__name__": "__main__"})
            sys.exit()
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()


if __name__ == "__main__":
    if sys.argv[1] == "-u":
        _run_in_fork(sys.argv[-1])
    else:
        with socket.socket(fileno=int(sys.argv[1])) as _listening:
            _fork_for_each(_listening)
