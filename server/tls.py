"""TLS: the certificate and its key, checked before anything is loaded."""

import ssl
from pathlib import Path

from policies.types import SpecError


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """What a server needs to speak TLS 1.2 or later; None where neither file is given.

    Args:
        certificate: PEM file, the server's own first, then the chain.
        key: PEM file, without a passphrase.

    Raises:
        SpecError: one comes without the other, a file cannot be read, or they do not belong together.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise SpecError("--tls-cert and --tls-key belong together; give both, or neither for plain HTTP")
    for what, path in (("certificate", certificate), ("key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise SpecError(f"the TLS {what} {str(path)!r} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, certificate, key)
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Use this certificate for all handshakes from now on.

    Raises:
        SpecError: the files cannot be used; a context that has another certificate keeps it.
    """
    try:
        # tried apart first: a pair that does not fit would leave half of itself in the context
        for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            each.load_cert_chain(certificate, key, password=lambda: "")  # or OpenSSL would ask on the terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise SpecError(
            f"TLS cannot use {str(certificate)!r} with {str(key)!r} ({reason}); give PEM files that belong together, "
            "the key without a passphrase"
        ) from error
