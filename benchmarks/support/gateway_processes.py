"""The processes of a server, and what those that speak HTTP hold when no call is open, as seen from outside."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import urlsplit

import psutil

from benchmarks.support.harness import Server, small_jpeg
from benchmarks.support.soak_clients import message

_INFER = "/v2/models/googlenet/infer"
_ATTEMPTS = 500  # connections that are opened to reach a certain process
_TIMEOUT_S = 30.0
_LARGE = 50 * 2**20  # bytes; two such bodies are over the half of the share that large calls may reserve
_SAMPLES = 545  # samples of a call: more than a gateway has slots, and than a message holds beside them
GATEWAY, SERVING = "gateway", "serving"  # names of processes that tests fork
SHARE = 160 * 2**20  # bytes of the memory budget of each process for which these numbers hold


def budget_flags(gateways: int) -> tuple[str, ...]:
    """Flags of serve-model for this number of gateways, each with a memory budget of `SHARE`."""
    return "--gateways", str(gateways), "--queue-bytes", str(SHARE * (gateways + 1))


@dataclass(frozen=True)
class Processes:
    """Ids of the processes of a server; without gateways one process is all of them.

    Attributes:
        supervisor: the process that was started.
        serving: the process that has the devices.
        gateways: those that speak HTTP.
    """

    supervisor: int
    serving: int
    gateways: tuple[int, ...]

    @property
    def all(self) -> frozenset[int]:
        """The ids of all processes."""
        return frozenset((self.supervisor, self.serving, *self.gateways))


def is_gateway(process: psutil.Process) -> bool:
    """Whether a process that a supervisor has started is a gateway; those that tests fork have names of their own."""
    return process.name() == GATEWAY or any("server.app.gateway import" in word for word in process.cmdline())


def processes_of(server: Server) -> Processes | None:
    """The processes of a server as they are now; None while one with gateways has no serving process."""
    pid = server.process.pid
    gateways, others = [], []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            if is_gateway(child):
                gateways.append(child.pid)
            elif child.name() == SERVING or " -c " in " ".join(child.cmdline()):
                others.append(child.pid)
    if not gateways and not others:
        return Processes(pid, pid, (pid,))
    return Processes(pid, others[0], tuple(sorted(gateways))) if others else None


@dataclass(frozen=True)
class Held:
    """What a process that speaks HTTP holds while no call is open.

    Attributes:
        bytes_reserved: of its memory budget, by calls that are not large.
        slots: answer to a call of more samples than there are slots. Status 413 says that all are free, 503 that some
            are in use; None without gateways, where there are no slots.
    """

    bytes_reserved: int
    slots: str | None

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is reserved, and all slots are free."""
        return not self.bytes_reserved and (self.slots is None or self.slots.startswith("413 the inputs take"))


def held_by(server: Server, pid: int) -> Held:
    """Find out what the process of this id holds; the server must serve googlenet with `budget_flags`."""
    processes = processes_of(server)
    slots = None
    if processes is None or pid != processes.supervisor:
        with _connections(server, pid, 1) as (connection,):
            many = message([small_jpeg()] * _SAMPLES)
            connection.request("POST", _INFER, many.body, many.headers)
            response = connection.getresponse()
            slots = f"{response.status} {_error(response)}"
    return Held(_reserved(server, pid), slots)


def _reserved(server: Server, pid: int) -> int:
    """Bytes that small calls reserve, by the error of a large call beside another one.

    The error has the bytes of all calls, and those of the large ones, which grow as their bodies arrive.
    """
    with _connections(server, pid, 2) as (first, second):
        for connection, sent in ((first, _LARGE - 1), (second, _LARGE)):
            connection.putrequest("POST", _INFER)
            connection.putheader("Content-Length", str(_LARGE))
            connection.putheader("Inference-Header-Content-Length", "0")
            connection.endheaders()
            with suppress(OSError):  # the server may answer before it has read the body
                connection.send(bytes(sent))
        error = _error(second.getresponse())
    found = re.search(r"calls reserve (\d+) of \d+, large ones (\d+) of", error)
    if found is None:
        raise RuntimeError(f"a second body of {_LARGE} bytes was answered {error!r}; expected: no room in the budget")
    return int(found[1]) - int(found[2])


def _error(response: HTTPResponse) -> str:
    return str(json.loads(response.read())["error"])


@contextmanager
def _connections(server: Server, pid: int, count: int) -> Iterator[list[HTTPConnection]]:
    """Open connections that the process of this id has accepted."""
    url = urlsplit(server.url)
    opened: list[HTTPConnection] = []
    found: list[HTTPConnection] = []
    try:
        for _ in range(_ATTEMPTS):
            opened.append(connection := HTTPConnection(url.hostname or "", url.port, timeout=_TIMEOUT_S))
            connection.connect()
            if _has_accepted(pid, connection.sock):
                found.append(connection)
            if len(found) == count:
                yield found
                return
        raise RuntimeError(f"process {pid} accepted {len(found)} of {_ATTEMPTS} connections, {count} are needed")
    finally:
        for connection in opened:
            connection.close()


def _has_accepted(pid: int, connection: socket.socket) -> bool:
    """Whether a process has accepted a connection, once it has been answered on it."""
    connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    connection.recv(4096)
    local = connection.getsockname()
    return any(each.raddr == local for each in psutil.Process(pid).net_connections(kind="tcp"))
