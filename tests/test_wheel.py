"""The files that are in the wheel, by its build configuration."""

from collections.abc import Iterator

import pytest

from benchmarks.support.harness import ROOT

PACKAGES = ("batchwright", "policies", "server", "profiler", "loadgen")


def files_of(folder: str) -> Iterator[str]:
    """The files in a folder of the repository, relative to its root, without what Python compiled."""
    for path in (ROOT / folder).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(ROOT))


def test_the_packages_with_all_their_files_and_the_examples_are_in_the_wheel() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    included = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    assert included == {
        *(file for package in PACKAGES for file in files_of(package)),
        *(f"batchwright/{file}" for file in files_of("examples")),
    }
    assert included > {
        "batchwright/examples/ocr/model.py",
        "batchwright/py.typed",
        "loadgen/page.html",
        "policies/profiles/googlenet-tesla-p4.json",
        "server/api/dashboard/assets/index.html",
    }
