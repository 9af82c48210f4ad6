"""Build Grafana's dashboards from panels.yaml: python -m deploy.grafana.build."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "batchwright-prometheus"}
_PANELS = Path(__file__).parent / "panels.yaml"
_ABBREVIATIONS = {"CHOSEN": 'model=~"$model",instance=~"$instance"', "[W]": "[$__rate_interval]"}
_SWAPS = "batchwright_policy_info{CHOSEN} unless batchwright_policy_info{CHOSEN} offset $__interval"
_COLUMNS = 24


def render_dashboards() -> dict[str, str]:
    """Render each dashboard's JSON file, by name, with one panel per line to keep diffs readable."""
    content = yaml.safe_load(_PANELS.read_text())
    return {name: _text(_dashboard(name), [*_placed(panels)]) for name, panels in content.items()}


def _text(dashboard: dict[str, Any], panels: list[dict[str, Any]]) -> str:
    head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in dashboard.items())
    body = ",\n  ".join(map(json.dumps, panels))
    return f'{{{head},\n "panels": [\n  {body}\n ]}}\n'


def _dashboard(name: str) -> dict[str, Any]:
    """The dashboard without its panels."""
    return {
        "uid": f"batchwright-{name}",
        "title": f"Batchwright: {name}",
        "tags": ["batchwright"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [_link()],
        "annotations": {"list": [_swaps()]},
        "templating": {"list": [_variable("instance", "up"), _variable("model", "batchwright_queue_length")]},
    }


def _link() -> dict[str, Any]:
    """Link to the other dashboards."""
    return {"type": "dashboards", "tags": ["batchwright"], "title": "", "keepTime": True, "includeVars": True}


def _swaps() -> dict[str, Any]:
    return {
        "name": "Policy swaps",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": _expanded(_SWAPS),
        "titleFormat": "{{model}} on {{instance}}",
        "textFormat": "{{policy}}: {{spec}}",
    }


def _variable(label: str, metric: str) -> dict[str, Any]:
    query = f'label_values({metric}{{job="batchwright"}}, {label})'
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _placed(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Place the panels in reading order, in rows of up to 24 columns."""
    left, top, row = 0, 0, 0
    for number, panel in enumerate(panels, 1):
        kind, width = panel.get("kind", "timeseries"), panel.get("width", _COLUMNS // 2)
        height = 5 if kind in ("stat", "table") else 8
        if left + width > _COLUMNS:
            left, top, row = 0, top + row, 0
        place = {"x": left, "y": top, "w": width, "h": height}
        yield {"id": number, "gridPos": place, **_panel(panel, kind)}
        left, row = left + width, max(row, height)


def _panel(panel: dict[str, Any], kind: str) -> dict[str, Any]:
    queries = _quantiles(panel.get("quantiles")) | panel.get("queries", {})
    field, options = _display(kind, panel["unit"])
    return {
        "type": "timeseries" if kind == "stacked" else kind,
        "title": panel["title"],
        "description": panel["about"],
        "datasource": DATASOURCE,
        "targets": [
            {"refId": chr(ord("A") + i), "expr": _expanded(expression), "legendFormat": legend, **_query_type(kind)}
            for i, (legend, expression) in enumerate(queries.items())
        ],
        "fieldConfig": {"defaults": {"unit": panel["unit"], **field}, "overrides": _overrides(queries, kind)},
        **options,
    }


def _overrides(queries: dict[str, str], kind: str) -> list[dict[str, Any]]:
    """Draw the objective as a dashed line without an area."""
    if kind != "timeseries" or not any(legend.startswith("objective, ") for legend in queries):
        return []
    dashed = {"custom.lineStyle": {"fill": "dash"}, "custom.fillOpacity": 0}
    properties = [{"id": name, "value": value} for name, value in dashed.items()]
    return [{"matcher": {"id": "byRegexp", "options": "/objective, .*/"}, "properties": properties}]


def _quantiles(histogram: str | None) -> dict[str, str]:
    if histogram is None:
        return {}
    metric, _, labels = histogram.partition("{")
    rates = f"sum by (le) (rate({metric}_bucket{{{labels}[W]))"
    return {f"p{100 * share:g}": f"histogram_quantile({share}, {rates})" for share in (0.5, 0.95, 0.99)}


def _expanded(expression: str) -> str:
    for short, long in _ABBREVIATIONS.items():
        expression = expression.replace(short, long)
    return expression


def _query_type(kind: str) -> dict[str, Any]:
    """Type of a query, instant or range, and its format."""
    form = {"table": {"format": "table"}, "heatmap": {"format": "heatmap"}}.get(kind, {})
    return {"instant": kind in ("stat", "table"), "range": kind not in ("stat", "table"), **form}


def _display(kind: str, unit: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Display settings: the defaults of the fields, and the panel's options."""
    match kind:
        case "stat":
            reduce = {"calcs": ["lastNotNull"]}
            return {}, {"options": {"colorMode": "none", "graphMode": "none", "reduceOptions": reduce}}
        case "heatmap":
            return {}, {"options": {"calculate": False, "yAxis": {"unit": unit}, "color": {"scheme": "Blues"}}}
        case "table":
            hidden = dict.fromkeys(("Time", "Value", "__name__", "job"), True)
            return {}, {"transformations": [{"id": "organize", "options": {"excludeByName": hidden}}]}
        case "stacked":
            lines: dict[str, Any] = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
        case _:
            lines = {"fillOpacity": 5}
    return {"min": 0, "custom": {"showPoints": "never", **lines}}, {
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}}
    }


def main() -> None:
    """Write all dashboards."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in render_dashboards().items():
        (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
