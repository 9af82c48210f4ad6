"""TLS: the certificate and its key, checked before anything is loaded."""

import ssl
from pathlib import Path

from policies.types import SpecError


class Tls:
    """The certificate of a server, which can be read again.

    Attributes:
        context: for the handshakes from now on.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read both files; raises as `tls_context`."""
        self._files = certificate, key
        self.context = tls_context(certificate, key)

    def reload(self) -> None:
        """Read the files again; raises as `tls_context`, and then nothing changes.

        The context is a new one: OpenSSL keeps one certificate for each type of key, so an old one could stay in use.
        """
        self.context = tls_context(*self._files)


def tls_of(certificate: Path | None, key: Path | None) -> Tls | None:
    """The server's certificate; None where neither file is given.

    Raises:
        SpecError: one comes without the other, or as `tls_context`.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise SpecError("--tls-cert and --tls-key belong together; give both, or neither for plain HTTP")
    return Tls(certificate, key)


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What a server needs to speak TLS 1.2 or later.

    Args:
        certificate: PEM file, the server's own first, then the chain.
        key: PEM file, without a passphrase.

    Raises:
        SpecError: a file cannot be read, or they do not belong together.
    """
    for what, path in (("certificate", certificate), ("key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise SpecError(f"the TLS {what} {str(path)!r} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # or OpenSSL would ask on the terminal
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise SpecError(
            f"TLS cannot use {str(certificate)!r} with {str(key)!r} ({reason}); give PEM files that belong together, "
            "the key without a passphrase"
        ) from error
    return context
