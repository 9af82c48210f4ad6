"""When the alerts of objectives and load fire, by promtool: as the table in docs/running-in-production.md says."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.expressions import DEPLOY, RULES

PAGE = DEPLOY.parent / "docs" / "running-in-production.md"
STEP, PER_STEP = 30, 1200  # s of a step of the test, and requests in it
HISTORY = 190  # minutes before, with 2 % late and a load of 0.5
AFTER = 190  # minutes, more than the longest window, so that nothing changes any more
NAMES = ("alertname", "severity", "window")
ROW = re.compile(r"\| (late|load) \| ([\d.]+)(?: %)? \| (?:none|`(\w+)`(?:, (\w+))?) \| (\w*) ?\| (never|\d+) \|")
ROWS = [match.groups() for match in map(ROW.fullmatch, PAGE.read_text().splitlines()) if match]


def steps(minutes: float) -> int:
    return round(60 * minutes / STEP)


def counter(before: float, after: float) -> str:
    """A counter that grows by `before` in each step of the history, and by `after` from then on."""
    reached = before * steps(HISTORY)
    return f"0+{before:g}x{steps(HISTORY)} {reached + after:g}+{after:g}x{steps(AFTER)}"


def series(late: float, load: float) -> list[dict[str, str]]:
    """The series of a server with an objective: the share of late requests, and the load."""
    offered, before = PER_STEP * load / 0.5, PER_STEP * 1.0
    admitted = min(offered, 2 * PER_STEP)
    requests = {"ok": counter(before, admitted), "rejected": counter(0, offered - admitted), "failed": counter(0, 0)}
    labels = 'instance="a",model="m"'
    constants = {"objective_seconds": 0.03, "objective_share": 0.95, "capacity_hertz": 2 * PER_STEP / STEP}
    return [
        *(
            {"series": f'batchwright_requests_total{{{labels},outcome="{o}"}}', "values": v}
            for o, v in requests.items()
        ),
        {
            "series": f"batchwright_deadline_missed_total{{{labels}}}",
            "values": counter(0.02 * before, late * admitted),
        },
        *(
            {"series": f"batchwright_{name}{{{labels}}}", "values": f"{value}x{steps(HISTORY + AFTER)}"}
            for name, value in constants.items()
        ),
    ]


def firing(at: float, alert: str, expected: list[dict[str, str]]) -> dict[str, Any]:
    """Expect these alerts of a name, and no others, `at` minutes after the history."""
    samples = [
        {"labels": "{" + ",".join(f'{k}="{v}"' for k, v in sorted(e.items())) + "}", "value": 1} for e in expected
    ]
    by = ", ".join(NAMES)
    return {
        "expr": f'count by ({by}) (ALERTS{{alertname="{alert}",alertstate="firing"}})',
        "eval_time": f"{round(60 * (HISTORY + at))}s",
        "exp_samples": samples,
    }


def run_promtool(tmp_path: Path, inputs: list[dict[str, str]], expectations: list[dict[str, Any]]) -> str:
    """Run the rules on these series; return what differs from the expectations."""
    file = tmp_path / "times.test.yml"
    test = {"interval": f"{STEP}s", "input_series": inputs, "promql_expr_test": expectations}
    document = {"rule_files": [*map(str, RULES)], "evaluation_interval": f"{STEP}s", "tests": [test]}
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)")
@pytest.mark.parametrize(("what", "value", "alert", "window", "severity", "after"), ROWS)
def test_an_alert_fires_in_the_minute_that_the_page_names(
    what: str, value: str, alert: str | None, window: str | None, severity: str, after: str, tmp_path: Path
) -> None:
    inputs = series(float(value) / 100, 0.5) if what == "late" else series(0.02, float(value))
    name = alert or {"late": "BatchwrightObjectiveBurn", "load": "BatchwrightNearCapacity"}[what]
    expected = {"alertname": name, "severity": severity} | ({"window": window} if window else {})
    if after == "never":
        expectations = [firing(minute, name, []) for minute in range(-HISTORY + 1, AFTER, 7)]
    else:
        expectations = [firing(float(after) - 1, name, []), firing(float(after), name, [expected])]
    assert run_promtool(tmp_path, inputs, expectations) == ""


def test_the_page_has_the_cases_that_matter() -> None:
    cases = {(what, value): after for what, value, *_, after in ROWS}
    assert {case for case, after in cases.items() if after == "never"} == {("late", "4"), ("load", "0.8")}
    missed = [int(cases["late", share]) for share in ("8", "12", "30", "100")]
    assert missed == sorted(missed, reverse=True), "the more are late, the sooner"
    assert int(cases["load", "0.9"]) >= int(cases["load", "1.3"])
