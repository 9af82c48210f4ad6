"""The workflow on GitHub runs what CI runs, and the issue forms are forms."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".github"


def load(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.BaseLoader)  # every value is a string: `on` is no truth value


def test_the_workflow_runs_what_ci_runs_on_each_python_that_is_supported() -> None:
    workflow = load(FOLDER / "workflows" / "check.yml")
    assert set(workflow["on"]) == {"push", "pull_request"}
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == "bash .ci/run"
    assert (ROOT / ".ci" / "run").is_file()
    least = (ROOT / "pyproject.toml").read_text().partition('requires-python = ">=')[2].partition('"')[0]
    assert job["strategy"]["matrix"]["python-version"][0] == least
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_an_issue_form_has_what_github_asks_for(name: str) -> None:
    form = load(FOLDER / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") == "true" for field in fields)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_what_the_pages_name_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in (part.partition(")")[0] for part in text.split("](")[1:]):
        assert (ROOT / link).exists(), link
    for target in (part.partition("`")[0] for part in text.split("`make ")[1:]):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    for path in (part.partition("`")[0] for part in text.split("`")[1::2]):
        if path.startswith(("server/", "deploy/", "tests/", "benchmarks/")):
            assert (ROOT / path).exists(), path
