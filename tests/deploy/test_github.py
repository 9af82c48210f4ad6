"""Tests of the GitHub workflow and the issue forms."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".github"


def load_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.BaseLoader)  # every value is a string, since `on` would be a boolean


def test_the_workflow_runs_the_ci_script_on_each_supported_python() -> None:
    workflow = load_yaml(FOLDER / "workflows" / "check.yml")
    assert set(workflow["on"]) == {"push", "pull_request"}
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == "bash .ci/run"
    assert (ROOT / ".ci" / "run").is_file()
    oldest = (ROOT / "pyproject.toml").read_text().partition('requires-python = ">=')[2].partition('"')[0]
    assert job["strategy"]["matrix"]["python-version"][0] == oldest
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_an_issue_form_has_the_keys_that_github_requires(name: str) -> None:
    form = load_yaml(FOLDER / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") == "true" for field in fields)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_targets_and_paths_in_the_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in (part.partition(")")[0] for part in text.split("](")[1:]):
        assert (ROOT / link).exists(), link
    for target in (part.partition("`")[0] for part in text.split("`make ")[1:]):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    for path in (part.partition("`")[0] for part in text.split("`")[1::2]):
        if path.startswith(("server/", "deploy/", "tests/", "benchmarks/")):
            assert (ROOT / path).exists(), path
