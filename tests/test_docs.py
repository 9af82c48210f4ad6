"""Checks of the documentation: links, flags, policy specs, alerts and the output of a script."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from loadgen.cli import app as generate_load
from policies.catalog import parse_spec
from policies.command_line.cli import app as solve_policy
from profiler.cli import app as profile_model
from server.backends.executor import Batch
from server.backends.tensor_device import TensorDevice
from server.cli import app as serve_model
from server.models.sources import TensorSource
from server.models.tensors.codec import TensorCodec
from tests.support.reference import PAGE, reference

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESEARCH = [ROOT / "research" / name for name in ("batchmonitor.md", "lazy-batching.md", "multi-bin.md")]
APPS = [solve_policy, serve_model, profile_model, generate_load]
OURS = {option for app in APPS for param in typer.main.get_command(app).params for option in param.opts} | {"--help"}
OTHERS = {  # of curl, docker, kubectl, nvidia-smi, ray, build and prometheus
    *("--head", "--target", "--wheel", "--storage", "--web", "--publish", "--volume"),
    *("--cacert", "--data", "--data-binary", "--build", "--from-file", "--format", "--persistence-mode"),
    *("--query-supported-clocks", "--lock-gpu-clocks", "--reset-gpu-clocks"),
}
EXAMPLE_POLICY = "waiting-budget"  # of adding-a-policy.md

pages = pytest.mark.parametrize("page", [*PAGES, *RESEARCH], ids=lambda page: page.name)


@pages
def test_every_relative_link_has_a_target(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pages
def test_every_flag_exists(page: Path) -> None:
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text())) <= OURS | OTHERS


@pages
def test_every_policy_of_an_example_command_can_be_parsed(page: Path) -> None:
    for given in re.findall(r"--(?:policy|compare) ([\w-]+[^\s`]*)", page.read_text()):
        spec = given.rstrip(",.;)")
        if spec.partition(":")[0] not in (EXAMPLE_POLICY, "SPEC"):
            assert parse_spec(spec).text == spec


def test_the_index_links_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"({page.name})" not in index] == ["README.md"]


def test_the_reference_is_written_from_the_code() -> None:
    assert PAGE.read_text() == reference(), "run `make reference`"


def test_the_runbook_has_one_line_for_each_alert() -> None:
    alerts = (ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml").read_text()
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    documented = re.findall(r"^\| `(Batchwright\w+)`", runbook, re.MULTILINE)
    assert sorted(documented) == sorted(set(re.findall(r"- alert: (\w+)", alerts)))


def test_each_script_prints_the_documented_output(capsys: pytest.CaptureFixture[str]) -> None:
    name = "comparing-policies.md"
    page = (ROOT / "docs" / name).read_text()
    scripts = re.findall(r"```python\n(.*?)```\n(?:\n((?:    [^\n]*\n)+))?", page, re.DOTALL)
    assert scripts
    for code, printed in scripts:
        exec(compile(code, name, "exec"), {"__name__": name})
        assert capsys.readouterr().out == "".join(line[4:] for line in printed.splitlines(keepends=True))


def test_the_model_answers_as_documented() -> None:
    page = (ROOT / "docs" / "your-own-model.md").read_text()
    defined: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], defined)
    found = re.search(r'"inputs": (.*?})}.*?"outputs": ?(.*?})', page, re.DOTALL)
    assert found is not None
    model, (inputs, outputs) = defined["Mine"](), found.groups()
    model.load("cpu")
    answer = model.run(**{key: np.array([value], np.float32) for key, value in json.loads(inputs).items()})
    assert {key: value[0].tolist() for key, value in answer.items()} == json.loads(outputs)
    assert {key: value.shape[1:] for key, value in answer.items()} == {k: t.shape for k, t in model.outputs.items()}


def test_the_model_with_bodies_of_its_own_answers_as_documented() -> None:
    page = (ROOT / "docs" / "your-own-model.md").read_text().partition("## Bodies of your own")[2]
    defined: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], defined)
    found = re.search(r"--data '(.*)'\n\n.*?\"outputs\":({.*?})", page)
    assert found is not None
    codec = TensorCodec(defined["Feedback"]())
    device = TensorDevice(codec.model, "cpu")
    device.load()
    outputs = device.serve(Batch("feedback", codec.from_body(found[1].encode(), "text/plain").read()))
    assert codec.model.render(outputs[0]) == json.loads(found[2])


def test_the_exported_files_of_your_own_model_answer_as_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    page = (ROOT / "docs" / "your-own-model.md").read_text()
    scripts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (script,) = (script for script in scripts if "torch.export.save" in script)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        exec(compile(script, "export.py", "exec"), {"__name__": "__main__"})
    for file in re.findall(r"=(scaled\.\w+)", page):
        device = TensorDevice(TensorSource(file).make(), "cpu")
        device.load()
        samples = [{"a": np.array([1, 2, 3, 4], np.float32), "b": np.full(4, value, np.float32)} for value in (1, 3)]
        outputs = device.serve(Batch("scaled", samples))
        assert [output["sum"].tolist() for output in outputs] == [[1, 1.5, 2, 2.5], [2, 2.5, 3, 3.5]]
        assert [output["largest"].item() for output in outputs] == [2.5, 3.5]
