"""Tests of the plot and the HTML page of a run: every kind of run, self-contained, without secrets."""

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen import history
from loadgen.history import RunResult
from loadgen.page import render_report_page
from loadgen.plots import plot_runs
from loadgen.report import Record, RunObjective, make_report, outcome_from_records
from loadgen.run_settings import hide_secrets, run_settings

OBJECTIVE = RunObjective(0.02, w2=1.0)
PLAIN = [Record(0.1 * i, 0.1 * i, 0.1 * i + 0.01 + 0.001 * (i % 7), 200) for i in range(200)]
FULL = [Record(r.scheduled, r.sent, r.finished, 200, 1 + i % 3, 0.001, 0.01, 0.05) for i, r in enumerate(PLAIN)]
LOST = [Record(r.scheduled, r.sent, r.finished, "connection") for r in PLAIN]


def result(policy: str, records: Sequence[Record]) -> RunResult:
    return RunResult(
        policy, make_report(outcome_from_records(records), 20.0, OBJECTIVE), history.history_from_records(records)
    )


RUNS = {
    "one": [result("", FULL)],
    "without facts": [result("", PLAIN)],
    "nothing answered": [result("", LOST)],
    "one request": [result("", FULL[:1])],
    "several": [result("greedy", FULL), result("timeout:5", PLAIN), result("</script><b>", LOST)],
}


@pytest.mark.usefixtures("coarse_plots")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("objective", [OBJECTIVE, RunObjective()])
def test_every_run_can_be_plotted(name: str, objective: RunObjective, tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    plot_runs(RUNS[name], objective, name, path)
    assert path.read_bytes().startswith(b"\x89PNG")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for key, value in attrs if key in ("src", "href", "action")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th"):
            self.cells.append(data)


def read(text: str) -> tuple[Tags, list[dict[str, Any]]]:
    tags = Tags()
    tags.feed(text)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    charts = json.loads(data[1])
    assert isinstance(charts, list)
    return tags, charts


@pytest.mark.parametrize("name", RUNS)
def test_the_page_contains_its_script_and_loads_nothing(name: str) -> None:
    tags, charts = read(render_report_page(RUNS[name], OBJECTIVE, name, {"seed": "0"}))
    assert tags.addresses == ["data:,"]
    assert tags.tags.count("script") == 3
    assert "b" not in tags.tags
    assert [chart["title"].split(",")[0] for chart in charts] == [
        *("Response time over time", "Distribution of response times", "Batch sizes", "Power over time"),
        "Arrivals and answers",
    ]


def test_all_policies_are_in_the_table_and_in_the_charts() -> None:
    tags, charts = read(render_report_page(RUNS["several"], OBJECTIVE, "several", {}))
    assert {"greedy", "timeout:5", "</script><b>", "cost"} <= set(tags.cells)
    assert [line["name"] for line in charts[1]["lines"]] == ["greedy", "timeout:5"]  # the third has no responses
    assert charts[0]["slo_y"] == charts[1]["slo_x"] == 20.0


def test_the_best_of_several_values_is_marked_if_less_is_better() -> None:
    text = render_report_page([result("a", FULL), result("b", [*FULL, *LOST])], OBJECTIVE, "", {})
    assert re.search(r"late: not within the SLO</th><td class=best>0</td><td>200</td>", text)
    assert not re.search(r"throughput[^/]*/s</th>[^/]*class=best", text)


def test_the_lines_of_a_chart_have_only_finite_numbers_and_nulls() -> None:
    _, charts = read(render_report_page([result("", [*FULL[:100], *FULL[150:]])], OBJECTIVE, "", {}))
    median = charts[0]["lines"][1]
    assert median["name"] == "p50"
    assert None in median["y"] or len(median["y"]) < 6
    assert np.isfinite([value for value in median["y"] if value is not None]).all()


def test_the_settings_have_versions_and_no_secrets() -> None:
    words = run_settings(
        ["generate-load", "http://me:pw@host", "--api-key", "hush"], {"server": "http://me:pw@host", "x": None}
    )
    assert "hush" not in str(words)
    assert "pw" not in str(words)
    assert words["command"] == "generate-load 'http://***@host' --api-key '***'"
    assert "x" not in words
    assert "numpy" in words["versions"]
    assert hide_secrets(["--api-key=hush", "http://host/a@b"]) == ["--api-key=***", "http://host/a@b"]
