"""TLS files and their errors."""

import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from policies.types import SpecError
from server.transport.tls import Tls, load_tls, tls_context
from tests.support.certificates import certificate


def test_a_matching_pair_is_accepted_for_tls_1_2_and_later(tmp_path: Path) -> None:
    context = tls_context(*certificate(tmp_path, "a"))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert load_tls(None, None) is None


def test_files_that_cannot_be_used_are_reported_in_one_line(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "a")
    _, other = certificate(tmp_path, "b")
    _, locked = certificate(tmp_path, "c", "-passout", "pass:secret")
    junk = tmp_path / "junk"
    junk.write_text("nothing")
    for pair, says in (
        ((cert, None), "only one of"),
        ((None, key), "only one of"),
        ((tmp_path / "nowhere", key), "certificate.*nowhere"),
        ((cert, tmp_path), "key"),
        ((cert, other), "KEY_VALUES_MISMATCH|MISMATCH"),
        ((cert, locked), "passphrase"),
        ((junk, key), "junk"),
        ((cert, junk), "junk"),
        ((key, cert), "and its private key"),
    ):
        with pytest.raises(SpecError, match=says) as caught:
            load_tls(*pair)
        assert "\n" not in str(caught.value)


RSA = ("-newkey", "rsa:2048", "-nodes")


def test_a_certificate_is_replaced_by_one_of_another_key_type_and_an_invalid_one_is_not_loaded(
    tmp_path: Path,
) -> None:
    used, elliptic, rsa = tmp_path / "used", certificate(tmp_path, "a"), certificate(tmp_path, "b", *RSA)
    used.mkdir()
    files = used / "cert", used / "key"

    def use(cert: Path, key: Path) -> None:
        for file, new in zip(files, (cert, key), strict=True):
            file.write_bytes(new.read_bytes())

    use(*elliptic)
    tls = Tls(*files)
    for pair in (rsa, elliptic, rsa):
        use(*pair)
        tls.reload()
        for suite in ("ECDHE-RSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-GCM-SHA256"):
            shown = served(tls.context, suite)
            assert shown in (pair[0].read_text(), None), "the old certificate is not sent to any client"
        assert served(tls.context) == pair[0].read_text()
    use(elliptic[0], rsa[1])
    with pytest.raises(SpecError):
        tls.reload()
    assert served(tls.context) == rsa[0].read_text()


def served(context: ssl.SSLContext, suite: str | None = None) -> str | None:
    """The PEM certificate that a client receives; with `suite`, a TLS 1.2 client that offers only this cipher suite."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    if suite is not None:
        trusting.maximum_version = ssl.TLSVersion.TLSv1_2
        trusting.set_ciphers(suite)
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        with suppress(ssl.SSLError):
            side.do_handshake()
    try:
        shown = client.getpeercert(binary_form=True)
    except ValueError:  # the handshake failed
        return None
    return None if shown is None else ssl.DER_cert_to_PEM_cert(shown)


def test_files_that_vanish_while_they_are_reloaded_leave_the_last_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path, "a")
    tls = Tls(cert, key)
    context, pem = tls.context, tls.pem
    new = tls_context(cert, key)
    monkeypatch.setattr("server.transport.tls.tls_context", lambda *_: new)
    key.unlink()
    with pytest.raises(SpecError, match=r"the TLS key .* cannot be read"):
        tls.reload()
    assert (tls.context, tls.pem) == (context, pem)
