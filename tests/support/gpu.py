"""A GPU that is not there."""

import pytest

from server.backends import real_device
from server.backends.real_device import RealDevice


def pretend_to_have_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every CUDA device, and "auto", be the same GPU for the rest of a test."""
    found = {spec: RealDevice("cuda:0", "Some GPU", "GPU-0") for spec in ("auto", "cuda", "cuda:0")}
    monkeypatch.setattr(real_device, "_find", lambda spec: found.get(spec) or RealDevice("cpu", "Some CPU"))
