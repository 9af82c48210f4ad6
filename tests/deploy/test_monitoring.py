"""Rules and dashboards: they ask for what the server exports, and Prometheus' own tools have nothing against them."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from deploy.expressions import DASHBOARDS, DEPLOY, RULES, Expression, all_expressions, dashboards, rules
from deploy.grafana.build import DATASOURCE
from deploy.grafana.build import dashboards as built
from tests.support.exported_metrics import ALWAYS, exported, exported_buckets, labels, names

UNITS = {"none", "s", "reqps", "hertz", "joule", "watt", "percentunit"}  # base units, in Grafana's words
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)")


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda e: e.where)
def test_every_metric_is_exported_or_recorded(expression: Expression) -> None:
    recorded = {rule["record"] for _, rule in rules() if "record" in rule}
    found = names(expression.text)
    assert found or expression.text == "vector(0.95)"
    assert found <= exported().keys() | recorded | ALWAYS.keys()


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda e: e.where)
def test_every_label_that_is_matched_is_there(expression: Expression) -> None:
    for metric, label in labels(expression.text):
        known = ALWAYS.get(metric) or exported().get(metric)
        if known is None:  # a recorded name begins with its labels
            known = {*metric.split(":")[0].split("_")}
        assert label in known, metric


def test_names_are_read_from_an_expression_as_they_stand_there() -> None:
    text = (
        'sum by (le, model) (rate(a_bucket{model=~"$model",x="b c"}[$__rate_interval])) / on (m) b:c:d offset 1h > 1e-3'
    )
    assert names(text) == {"a_bucket", "b:c:d"}
    assert set(labels(text)) == {("a_bucket", "model"), ("a_bucket", "x")}


def test_every_exported_metric_is_on_a_dashboard() -> None:
    shown = {name for expression in all_expressions() for name in names(expression.text)}
    families = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in exported()}
    assert {family for family in families if not any(name.startswith(family) for name in shown)} == set()


def test_the_objectives_time_is_a_bucket() -> None:
    rule = next(
        rule for _, rule in rules() if rule.get("record", "").startswith("instance_model:batchwright_responses_in")
    )
    assert rule["expr"].split('le="')[1].split('"')[0] in exported_buckets("batchwright_response_seconds")


def test_alerts_say_how_bad_it_is_what_happened_and_what_to_do() -> None:
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
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_are_what_their_yaml_says() -> None:
    """If not: python -m deploy.grafana.build."""
    assert {path.stem: path.read_text() for path in DASHBOARDS} == built()


@pytest.mark.parametrize("name", ["service", "policy", "energy", "capacity"])
def test_a_dashboard_is_whole(name: str) -> None:
    board = dashboards()[name]
    assert {variable["name"] for variable in board["templating"]["list"]} == {"model", "instance"}
    asked = [*board["panels"], *board["templating"]["list"], *board["annotations"]["list"]]
    assert all(each["datasource"] == DATASOURCE for each in asked)
    assert max(Counter(panel["id"] for panel in board["panels"]).values()) == 1
    for panel in board["panels"]:
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["description"], panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["type"] in {"timeseries", "stat", "heatmap", "table"}, "of Grafana's own kinds"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]


def test_no_panel_lies_over_another() -> None:
    for name, board in dashboards().items():
        cells = Counter(
            (x, y)
            for place in (panel["gridPos"] for panel in board["panels"])
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
        assert max(cells.values()) == 1, name


def test_the_dashboards_addresses_differ() -> None:
    assert len({board["uid"] for board in dashboards().values()}) == len(DASHBOARDS)


def test_grafana_is_given_the_datasource_that_the_dashboards_name() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["uid"]) == (DATASOURCE["type"], DATASOURCE["uid"])
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
