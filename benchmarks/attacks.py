"""Attack a started server by HTTP, and measure the cost to the server and to its other clients.

Each attack has a server of its own on an emulated device with a memory budget of 64 MiB. Before,
during and after the attack, generate-load offers images at load 0.5, and a probe opens a connection every 50 ms and
gets /v2/health/live. Reported: bytes that the attacker sent, the
growth of the server's resident memory over that under the normal load, the longest time without an answered probe, the
probes' 99th percentile and failures, and the number of normal requests that were answered.

All connections are on the loopback interface, in bounded time. The exit code is 1 if a bound is broken.
"""

import gzip
import json
import multiprocessing
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.servers.path_prefix import PREFIX
from benchmarks.support import harness
from benchmarks.support.processes import resource_usage
from policies.profile import load_profile

PROFILE = "googlenet-tesla-p4-x10"
QUEUE_BYTES = 64 * 2**20
LOAD = 0.5
_BEFORE_S, _ATTACK_S, _LOAD_S = 4.0, 12.0, 22.0
_PROBE_S, _CONNECTION_TIMEOUT_S = 0.05, 5.0
_FILES = 400  # limit of open files under the attacks on connections
_GROWTH_MB = 1.5 * QUEUE_BYTES / 2**20 + 64
_LIVENESS_MS = 250.0
_PREDICT_KEY = "p"
_ADMIN_KEY = "a"
_INFER = "/v2/models/googlenet/infer"


class Attacker:
    """Connections to the server that stay open, with a count of bytes sent and statuses received.

    Attributes:
        port: the server's, on 127.0.0.1.
        end: instant at which the attack ends, s of time.monotonic.
        wire_bytes: bytes sent so far.
        statuses: number of answers read, by status.
    """

    def __init__(self, port: int, seconds: float) -> None:
        """Attack the server at `port` for `seconds`."""
        self.port = port
        self.end = time.monotonic() + seconds
        self.wire_bytes = 0
        self.statuses: Counter[str] = Counter()
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """Open a connection that stays open until the end of the attack."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(_CONNECTION_TIMEOUT_S)
        connection.connect(("127.0.0.1", self.port))
        with self._lock:
            self._open.append(connection)
        return connection

    def send(self, connection: socket.socket, data: bytes) -> None:
        """Send data, or as much of it as the server takes before the connection's timeout."""
        sent, view = 0, memoryview(data)
        try:
            while sent < len(data):
                sent += connection.send(view[sent : sent + 2**18])
        except OSError:
            pass  # the server closed the connection or stopped reading
        with self._lock:
            self.wire_bytes += sent

    def read_status(self, connection: socket.socket) -> None:
        """Count the status of an answer."""
        try:
            words = connection.recv(4096).split(b" ", 2)
        except OSError:
            words = []
        with self._lock:
            self.statuses[words[1].decode() if len(words) > 1 else "none"] += 1

    def post(self, path: str, body: bytes, *headers: str, read: bool = True, buffer: int | None = None) -> None:
        """Send one POST on a new connection; read its status, or leave the answer unread."""
        head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
        try:
            connection = self.connect(buffer)
        except OSError:
            self.statuses["not connected"] += 1
            return
        self.send(connection, "\r\n".join([*head, "", ""]).encode() + body)
        if read:
            self.read_status(connection)

    def in_parallel(self, work: Callable[[], None], count: int) -> None:
        """Call `work` `count` times, in at most 64 threads."""
        with ThreadPoolExecutor(min(count, 64)) as pool:
            for _ in range(count):
                pool.submit(work)

    def wait(self) -> None:
        """Wait for the end of the attack with all connections open."""
        time.sleep(max(0.0, self.end - time.monotonic()))

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open:
            connection.close()


def _lists(size: int) -> bytes:
    return b"[" + b"[]," * ((size - 4) // 3) + b"[]]"


def nested_index(attacker: Attacker) -> None:
    """1: POST /v2/repository/index with 60 MB of nested lists."""
    for _ in range(2):
        attacker.post("/v2/repository/index", _lists(60_000_000))


def _pixels(samples: int, **more: Any) -> tuple[bytes, bytes]:
    """A call's JSON document, and its binary tensor of zeros."""
    size = samples * 224 * 224 * 3
    parameters = {"binary_data_size": size}
    entry = {"name": "image", "datatype": "UINT8", "shape": [samples, 224, 224, 3], "parameters": parameters}
    return json.dumps({"inputs": [entry], **more}).encode(), bytes(size)


def large_ids(attacker: Attacker) -> None:
    """2a: 60 compressed calls with an `id` of 8 MB, answers left unread."""
    entry = {"name": "image", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    _post_compressed(attacker, json.dumps({"id": "x" * 8_000_000, "inputs": [entry]}).encode(), b"", 60)


def large_ids_served(attacker: Attacker) -> None:
    """2b: the same `id` with a valid picture as a binary tensor, so that the call is served and the id echoed."""
    _post_compressed(attacker, *_pixels(1, id="x" * 8_000_000), 60)


def nested_parameters(attacker: Attacker) -> None:
    """2c: 6 compressed calls with 8 MB of nested lists in `parameters`."""
    document, pixels = _pixels(1)
    document = document[:-1] + b', "parameters": {"x": ' + _lists(8_000_000) + b"}}"
    _post_compressed(attacker, document, pixels, 6)


def _post_compressed(attacker: Attacker, document: bytes, tensor: bytes, count: int) -> None:
    """Send the call `count` times in parallel, compressed, and leave the answers unread."""
    body, headers = gzip.compress(document + tensor), ["Content-Encoding: gzip"]
    if tensor:
        headers.append(f"Inference-Header-Content-Length: {len(document)}")
    attacker.in_parallel(lambda: attacker.post(_INFER, body, *headers, read=False, buffer=4096), count)
    attacker.wait()


def unread_answers(attacker: Attacker) -> None:
    """2d: 12 calls of 400 samples each, one after the other, answers left unread."""
    _leave_unread(attacker, 400)


def unread_smaller_answers(attacker: Attacker) -> None:
    """2e: the same with 200 samples, which one call may hold."""
    _leave_unread(attacker, 200)


def _leave_unread(attacker: Attacker, samples: int) -> None:
    document, pixels = _pixels(samples)
    body, header = document + pixels, f"Inference-Header-Content-Length: {len(document)}"
    for _ in range(12):
        if time.monotonic() < attacker.end:
            attacker.post(_INFER, body, header, read=False, buffer=4096)
            time.sleep(0.5)
    attacker.wait()


def compressed_json(attacker: Attacker) -> None:
    """3a: compressed JSON of nested lists, 8 KB and 20 KB on the wire."""
    small = gzip.compress(b'{"inputs": ' + _lists(8_000_000) + b"}")
    large = gzip.compress(b'{"inputs": [' + b'{"":[]},' * 1_000_000 + b"1]}")
    for _ in range(4):
        attacker.in_parallel(lambda: attacker.post(_INFER, small, "Content-Encoding: gzip"), 4)
        attacker.in_parallel(lambda: attacker.post(_INFER, large, "Content-Encoding: gzip"), 4)


def costly_json(attacker: Attacker) -> None:
    """3b: compressed JSON within the bounds, 16,000 objects in 465 KB, from 24 clients again and again."""
    objects = b",".join(b'{"name":"a","data":[1,2,3]}' for _ in range(16_000))
    body = gzip.compress(b'{"inputs": [' + objects + b"]}")
    while time.monotonic() < attacker.end:
        attacker.in_parallel(lambda: attacker.post(_INFER, body, "Content-Encoding: gzip"), 24)
        time.sleep(0.2)


def prefix_authorisation(attacker: Attacker) -> None:
    """4: below a root_path, swap the policy with a predict key, and without any key."""
    body = b'{"policy": "serial"}'
    length = f"Content-Length: {len(body)}"
    for path in (f"{PREFIX}/admin/models/googlenet/policy", "/admin/models/googlenet/policy"):
        for header in (f"Authorization: Bearer {_PREDICT_KEY}", "X-None: x"):
            for _ in range(50):
                connection = attacker.connect()
                head = [f"PUT {path} HTTP/1.1", "Host: localhost", length, header, "", ""]
                attacker.send(connection, "\r\n".join(head).encode() + body)
                attacker.read_status(connection)
                connection.close()


def _image_request() -> bytes:
    """The bytes of an HTTP request with the pixels of one image."""
    document, pixels = _pixels(1)
    head = f"POST {_INFER} HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: {len(document)}\r\n"
    return f"{head}Content-Length: {len(document) + len(pixels)}\r\n\r\n".encode() + document + pixels


def pipelined(attacker: Attacker) -> None:
    """5a: 150 connections that send a picture and, before its answer, 4 MB of a second request."""
    first = _image_request()
    second = f"POST {_INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n".encode() + bytes(4_000_000)
    _pipeline(attacker, first + second, 150)


def pipelined_small(attacker: Attacker) -> None:
    """5b: 150 connections that send a picture and, before its answer, 20,000 small requests."""
    first = _image_request()
    _pipeline(attacker, first + b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000, 150)


def pipelined_unread(attacker: Attacker) -> None:
    """5c: 1,000 connections that leave an answer of 4 MB unread and send 250 KB of a second request."""
    head = b"GET /assets/plotly.js HTTP/1.1\r\nHost: x\r\n\r\nPOST /predict HTTP/1.1\r\nHost: x\r\n"
    request = head + b"Content-Length: 50000000\r\n\r\n" + bytes(250_000)
    _pipeline(attacker, request, 1000, 4096)


def _pipeline(attacker: Attacker, requests: bytes, count: int, buffer: int | None = None) -> None:
    """Send the requests on `count` connections in parallel, without reading answers."""

    def send() -> None:
        connection = attacker.connect(buffer)
        connection.settimeout(1.0)
        attacker.send(connection, requests)

    attacker.in_parallel(send, count)
    attacker.wait()


def silent_handshakes(attacker: Attacker) -> None:
    """6: 390 connections to a TLS server that never begin a handshake; the server may open 400 files."""
    _silent(attacker, 390)


def silent_connections(attacker: Attacker) -> None:
    """7: 330 connections that never send a byte; the server may open 400 files."""
    _silent(attacker, 330)


def _silent(attacker: Attacker, count: int) -> None:
    for _ in range(count):
        try:
            attacker.connect()
        except OSError:
            attacker.statuses["not connected"] += 1
    attacker.wait()


@dataclass(frozen=True)
class Attack:
    """An attack, and the server it needs.

    Attributes:
        run: the attack; the record takes its number and description from the docstring.
        tls: whether the server uses TLS.
        files: the server's limit of open files; None: this process's own limit.
        prefixed: whether the server runs below a root_path, with keys.
    """

    run: Callable[[Attacker], None]
    tls: bool = False
    files: int | None = None
    prefixed: bool = False

    @property
    def name(self) -> str:
        """The number of the attack, such as 2a."""
        return (self.run.__doc__ or "").partition(":")[0]


ATTACKS = (
    Attack(nested_index),
    Attack(large_ids),
    Attack(large_ids_served),
    Attack(nested_parameters),
    Attack(unread_answers),
    Attack(unread_smaller_answers),
    Attack(compressed_json),
    Attack(costly_json),
    Attack(prefix_authorisation, prefixed=True),
    Attack(pipelined),
    Attack(pipelined_small),
    Attack(pipelined_unread),
    Attack(silent_handshakes, tls=True, files=_FILES),
    Attack(silent_connections, files=_FILES),
)


@dataclass
class Probes:
    """Liveness probes, one every 50 ms, each on a new connection.

    Attributes:
        times: duration of each answered probe, s.
        failed: number of probes without a 200 within five seconds.
        gap: longest time from one answered probe to the next, s.
    """

    times: list[float] = field(default_factory=list)
    failed: int = 0
    gap: float = 0.0

    @classmethod
    def run(cls, port: int, certificate: str | None, stop: Event, result: Connection) -> None:
        """Probe until `stop` is set, in a process of its own, and send the probes over `result`."""
        probes, last = cls(), time.monotonic()
        context = None if certificate is None else _trusting(certificate)
        while not stop.is_set():
            began = time.monotonic()
            if probes._probe(port, context):
                now = time.monotonic()
                probes.times.append(now - began)
                probes.gap, last = max(probes.gap, now - last), now
            else:
                probes.failed += 1
            stop.wait(max(0.0, began + _PROBE_S - time.monotonic()))
        probes.gap = max(probes.gap, time.monotonic() - last)
        result.send(probes)

    def _probe(self, port: int, context: ssl.SSLContext | None) -> bool:
        try:
            with ExitStack() as stack:
                address = ("127.0.0.1", port)
                connection = stack.enter_context(socket.create_connection(address, _CONNECTION_TIMEOUT_S))
                if context is not None:
                    connection = stack.enter_context(context.wrap_socket(connection))
                connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            return False


@dataclass(frozen=True)
class Outcome:
    """The effect of one attack; times in ms, memory in MB; "honest" is the normal load."""

    attack: str
    about: str
    wire_bytes: int
    rss_before_mb: float
    rss_growth_mb: float
    longest_liveness_gap_ms: float
    liveness_p99_ms: float
    failed_probes: int
    honest_scheduled: int
    honest_answered: int
    honest_errors: dict[str, int]
    answers_to_attacker: dict[str, int]

    @property
    def broken(self) -> list[str]:
        """Messages on the bounds that were exceeded."""
        found = []
        if self.rss_growth_mb > _GROWTH_MB:
            found.append(f"memory grew by {self.rss_growth_mb:.0f} MB, over {_GROWTH_MB}")
        if self.liveness_p99_ms > _LIVENESS_MS or self.failed_probes:
            found.append(f"liveness p99 {self.liveness_p99_ms:.0f} ms, {self.failed_probes} probes failed")
        if self.honest_answered < self.honest_scheduled:
            lost = self.honest_scheduled - self.honest_answered
            found.append(f"{lost} requests of the normal load failed: {self.honest_errors}")
        if self.attack == "4" and self.answers_to_attacker.get("200", 0):
            found.append(f"{self.answers_to_attacker['200']} policies swapped without an admin key")
        return found


def _trusting(certificate: str) -> ssl.SSLContext:
    """A client's context that trusts the server's own certificate under any host name."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    return context


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate and its key for 127.0.0.1 with openssl."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    command = ("openssl", "req", "-x509", *kind, "-keyout", str(key), "-out", str(cert), *subject)
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def _arguments(attack: Attack, folder: Path) -> list[str]:
    command = harness.command_line("serve-model")
    if attack.prefixed:
        command = [sys.executable, "-m", "benchmarks.servers.path_prefix"]
    command += ["googlenet", "--device", f"emulated:{PROFILE}", "--policy", "greedy"]
    command += ["--queue-bytes", str(QUEUE_BYTES), "--log-level", "warning"]
    if attack.tls:
        cert, key = _certificate(folder)
        command += ["--tls-cert", str(cert), "--tls-key", str(key)]
    if attack.prefixed:
        keys = folder / "keys"
        named = (("user", "predict", _PREDICT_KEY), ("root", "admin", _ADMIN_KEY))
        keys.write_text("".join(f"{n} {s} {sha256(k.encode()).hexdigest()}\n" for n, s, k in named))
        command += ["--api-key-file", str(keys)]
    return command


def run_attack(attack: Attack) -> Outcome:
    """Start a server, load it, attack it, and return the outcome."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        command = _arguments(attack, folder)
        certificate = str(folder / "cert.pem") if attack.tls else None
        context = None if certificate is None else _trusting(certificate)
        server = stack.enter_context(harness.running(*command, tls=context, files=attack.files))
        return _measured(attack, server, certificate)


def _measured(attack: Attack, server: harness.Server, certificate: str | None) -> Outcome:
    port = urllib.parse.urlsplit(server.url).port or 0
    rate = LOAD * load_profile(PROFILE).capacity
    environment = {"PYTHONPATH": ".", "PATH": "/usr/bin:/bin", "BATCHWRIGHT_API_KEY": _PREDICT_KEY}
    if certificate is not None:
        environment["SSL_CERT_FILE"] = certificate
    arrivals = ("--rate", str(rate), "--duration", str(_LOAD_S))
    load = harness.start_load(server.url, *arrivals, "--pixels", "--processes", "1", env=environment)
    time.sleep(_BEFORE_S)
    before, peak, processes = resource_usage(server.process.pid).rss_mb, 0.0, multiprocessing.get_context("spawn")
    stop, (receiving, sending) = processes.Event(), processes.Pipe(duplex=False)
    prober = processes.Process(target=Probes.run, args=(port, certificate, stop, sending))
    prober.start()
    time.sleep(1.0)  # the new process imports this module first
    attacker = Attacker(port, _ATTACK_S)
    thread = threading.Thread(target=attack.run, args=(attacker,))
    thread.start()
    while load.poll() is None:
        peak = max(peak, resource_usage(server.process.pid).rss_mb)
        time.sleep(0.05)
    thread.join()
    stop.set()
    probes: Probes = receiving.recv()
    prober.join()
    attacker.close()
    report = json.loads(load.communicate()[0])
    return Outcome(
        attack=attack.name,
        about=(attack.run.__doc__ or "").partition(": ")[2].rstrip("."),
        wire_bytes=attacker.wire_bytes,
        rss_before_mb=round(before, 1),
        rss_growth_mb=round(peak - before, 1),
        longest_liveness_gap_ms=round(1e3 * probes.gap, 1),
        liveness_p99_ms=round(1e3 * float(np.quantile(probes.times, 0.99)), 1) if probes.times else float("inf"),
        failed_probes=probes.failed,
        honest_scheduled=report["scheduled"],
        honest_answered=report["ok"],
        honest_errors=report["errors"],
        answers_to_attacker=dict(attacker.statuses),
    )


_HEAD = (
    *("attack", "sent, MB", "memory growth, MB", "longest liveness gap, ms", "liveness p99, ms", "failed"),
    "honest answered",
)


def cells(outcome: Outcome) -> tuple[str, ...]:
    """One row of the table that is printed and recorded."""
    return (
        f"{outcome.attack}: {outcome.about}",
        f"{outcome.wire_bytes / 1e6:.2f}",
        f"{outcome.rss_growth_mb:.0f}",
        f"{outcome.longest_liveness_gap_ms:.0f}",
        f"{outcome.liveness_p99_ms:.0f}",
        f"{outcome.failed_probes}",
        f"{outcome.honest_answered} of {outcome.honest_scheduled}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the attacks, print the table, and record it."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="ATTACK", help="the attacks' numbers, such as 1 2a; not recorded")
    chosen = parser.parse_args(arguments)
    outcomes = []
    attacks = [attack for attack in ATTACKS if chosen.only is None or attack.name in chosen.only]
    for attack in attacks:
        outcomes.append(outcome := run_attack(attack))
        print(*cells(outcome), sep=" | ")
        print("", outcome.answers_to_attacker, *outcome.broken, sep="\n    ", flush=True)
    if chosen.only is None:
        harness.save_record("attacks", [asdict(outcome) for outcome in outcomes])
        (harness.RECORDS / "attacks.md").write_text(harness.markdown_table(_HEAD, map(cells, outcomes)) + "\n")
    sys.exit(any(outcome.broken for outcome in outcomes))


if __name__ == "__main__":
    main()
