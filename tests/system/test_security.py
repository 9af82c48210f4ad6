"""Security of the real server process: keys, TLS, browser protections, and slow, malformed and malicious requests."""

import http.client
import json
import re
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks.servers.path_prefix import PREFIX
from benchmarks.support.harness import Server, command_line, free_port, running, serving
from tests.support.certificates import certificate, install
from tests.support.fork_server import run_serve_model, start_process
from tests.support.http_client import fetch, photograph
from tests.support.logged_server import logged_server
from tests.system.test_serve import EMULATED, outcomes, until

POLICY = "/admin/models/googlenet/policy"
USER, ROOT = {"Authorization": "Bearer u"}, {"Authorization": "Bearer r"}
KEYS = f"user predict {sha256(b'u').hexdigest()}\nroot admin {sha256(b'r').hexdigest()}\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*EMULATED, "--policy", "greedy", "--header-timeout-s", "0.3", "--body-timeout-s", "0.3") as running:
        yield running


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    with serving(*EMULATED, "--policy", "greedy", "--api-key-file", str(file)) as running:
        yield running


def exchange(url: str, sent: bytes) -> bytes:
    """Send bytes and return all that is received until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_routes_require_a_key_of_their_scope(with_keys: Server) -> None:
    url = with_keys.url
    for path, method, key in (("/predict", "POST", USER), ("/v2", "GET", USER), (POLICY, "GET", ROOT)):
        body = photograph() if method == "POST" else None
        assert fetch(url, path, body, method).status == 401
        assert fetch(url, path, body, method, {"Authorization": "Bearer x"}).status == 401
        assert fetch(url, path, body, method, key).status == 200
        assert fetch(url, path, body, method, ROOT if key is USER else USER).status == 403
    assert fetch(url, POLICY, b'{"policy": "serial"}', "PUT", USER).status == 403
    assert fetch(url, POLICY, headers=ROOT).json["name"] == "greedy"
    for path in ("/", "/docs", "/openapi.json", "/metrics", "/v2/health/live", "/v2/health/ready"):
        assert fetch(url, path).status == 200


@pytest.mark.parametrize(
    "path", ["//admin", "/x/../admin", "/%61dmin", "/admin%2f", "/Admin", "/admin/..;", "http://x/admin"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST"])
def test_other_spellings_of_an_admin_path_do_not_bypass_the_keys(with_keys: Server, path: str, method: str) -> None:
    head = f"{method} {path}/models/googlenet/policy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    reply = exchange(with_keys.url, f"{head}Authorization: Bearer u\r\nContent-Length: 0\r\n\r\n".encode())
    assert int(reply.split()[1]) in (400, 403, 404), reply


def test_a_request_without_a_key_is_rejected_before_its_body(with_keys: Server) -> None:
    with socket.create_connection(("127.0.0.1", int(with_keys.url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_the_pages_have_a_strict_content_security_policy(server: Server) -> None:
    for path in ("/", "/docs"):
        reply = fetch(server.url, path)
        policy = reply.headers["content-security-policy"]
        for rule in ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
            assert rule in policy
        assert "unsafe" not in policy
        assert reply.headers["x-frame-options"] == "DENY"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert not re.search(rb"(src|<link[^>]*href)=.?(https?:)?//", reply.body), "no external resources"
    assert "/predict/{model}" in fetch(server.url, "/docs").body.decode()


def test_every_response_has_the_id_of_its_request(server: Server) -> None:
    for path in ("/v2", "/nowhere", "/admin/models/none/policy", "/v2/models/none/infer"):
        assert fetch(server.url, path, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert fetch(server.url, "/v2/models/none/infer", b"{}").headers["x-request-id"]


@pytest.mark.parametrize(
    "spec", ["/etc/passwd", "../x.json", "/etc/x.json", " x.json", "x.json:a=1", "x.json,max_wait_ms=1"]
)
def test_a_policy_change_cannot_name_a_file_of_the_server(server: Server, spec: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("contents")
    for named in (spec, spec.replace("../x.json", str(file))):
        reply = fetch(server.url, POLICY, json.dumps({"policy": named}).encode(), "PUT")
        assert reply.status == 400
        assert "contents" not in reply.json["error"]
        assert ".json" in named.replace("/etc/passwd", ".json")
    assert fetch(server.url, POLICY).json["name"] == "greedy"


def test_cross_site_requests_and_dns_rebinding_cannot_swap_the_policy(server: Server) -> None:
    foreign, own = {"Origin": "http://evil.example"}, {"Origin": server.url}
    assert fetch(server.url, POLICY, b'{"policy": "serial"}', "PUT", foreign).status == 403
    assert fetch(server.url, POLICY, b'{"policy": "greedy"}', "PUT", own).status == 200
    port = server.url.rpartition(":")[2]
    rebound = {
        "Host": f"evil.example:{port}",
        "Origin": f"http://evil.example:{port}",
    }  # a name that resolves to 127.0.0.1
    assert fetch(server.url, POLICY, b'{"policy": "serial"}', "PUT", rebound).status == 403


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /predict HTTP/1.1\r\nHost: x\r\n", 408),
        (b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc", 408),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n", 431),
        (b"POST /predict HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
    ],
)
def test_slow_and_malformed_requests_get_an_error_and_are_disconnected(
    server: Server, sent: bytes, status: int
) -> None:
    reply = exchange(server.url, sent)
    assert reply.startswith(b"HTTP/1.1 %d " % status)
    assert set(json.loads(reply.partition(b"\r\n\r\n")[2])) == {"error"}


def test_a_silent_connection_is_closed(server: Server) -> None:
    assert exchange(server.url, b"") == b""


@pytest.mark.parametrize("target", ["//[", "/%00%0a%ff", "/predict/%00", "*", "/v2/models/%0d%0a/infer", "//[/admin/"])
@pytest.mark.parametrize("host", ["x", "[", "a/b", '"><script>'])
def test_malformed_addresses_cause_no_internal_error(server: Server, target: str, host: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        assert exchange(server.url, head.encode()).split()[1] in (b"400", b"404", b"405")
    page = exchange(server.url, f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert page.split()[1] in (b"200", b"400")
    assert b"<script>" not in page


def test_a_chunked_body_over_the_limit_is_rejected(with_keys: Server) -> None:
    port = int(with_keys.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nAuthorization: Bearer u\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(65):
            connection.sendall(b"100000\r\n" + bytes(2**20) + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_malicious_form_does_not_delay_other_requests(with_keys: Server) -> None:
    form = b"--x\r\nA: b\r\n\r\n" + b"\r\n--y" * (2**24 // 5 * 3)
    headers = {"Content-Type": "multipart/form-data; boundary=x", **USER}
    with ThreadPoolExecutor() as pool:
        forms = [pool.submit(fetch, with_keys.url, "/predict", form, headers=headers) for _ in range(3)]
        while not all(future.done() for future in forms):
            assert fetch(with_keys.url, "/v2/health/live").status == 200
        assert {future.result().status for future in forms} == {400}


def test_unsent_bodies_occupy_no_place_in_the_queue() -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n"
    with serving(*EMULATED, "--policy", "greedy", "--queue-capacity", "32") as server, ExitStack() as stack:
        for _ in range(40):
            idle = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)
            stack.enter_context(idle).sendall(head)
            assert idle.recv(100).startswith(b"HTTP/1.1 100"), "it was admitted"
        assert fetch(server.url, "/predict", photograph()).status == 200


def test_a_disconnect_during_the_body_is_counted_once(server: Server) -> None:
    before = outcomes(server).get("cancelled", 0)
    raw = b"/v2/models/googlenet/infer"
    for number, path in enumerate((b"/predict", raw), 1):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            connection.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc" % path)
        until(lambda n=number: outcomes(server).get("cancelled", 0) >= before + n)  # type: ignore[misc]
    assert outcomes(server)["cancelled"] == before + 2


def test_a_disconnect_or_time_out_during_a_policy_change_causes_no_internal_error(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    command = [*command_line("serve-model"), *EMULATED, "--policy", "greedy", "--body-timeout-s", "0.3"]
    with log.open("w") as stderr:
        process = start_process([*command, "--port", str(port), "--log-level", "debug"], stderr.fileno())
    try:
        until(lambda: "ready on" in log.read_text())
        for path in (POLICY, "/v2/repository/index"):
            method = "PUT" if path == POLICY else "POST"
            part = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nabc".encode()
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(part)
            assert exchange(f"http://127.0.0.1:{port}", part).startswith(b"HTTP/1.1 408")
        until(lambda: log.read_text().count('"status":499') == 4)
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert not {"error", "critical"} & {json.loads(line)["level"] for line in log.read_text().splitlines()}
    assert "Traceback" not in log.read_text()


def test_the_limit_on_open_files_is_raised_to_the_hard_limit(server: Server) -> None:
    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    soft, hard = re.findall(r"Max open files\s+(\S+)\s+(\S+)", limits)[0]
    assert soft == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= int(hard)


def test_tls_is_served_and_its_address_is_logged(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "own")
    pair = ("--tls-cert", str(cert), "--tls-key", str(key))
    with logged_server(tmp_path, *EMULATED, "--policy", "greedy", *pair) as server:
        assert server.url.startswith("https://127.0.0.1:")
        port = int(server.url.rpartition(":")[2])
        context = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
        for _ in range(2):
            connection.request("POST", "/predict", photograph())
            reply = connection.getresponse()
            assert (reply.status, len(json.loads(reply.read())["predictions"])) == (200, 5)
        connection.close()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        old = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
        old.request("GET", "/v2")
        assert old.getresponse().status == 200
        old.close()
        assert exchange(f"http://127.0.0.1:{port}", b"GET / HTTP/1.1\r\n\r\n")[:5] != b"HTTP/"


def test_invalid_key_and_certificate_files_are_reported_before_the_start(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("user predict secret\n")
    arguments = ("--api-key-file", str(keys), "--tls-cert", str(tmp_path / "nowhere"), "--tls-key", str(keys))
    done = run_serve_model(*EMULATED, *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "line 1" in done.stderr
    assert "nowhere" in done.stderr
    assert "the sha256 is not" in done.stderr


def test_below_a_prefix_pictures_are_served_and_keys_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(KEYS)
    command = [
        sys.executable,
        "-m",
        "benchmarks.servers.path_prefix",
        *EMULATED,
        "--policy",
        "greedy",
        "--api-key-file",
        str(file),
    ]
    swap = b'{"policy": "serial"}'
    with running(*command) as server:
        for prefix in (PREFIX, ""):
            assert fetch(server.url, f"{prefix}/predict", photograph(), headers=USER).status == 200
            pixels = fetch(server.url, f"{prefix}/v2/models/googlenet/infer", bytes(150528), headers=USER | RAW)
            assert pixels.status == 200
            assert fetch(server.url, f"{prefix}/v2/models/googlenet", headers=USER).json["name"] == "googlenet"
            assert fetch(server.url, f"{prefix}/v2/health/ready").status == 200
            assert fetch(server.url, f"{prefix}{POLICY}", swap, "PUT", USER).status == 403
            assert fetch(server.url, f"{prefix}{POLICY}", swap, "PUT").status == 401
            assert fetch(server.url, f"{prefix}{POLICY}", headers=ROOT).json["name"] == "greedy"


RAW = {"Inference-Header-Content-Length": "0"}


def test_sighup_reloads_keys_and_certificates(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    first, second = certificate(tmp_path, "first"), certificate(tmp_path, "second")
    files = install(tmp_path, *first)
    context = ssl.create_default_context(cafile=str(first[0]))
    context.load_verify_locations(second[0])
    tls = ("--tls-cert", str(files[0]), "--tls-key", str(files[1]))
    command = (*command_line("serve-model"), *EMULATED, "--policy", "greedy", "--api-key-file", str(keys), *tls)
    with running(*command, tls=context) as server:
        port = int(server.url.rpartition(":")[2])

        def shown() -> str:
            return ssl.get_server_certificate(("127.0.0.1", port))

        def status() -> int:
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
            connection.request("GET", "/v2", headers=USER)
            try:
                return connection.getresponse().status
            finally:
                connection.close()

        assert status() == 200
        assert shown() == first[0].read_text()
        keys.write_text(KEYS.splitlines()[1] + "\n")
        install(tmp_path, *second)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: status() == 401)
        until(lambda: shown() == second[0].read_text())
        keys.write_text("nonsense")
        install(tmp_path, first[0], second[1])
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert status() == 401, "an invalid file changes nothing"
        assert shown() == second[0].read_text()
