"""A server of the Open Inference Protocol in a thread: it answers each input unchanged, or as a test sets it up."""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

LENGTH = "Inference-Header-Content-Length"
Reply = tuple[int, Mapping[str, str], bytes]


def metadata(**tensors: tuple[str, list[int]]) -> dict[str, Any]:
    """The metadata of a model with these inputs, datatype and shape by name, and an output out_NAME for each."""
    described = {name: {"datatype": datatype, "shape": shape} for name, (datatype, shape) in tensors.items()}
    return {
        "name": "echo",
        "versions": ["1"],
        "platform": "fake",
        "inputs": [{"name": name, **about} for name, about in described.items()],
        "outputs": [{"name": f"out_{name}", **about} for name, about in described.items()],
    }


def error(status: int, text: str) -> Reply:
    return status, {}, json.dumps({"error": text}).encode()


@dataclass
class Inference:
    """A call: its JSON, and the binary data of each input by name."""

    document: dict[str, Any]
    data: dict[str, bytes]

    def floats(self, name: str = "x") -> Any:
        return np.frombuffer(self.data[name], np.float32)

    def echo(self) -> Reply:
        outputs, blobs = [], []
        for each in self.document["inputs"]:
            blobs.append(self.data[each["name"]])
            size = {"binary_data_size": len(blobs[-1])}
            outputs.append({**each, "name": f"out_{each['name']}", "parameters": size})
        head = json.dumps({"model_name": "echo", "outputs": outputs}).encode()
        return 200, {LENGTH: str(len(head))}, b"".join([head, *blobs])


@dataclass
class FakeUpstream:
    """Behaviour of the server, and what it saw.

    Attributes:
        metadata: of its models.
        config: of its models; None: it has no such route.
        server: the metadata of the server; None: it has no such route.
        ready: status of the readiness route.
        reply: answers a call; it may block.
        tls: of a server that speaks TLS.
        connections: number of connections so far.
        batches: sizes of the calls' batches.
    """

    metadata: Any = field(default_factory=lambda: metadata(x=("FP32", [-1, 2])))
    config: Any = field(default_factory=lambda: {"max_batch_size": 8})
    server: Any = None
    ready: int = 200
    reply: Callable[[Inference], Reply] = Inference.echo
    tls: ssl.SSLContext | None = None
    connections: int = 0
    batches: list[int] = field(default_factory=list)
    port: int = 0
    _server: ThreadingHTTPServer | None = None
    _open: set[socket.socket] = field(default_factory=set)

    @property
    def spec(self) -> str:
        return f"oip:http{'' if self.tls is None else 's'}://127.0.0.1:{self.port}/echo"

    @property
    def device(self) -> str:
        return f"oip:127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before."""
        upstream = self

        class Handler(_Handler):
            fake = upstream

        server = self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        server.daemon_threads, server.block_on_close = True, False
        if self.tls is not None:
            server.socket = self.tls.wrap_socket(server.socket, server_side=True)
        self.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """End as a killed process does: no listener, and all connections closed."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self.drop_connections()

    def drop_connections(self) -> None:
        for connected in [*self._open]:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeUpstream

    def setup(self) -> None:
        super().setup()
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.fake.connections += 1
        self.fake._open.add(self.request)

    def finish(self) -> None:
        self.fake._open.discard(self.request)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        route = self.path.removeprefix("/v2/models/echo")
        document = {"": self.fake.metadata, "/config": self.fake.config, "/v2": self.fake.server}.get(route)
        if route == "/ready":
            self._respond((self.fake.ready, {}, b""))
        elif document is None:
            self._respond(error(404, f"nothing at {self.path}"))
        else:
            self._respond((200, {}, document if isinstance(document, bytes) else json.dumps(document).encode()))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        start = int(self.headers[LENGTH])
        document, data = json.loads(body[:start]), {}
        for each in document["inputs"]:
            stop = start + each["parameters"]["binary_data_size"]
            data[each["name"]], start = body[start:stop], stop
        assert start == len(body)
        self.fake.batches.append(document["inputs"][0]["shape"][0])
        self._respond(self.fake.reply(Inference(document, data)))

    def _respond(self, reply: Reply) -> None:
        status, headers, body = reply
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def upstream(**behaviour: Any) -> Iterator[FakeUpstream]:
    """A running server."""
    fake = FakeUpstream(**behaviour)
    fake.start()
    try:
        yield fake
    finally:
        fake.stop()
