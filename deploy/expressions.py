"""PromQL expressions of the rules and dashboards in this folder, for the tests and benchmarks/scrape.py."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


@dataclass(frozen=True)
class Expression:
    """One PromQL expression.

    Attributes:
        where: file, and panel or rule.
        text: PromQL with Grafana's variables.
        kind: "record", "alert", "panel" or "annotation".
    """

    where: str
    text: str
    kind: str


def rules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every rule with its file's name."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from ((path.name, rule) for rule in group["rules"])


def rule_expressions() -> Iterator[Expression]:
    """Yield the expressions of recording and alert rules."""
    for file, rule in rules():
        kind = "record" if "record" in rule else "alert"
        yield Expression(f"{file}: {rule[kind]}", rule["expr"], kind)


def dashboards() -> dict[str, dict[str, Any]]:
    """Read the dashboards' JSON, by name."""
    return {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}


def dashboard_expressions() -> Iterator[Expression]:
    """Yield the expressions of panels and annotations."""
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield Expression(f"{name}: {panel['title']}, {target['legendFormat']}", target["expr"], "panel")
        for annotation in board["annotations"]["list"]:
            yield Expression(f"{name}: {annotation['name']}", annotation["expr"], "annotation")


def all_expressions() -> list[Expression]:
    """All expressions of rules and dashboards."""
    return [*rule_expressions(), *dashboard_expressions()]
