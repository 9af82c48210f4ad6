"""Values of --weights, and pretrained weights from torch hub's cache or from one attempt to download them."""

import hashlib
import logging
import os
import re
import tempfile
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.request import urlopen

from policies.types import SpecError
from server.errors import one_line

_log = logging.getLogger(__name__)

_TIMEOUT = 5.0  # s, for connecting and for each read, so that a dead connection does not block the start
_CHUNK = 1 << 20
_KEYWORDS = ("pretrained", "auto", "random")


class WeightsError(Exception):
    """Weights cannot be downloaded or read; the message says why, without a remedy."""


def is_weights_file(weights: str) -> bool:
    """Whether a value of --weights is a FILE: it is neither pretrained, auto nor random."""
    return weights not in _KEYWORDS


def check_weights(weights: str) -> None:
    """Check that the file that a value of --weights names exists.

    Raises:
        SpecError: there is no such file.
    """
    if is_weights_file(weights) and not Path(weights).is_file():
        raise SpecError(
            f"no weights file {weights!r}; give {', '.join(_KEYWORDS)}, or an existing file of model.state_dict()"
        )


def fetch_weights(url: str, folder: Path) -> Path:
    """The file of `url` in `folder`, downloaded if it is missing.

    The last eight or more hexadecimal digits of the file's name are the start of its SHA-256 digest.

    Raises:
        WeightsError: the download failed.
    """
    path = folder / url.rpartition("/")[2]
    if path.is_file():
        return path
    _log.info("downloading %s to %s", url, path)
    try:
        _download(url, path)
    except (OSError, HTTPException, ValueError) as error:
        reason = one_line(error).removeprefix("<urlopen error ").removesuffix(">")
        raise WeightsError(f"the download failed ({reason})") from error
    return path


def _download(url: str, path: Path) -> None:
    """Download atomically: the file gets its name once it is complete and its digest matches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        try:
            digest = _copy(url, part)
            expected = re.search(r"-([0-9a-f]{8,})\.", path.name)
            if expected is None or not digest.startswith(expected[1]):
                raise ValueError(f"its SHA-256 {digest[:16]}... does not match its name")
            part.close()
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def _copy(url: str, part: IO[bytes]) -> str:
    digest = hashlib.sha256()
    with urlopen(url, timeout=_TIMEOUT) as response:  # noqa: S310  (torchvision's own URL, checked by its digest)
        while chunk := response.read(_CHUNK):
            digest.update(chunk)
            part.write(chunk)
    return digest.hexdigest()
