"""Stage C of benchmarks/gpu.py over HTTP, with servers that fail in place of real ones."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support import gpu_http
from benchmarks.support.gpu_http import measure_http

CAPACITY = 8 / 0.004  # 1/s, of the profile


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    content = {"schema": "batchwright.profile/1", "name": "p", "batch_size": [1, 8], "service_time_s": [0.002, 0.004]}
    path.write_text(json.dumps(content))
    return path


def measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path, broken: set[int]
) -> dict[str, Any]:
    """The results with servers of 1, 2 and 4 gateways that answer 1500/s for each; those of `broken` do not start."""

    class Fake:
        def __init__(self, gateways: int) -> None:
            self.gateways = gateways

        def set_policy(self, model: str, spec: str) -> None:
            pass

    @contextmanager
    def server(model: str, device: str, path: Path, gateways: int, until: float) -> Iterator[Fake]:
        if gateways in broken:
            raise RuntimeError("the server did not become ready")
        yield Fake(gateways)

    def cell(server: Fake, rate: float) -> dict[str, Any]:
        answered = min(rate, 1500.0 * server.gateways)
        return {"offered_hz": rate, "throughput_hz": answered, "client_late": False, "cpu_bound": False}

    monkeypatch.setattr(gpu_http, "_server", server)
    monkeypatch.setattr(gpu_http, "_cell", cell)
    measure_http("m", "cpu", profile, (1, 2, 4), 3600.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::result ")]
    return dict(json.loads(line.removeprefix("::result ")) for line in lines)


def test_rates_grow_until_one_is_not_answered_and_policies_run_with_the_best_number_of_gateways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    found = measured(monkeypatch, capsys, profile, set())
    assert found["throughput"][0]["offered_hz"] == 0.5 * CAPACITY
    for count in (1, 2, 4):
        rows = [row for row in found["throughput"] if row["gateways"] == count]
        assert rows[-1]["throughput_hz"] < 0.9 * rows[-1]["offered_hz"]
        assert all(row["throughput_hz"] >= 0.9 * row["offered_hz"] for row in rows[:-1])
    assert found["best"]["gateways"] == 4
    assert len(found["policies"]) == 9


def test_a_server_that_does_not_start_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    found = measured(monkeypatch, capsys, profile, {1, 4})
    assert set(found["failures"]) == {"1", "4"}
    assert found["best"]["gateways"] == 2


def test_without_any_server_the_part_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"no server was measured: .*did not become ready"):
        measured(monkeypatch, capsys, profile, {1, 2, 4})
