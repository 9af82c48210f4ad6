import os
from pathlib import Path

import pytest

from server.energy.rapl import rapl_meter

SPAN = 1_000_000  # uJ


def zone(root: Path, number: str, name: str, energy: object) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir()
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{SPAN}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    return folder / "energy_uj"


def test_packages_are_added_without_subzones_and_platform(tmp_path: Path) -> None:
    counters = [
        zone(tmp_path, number, name, 100)
        for number, name in [("0", "package-0"), ("1", "package-1"), ("2", "psys"), ("0:0", "core")]
    ]
    (tmp_path / "intel-rapl").mkdir()
    meter = rapl_meter(tmp_path)
    assert meter.read() == 0.0
    for counter in counters:
        counter.write_text("250100")
    assert meter.read() == pytest.approx(0.5)
    assert (meter.source, meter.scope, meter.resolution) == ("rapl", "package", 1e-3)
    assert "2 CPU packages" in meter.about


def test_a_wrap_of_the_counter_is_added(tmp_path: Path) -> None:
    counter = zone(tmp_path, "0", "package-0", 900_000)
    meter = rapl_meter(tmp_path)
    found = []
    for value in (950_000, 10_000, 10_000, 800_000, 5_000):
        counter.write_text(str(value))
        found.append(meter.read())
    assert found == pytest.approx([0.05, 0.11, 0.11, 0.9, 1.105])


def test_an_unreadable_counter_reads_none_until_it_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counter = zone(tmp_path, "0", "package-0", 0)
    meter = rapl_meter(tmp_path)
    counter.unlink()
    assert [meter.read(), meter.read()] == [None, None]
    assert len(caplog.records) == 1
    counter.write_text("500000")
    assert meter.read() == pytest.approx(0.5)


@pytest.mark.parametrize("name", [None, "psys"])
def test_without_a_package_there_is_no_meter(tmp_path: Path, name: str | None) -> None:
    if name:
        zone(tmp_path, "0", name, 0)
    with pytest.raises(OSError, match="no RAPL package"):
        rapl_meter(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_the_error_for_a_counter_only_root_may_read_has_the_remedy(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 0).chmod(0)
    with pytest.raises(OSError, match=r"Permission denied\); only root may read RAPL"):
        rapl_meter(tmp_path)


def test_the_error_for_an_unreadable_counter_has_the_remedy(tmp_path: Path) -> None:
    counter = zone(tmp_path, "0", "package-0", 0)
    counter.unlink()
    counter.mkdir()
    with pytest.raises(OSError, match=r"energy_uj cannot be read .*chmod a\+r"):
        rapl_meter(tmp_path)


def test_a_counter_without_a_number_is_an_error(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", "lots")
    with pytest.raises(OSError, match="does not contain a number"):
        rapl_meter(tmp_path)
