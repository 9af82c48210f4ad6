"""How gateways and the serving process find each other, and what a gateway is told when it connects."""

import struct
from pathlib import Path
from typing import NamedTuple

FLEET_SOCKET, HTTP_SOCKET = "fleet.sock", "http.sock"  # in the folder that the processes share
GREETING = struct.Struct("<QQ")  # size and number of slots; sent with descriptors of memory and state


class GatewaySetup(NamedTuple):
    """What a gateway needs of the server's settings.

    Attributes:
        gateways: number of gateways.
        log: lowest level and format of the log.
        queue_capacity: maximum number of waiting requests.
        max_json_bytes: of the JSON part of a call.
        memory: the gateway's share of the memory budget of all calls, bytes.
        host: host name that the server is bound to.
        api_key_file: file of API keys; None without keys.
        tls: files of the certificate and its key; None for plain HTTP.
        time_limits: those of a connection, s, in the order of `TimeLimits`.
        otlp_endpoint: URL of a collector of traces; None without tracing.
        grpc_port: port of gRPC, which all gateways share; 0 without gRPC.
    """

    gateways: int
    log: tuple[str, str]
    queue_capacity: int
    max_json_bytes: int
    memory: int
    host: str
    api_key_file: Path | None
    tls: tuple[Path | None, Path | None]
    time_limits: tuple[float, float, float, float]
    otlp_endpoint: str | None
    grpc_port: int = 0
