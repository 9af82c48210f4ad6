"""When the alerts of objectives and load fire, by promtool: as the table in docs/runbook.md says."""

import re
import shutil
import subprocess
from collections.abc import Collection
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from deploy.expressions import DEPLOY, RULES

PAGE = DEPLOY.parent / "docs" / "runbook.md"
STEP, PER_STEP = 30, 1200  # s of a step of the test, and requests in it
NEVER = "never"
BEFORE = {"late": 190, "load": 15}  # minutes with 2 % late and a load of 0.5: more than the longest window
AFTER = {"late": 190, "load": 60}  # minutes in which an alert may fire: after the longest window nothing changes
ALERTS = {"late": "BatchwrightObjectiveBurn", "load": "BatchwrightNearCapacity"}
NAMES = ("alertname", "severity", "window")
ROW = re.compile(r"\| (late|load) \| ([\d.]+)(?: %)? \| (?:none|`(\w+)`(?:, (\w+))?) \| (\w*) ?\| (never|\d+) \|")
ROWS = [match.groups() for match in map(ROW.fullmatch, PAGE.read_text().splitlines()) if match]


def steps(minutes: float) -> int:
    return round(60 * minutes / STEP)


def counter(what: str, before: float, after: float) -> str:
    """A counter that grows by `before` in each step of the history, and by `after` from then on."""
    history = steps(BEFORE[what])
    reached = before * history
    return f"0+{before:g}x{history} {reached + after:g}+{after:g}x{steps(AFTER[what])}"


def series(what: str, value: float, model: str) -> list[dict[str, str]]:
    """The series of a model: the load, and if `what` is "late" the share of late requests, with an objective."""
    offered, before = PER_STEP * (value / 0.5 if what == "load" else 1.0), PER_STEP * 1.0
    admitted = min(offered, 2 * PER_STEP)
    labels = f'instance="a",model="{model}"'
    counters = {
        f'requests_total{{{labels},outcome="ok"}}': counter(what, before, admitted),
        f'requests_total{{{labels},outcome="rejected"}}': counter(what, 0, offered - admitted),
        f'requests_total{{{labels},outcome="failed"}}': counter(what, 0, 0),
    }
    constants = {"capacity_hertz": 2 * PER_STEP / STEP}
    if what == "late":
        counters[f"deadline_missed_total{{{labels}}}"] = counter(what, 0.02 * before, value / 100 * admitted)
        constants |= {"objective_seconds": 0.03, "objective_share": 0.95}
    length = steps(BEFORE[what] + AFTER[what])
    values = counters | {f"{name}{{{labels}}}": f"{value:g}x{length}" for name, value in constants.items()}
    return [{"series": f"batchwright_{name}", "values": text} for name, text in values.items()]


def firing(what: str, at: float, model: str, expected: list[dict[str, str]]) -> dict[str, Any]:
    """Expect these alerts of a model, and no others of their name, `at` minutes after the history."""
    samples = [
        {"labels": "{" + ",".join(f'{k}="{v}"' for k, v in sorted(e.items())) + "}", "value": 1} for e in expected
    ]
    by = ", ".join(NAMES)
    return {
        "expr": f'count by ({by}) (ALERTS{{alertname="{ALERTS[what]}",alertstate="firing",model="{model}"}})',
        "eval_time": f"{round(60 * (BEFORE[what] + at))}s",
        "exp_samples": samples,
    }


def expectations(row: tuple[str, ...], model: str) -> list[dict[str, Any]]:
    """What a row of the page says of this model."""
    what, _, alert, window, severity, after = row
    if after == NEVER:
        return [firing(what, minute, model, []) for minute in range(1 - BEFORE[what], AFTER[what], 7)]
    expected = {"alertname": alert, "severity": severity} | ({"window": window} if window else {})
    return [firing(what, float(after) - 1, model, []), firing(what, float(after), model, [expected])]


def needed_rules(alerts: Collection[str]) -> dict[str, Any]:
    """The groups of RULES with no other rules than these alerts and what they are computed from."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = [rule for rule in rules if "record" in rule]
    needed = [rule for rule in rules if rule.get("alert") in alerts]
    for rule in needed:  # and for the rules that it adds
        needed += [each for each in recorded if each["record"] in rule["expr"] and each not in needed]
    kept = [{**group, "rules": [rule for rule in group["rules"] if rule in needed]} for group in groups]
    return {"groups": [{**group, "name": f"{n}"} for n, group in enumerate(kept) if group["rules"]]}


@cache
def differences() -> str:
    """Run promtool once with a model for each row; return what differs from the expectations."""
    models = {f"row{number}": row for number, row in enumerate(ROWS)}
    tests = [
        {
            "interval": f"{STEP}s",
            "input_series": [
                each for model, row in models.items() if row[0] == what for each in series(what, float(row[1]), model)
            ],
            "promql_expr_test": [
                each for model, row in models.items() if row[0] == what for each in expectations(row, model)
            ],
        }
        for what in ALERTS
    ]
    with TemporaryDirectory() as folder:
        rules, file = Path(folder, "rules.yml"), Path(folder, "times.test.yml")
        rules.write_text(yaml.safe_dump(needed_rules(ALERTS.values())))
        document = {"rule_files": [str(rules)], "evaluation_interval": f"{STEP}s", "tests": tests}
        file.write_text(yaml.safe_dump(document))
        done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)")
@pytest.mark.parametrize("number", range(len(ROWS)), ids=["-".join(map(str, row)) for row in ROWS])
def test_an_alert_fires_in_the_minute_that_the_page_names(number: int) -> None:
    first, *found = differences().split("expr: ")
    assert found or not first, "a failure that is not of an expectation"
    rows = [re.search(r'model=\\?"row(\d+)', each) for each in found]
    assert all(rows), "a failure that belongs to no row"
    assert [each for row, each in zip(rows, found, strict=True) if row and int(row[1]) == number] == []


def test_the_page_has_the_cases_that_matter() -> None:
    cases = {(what, value): after for what, value, *_, after in ROWS}
    assert {case for case, after in cases.items() if after == NEVER} == {("late", "4"), ("load", "0.8")}
    missed = [int(cases["late", share]) for share in ("8", "12", "30", "100")]
    assert missed == sorted(missed, reverse=True), "the more are late, the sooner"
    assert int(cases["load", "0.9"]) >= int(cases["load", "1.3"])
