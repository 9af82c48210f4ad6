"""TLS certificate and key of the server."""

import ssl
from pathlib import Path

from policies.types import SpecError


class Tls:
    """A certificate that can be reloaded.

    Attributes:
        context: SSL context for new handshakes.
        pem: content of the files: key and certificate.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load both files; raises as `tls_context`."""
        self._files = certificate, key
        self.context, self.pem = _load(certificate, key)

    def reload(self) -> None:
        """Load the files again; raises as `tls_context`, and keeps the last context then.

        The context is a new one, since OpenSSL keeps one certificate per key type and could still use an old one.
        """
        self.context, self.pem = _load(*self._files)


def _load(certificate: Path, key: Path) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
    """The context, and the content of the files: key and certificate."""
    return tls_context(certificate, key), (_read("key", key), _read("certificate", certificate))


def _read(what: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"the TLS {what} {str(path)!r} cannot be read: {error.strerror}; give a readable PEM file"
        ) from error


def load_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """Load the server's certificate; None if neither file is given.

    Raises:
        SpecError: only one file is given, or as `tls_context`.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise SpecError("only one of --tls-cert and --tls-key is given; give both, or neither for plain HTTP")
    return Tls(certificate, key)


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """SSL context of a server for TLS 1.2 and later.

    Args:
        certificate: PEM file with the server's certificate, then its chain.
        key: PEM file with the private key, without a passphrase.

    Raises:
        SpecError: a file cannot be read, or the key does not match the certificate.
    """
    for what, path in (("certificate", certificate), ("key", key)):
        _read(what, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # without it OpenSSL prompts on the terminal
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise SpecError(
            f"TLS cannot use the certificate {str(certificate)!r} with the key {str(key)!r} ({reason}); give a PEM "
            "certificate and its private key without a passphrase"
        ) from error
    return context
