"""The memory that a server reserves while no call is open, as seen from outside."""

import json
import re
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from urllib.parse import urlsplit

from benchmarks.support.harness import Server

_INFER = "/v2/models/googlenet/infer"
_TIMEOUT_S = 30.0
_LARGE = 50 * 2**20  # bytes; two such bodies are over the half of the budget that large calls may reserve
BUDGET_FLAGS = "--queue-bytes", str(160 * 2**20)  # of serve-model, for which this holds


def bytes_held(server: Server) -> int:
    """Bytes of the memory budget that small calls reserve, by the error of a large call beside another one.

    The server must serve googlenet with `BUDGET_FLAGS`. The error has the bytes of all calls, and those of the large
    ones, which grow as their bodies arrive.
    """
    url = urlsplit(server.url)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(closing(HTTPConnection(url.hostname or "", url.port, timeout=_TIMEOUT_S)))
            for _ in range(2)
        )
        for connection, sent in ((first, _LARGE - 1), (second, _LARGE)):
            connection.putrequest("POST", _INFER)
            connection.putheader("Content-Length", str(_LARGE))
            connection.putheader("Inference-Header-Content-Length", "0")
            connection.endheaders()
            with suppress(OSError):  # the server may answer before it has read the body
                connection.send(bytes(sent))
        error = str(json.loads(second.getresponse().read())["error"])
    found = re.search(r"calls reserve (\d+) of \d+, large ones (\d+) of", error)
    if found is None:
        raise RuntimeError(f"a second body of {_LARGE} bytes was answered {error!r}; expected: no room in the budget")
    return int(found[1]) - int(found[2])
