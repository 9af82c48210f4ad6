"""TLS files, and what is wrong with them."""

import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from policies.types import SpecError
from server.tls import load_certificate, tls_context


def certificate(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *(more or ("-nodes",)))
    command = ("openssl", "req", "-x509", *kind, "-keyout", str(key), "-out", str(cert), *subject)
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_a_pair_that_belongs_together_is_taken_from_tls_1_2_on(tmp_path: Path) -> None:
    context = tls_context(*certificate(tmp_path, "a"))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert tls_context(None, None) is None


def test_what_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "a")
    _, other = certificate(tmp_path, "b")
    _, locked = certificate(tmp_path, "c", "-passout", "pass:secret")
    junk = tmp_path / "junk"
    junk.write_text("nothing")
    for pair, says in (
        ((cert, None), "belong together"),
        ((None, key), "belong together"),
        ((tmp_path / "nowhere", key), "certificate.*nowhere"),
        ((cert, tmp_path), "key"),
        ((cert, other), "KEY_VALUES_MISMATCH|MISMATCH"),
        ((cert, locked), "passphrase"),
        ((junk, key), "junk"),
        ((cert, junk), "junk"),
        ((key, cert), "belong together"),
    ):
        with pytest.raises(SpecError, match=says) as caught:
            tls_context(*pair)
        assert "\n" not in str(caught.value)


def test_a_certificate_is_replaced_in_place_and_one_that_cannot_be_used_is_not(tmp_path: Path) -> None:
    first, second = certificate(tmp_path, "a"), certificate(tmp_path, "b")
    context = tls_context(*first)
    assert context is not None
    assert served(context) == first[0].read_text()
    load_certificate(context, *second)
    assert served(context) == second[0].read_text()
    for pair in ((first[0], second[1]), (tmp_path / "nowhere", first[1])):
        with pytest.raises(SpecError):
            load_certificate(context, *pair)
        assert served(context) == second[0].read_text()


def served(context: ssl.SSLContext) -> str:
    """The certificate, PEM, that a server with this context shows."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return ssl.DER_cert_to_PEM_cert(shown)
