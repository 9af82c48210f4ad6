"""Start pytest-xdist workers by forks of a process that has imported the large libraries.

Each worker imports all tests, and with them these libraries: several seconds of CPU time. execnet starts a worker as
`python -u -c PROGRAM`; in place of `python`, this file has it forked, and waits for its end. What pytest rewrites,
tests and plugins, is not imported before.
"""

import gc
import os
import select
import shlex
import signal
import socket
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from struct import Struct
from typing import Any

_IMPORTED = (
    "torch._dynamo",
    "sklearn.base",
    "scipy.optimize",
    "scipy.signal",
    "scipy.stats",
    "matplotlib.pyplot",
    "aiohttp",
    "server.app.serving",
)
_MOST = 2**16  # bytes of a program
_CREDENTIALS = Struct("3i")  # process, user and group


def fork_workers(specs: list[Any]) -> None:
    """Have execnet start the local workers among these specifications by forks."""
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join([sys.executable, __file__])


def _run_in_fork(program: str) -> None:
    """Have a program run in a fork with the standard input and output of this process, and wait for its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork receives it as well, and ends in order
    name = f"\0batchwright-workers-{os.environ['PYTEST_XDIST_TESTRUNUID']}"
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


def user_of(connection: socket.socket) -> int:
    """The user id of the process that has connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _fork_for_each(listening: socket.socket) -> None:
    """Fork a process for each connection, until the process of the first one has ended."""
    gc.disable()
    sys.path[0] = str(Path(__file__).parents[2])  # not this folder, where libraries would find modules of their names
    with suppress(Exception):  # an extra may be missing; the tests report any other error
        import_module("server.models.images.torchvision_source").import_torchvision_models()
    for name in _IMPORTED:
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("error")  # as in the tests, which then import it again
            import_module(name)
    gc.freeze()  # a collection in a fork would copy the memory of all modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork is waited for
    watched: list[Any] = [listening, 0]
    while listening in select.select(watched, [], [])[0]:
        connection = listening.accept()[0]
        if user_of(connection) != os.getuid():  # the socket's name is no secret
            connection.close()
            continue
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
