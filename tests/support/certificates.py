"""Self-signed certificates of 127.0.0.1, made by openssl."""

import subprocess
from pathlib import Path


def certificate(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """Make a certificate and its key; `more` are further arguments of `openssl req`."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    kind = more if "-newkey" in more else ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *more)
    kind = kind if "-passout" in more or "-nodes" in more else (*kind, "-nodes")
    command = ("openssl", "req", "-x509", *kind, "-keyout", str(key), "-out", str(cert), *subject)
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def install(folder: Path, cert: Path, key: Path) -> tuple[Path, Path]:
    """Write a certificate and a key to the files that a server of this folder reads, and return these."""
    files = folder / "installed.pem", folder / "installed.key"
    for file, new in zip(files, (cert, key), strict=True):
        file.write_bytes(new.read_bytes())
    return files
