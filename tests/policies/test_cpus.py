"""Available processors by affinity and by cgroup quotas."""

import os
from pathlib import Path

import pytest

from policies.cpus import available_cpus


@pytest.fixture(autouse=True)
def _affinity_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def limited(root: Path, own: str, **files: str) -> int:
    for path, text in files.items():
        file = root / path.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "own").write_text(own)
    return available_cpus(root, root / "own")


def test_the_affinity_limits_without_a_quota(tmp_path: Path) -> None:
    assert available_cpus(tmp_path, tmp_path / "nothing") == 64
    assert limited(tmp_path, "0::/\n", cpu_dot_max="max 100000\n") == 64


@pytest.mark.parametrize(("quota", "cpus"), [("200000", 2), ("250000", 3), ("10000", 1), ("9000000", 64), ("x", 64)])
def test_a_quota_limits_and_is_rounded_up(tmp_path: Path, quota: str, cpus: int) -> None:
    assert limited(tmp_path, "0::/\n", cpu_dot_max=f"{quota} 100000\n") == cpus


def test_the_least_quota_of_all_ancestors_limits(tmp_path: Path) -> None:
    files = {"a__cpu_dot_max": "800000 100000", "a__b__cpu_dot_max": "max 100000"}
    assert limited(tmp_path, "0::/a/b\n", **files) == 8
    assert limited(tmp_path, "0::/../../elsewhere\n", **files) == 64


def test_cgroup_version_1_with_a_path_of_the_host(tmp_path: Path) -> None:
    files = {"cpu,cpuacct__cpu_dot_cfs_quota_us": "300000", "cpu,cpuacct__cpu_dot_cfs_period_us": "100000"}
    own = "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/docker/x\n"
    assert limited(tmp_path, own, **files) == 3
    assert limited(tmp_path, own, **files | {"cpu,cpuacct__cpu_dot_cfs_quota_us": "-1"}) == 64
