"""Tests of rules and dashboards: exported metrics and labels, and validation by promtool."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from deploy.expressions import DASHBOARDS, DEPLOY, RULES, Expression, all_expressions, dashboards, rules
from deploy.grafana.build import DATASOURCE, render_dashboards
from tests.support.exported_metrics import ALWAYS, exported, labels, names

UNITS = {"none", "s", "reqps", "hertz", "joule", "watt", "percentunit"}  # base units by Grafana's names
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)")


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda e: e.where)
def test_every_metric_is_exported_or_recorded(expression: Expression) -> None:
    recorded = {rule["record"] for _, rule in rules() if "record" in rule}
    found = names(expression.text)
    assert found
    assert found <= exported().keys() | recorded | ALWAYS.keys()


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda e: e.where)
def test_every_matched_label_is_exported(expression: Expression) -> None:
    for metric, label in labels(expression.text):
        known = ALWAYS.get(metric) or exported().get(metric)
        if known is None:  # the name of a recorded metric begins with its labels
            known = {*metric.split(":")[0].split("_")}
        assert label in known, metric


def test_metrics_and_labels_of_an_expression_are_found() -> None:
    text = (
        'sum by (le, model) (rate(a_bucket{model=~"$model",x="b c"}[$__rate_interval])) / on (m) b:c:d offset 1h > 1e-3'
    )
    assert names(text) == {"a_bucket", "b:c:d"}
    assert set(labels(text)) == {("a_bucket", "model"), ("a_bucket", "x")}


def test_every_exported_metric_is_on_a_dashboard() -> None:
    shown = {name for expression in all_expressions() for name in names(expression.text)}
    families = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in exported()}
    assert {family for family in families if not any(name.startswith(family) for name in shown)} == set()


def test_the_rules_of_objectives_take_share_and_bound_from_the_server() -> None:
    burns = [rule for _, rule in rules() if "objective_burn" in rule.get("record", "")]
    assert burns
    for rule in burns:
        assert "(1 - max by (model) (batchwright_objective_share))" in rule["expr"]
        assert not re.search(r"\d\.\d", rule["expr"]), rule["record"]


def test_the_panels_of_response_times_show_the_objective() -> None:
    panels = {panel["title"]: panel for board in dashboards().values() for panel in board["panels"]}
    for title in ("Response time", "p95 response time"):
        shown = {target["expr"] for target in panels[title]["targets"]}
        assert any("batchwright_objective_seconds" in expression for expression in shown), title
    (dashed,) = panels["Response time"]["fieldConfig"]["overrides"]
    assert {"id": "custom.lineStyle", "value": {"fill": "dash"}} in dashed["properties"]
    legends = [target["legendFormat"] for target in panels["Response time"]["targets"]]
    assert any(re.fullmatch(dashed["matcher"]["options"].strip("/"), legend) for legend in legends)


def test_alerts_have_a_severity_a_summary_and_a_description() -> None:
    alerts = [rule for _, rule in rules() if "alert" in rule]
    assert alerts
    for rule in alerts:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
        assert all(text.strip() for text in rule["annotations"].values()), rule["alert"]


@promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")),
        ("check", "rules", *map(str, RULES)),
        ("test", "rules", str(Path(__file__).parent / "alerts.test.yml")),
    ],
    ids=["config", "rules", "tests"],
)
def test_promtool_accepts_config_rules_and_rule_tests(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_are_built_from_the_current_panels() -> None:
    """If this fails, run python -m deploy.grafana.build."""
    assert {path.stem: path.read_text() for path in DASHBOARDS} == render_dashboards()


@pytest.mark.parametrize("name", ["service", "policy", "energy", "capacity"])
def test_a_dashboard_is_complete(name: str) -> None:
    board = dashboards()[name]
    assert {variable["name"] for variable in board["templating"]["list"]} == {"model", "instance"}
    querying = [*board["panels"], *board["templating"]["list"], *board["annotations"]["list"]]
    assert all(each["datasource"] == DATASOURCE for each in querying)
    assert max(Counter(panel["id"] for panel in board["panels"]).values()) == 1
    for panel in board["panels"]:
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["description"], panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["type"] in {"timeseries", "stat", "heatmap", "table"}, "panel types without a plugin"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]


def test_panels_do_not_overlap() -> None:
    for name, board in dashboards().items():
        cells = Counter(
            (x, y)
            for place in (panel["gridPos"] for panel in board["panels"])
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
        assert max(cells.values()) == 1, name


def test_the_uids_of_the_dashboards_are_unique() -> None:
    assert len({board["uid"] for board in dashboards().values()}) == len(DASHBOARDS)


def test_the_datasource_of_the_dashboards_is_provisioned() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["uid"]) == (DATASOURCE["type"], DATASOURCE["uid"])
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
