"""The number of gateways that --gateways auto means."""

from pathlib import Path
from typing import Any

import pytest

from server.app import supervisor
from server.config import Settings


def number(monkeypatch: pytest.MonkeyPatch, cpus: int, **settings: Any) -> int:
    monkeypatch.setattr(supervisor, "available_cpus", lambda: cpus)
    return supervisor.number_of_gateways(Settings(**{"models": ["googlenet"], **settings}))


@pytest.mark.parametrize(
    ("cpus", "expected"), [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (8, 3), (14, 6), (16, 6), (128, 6)]
)
def test_a_gpu_gets_one_for_each_two_processors_but_one_less(
    monkeypatch: pytest.MonkeyPatch, cpus: int, expected: int
) -> None:
    assert number(monkeypatch, cpus, device="cuda:0") == expected
    assert number(monkeypatch, cpus, device="cpu,cuda:1") == expected
    assert number(monkeypatch, cpus, models=["m=oip:http://a:8000/m"]) == expected


@pytest.mark.parametrize("device", ["cpu", "emulated:googlenet-tesla-p4"])
def test_other_devices_get_none(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    assert number(monkeypatch, 16, device=device) == 0


def test_the_automatic_device_is_a_gpu_if_there_is_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(supervisor, "_NVIDIA_DRIVER", tmp_path / "missing")
    assert number(monkeypatch, 16) == 0
    monkeypatch.setattr(supervisor, "_NVIDIA_DRIVER", tmp_path)
    assert number(monkeypatch, 16) == 6


@pytest.mark.parametrize("given", [0, 1, "3", 64])
def test_a_number_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch, given: int | str) -> None:
    assert number(monkeypatch, 2, gateways=given, device="cuda:0") == int(given)
