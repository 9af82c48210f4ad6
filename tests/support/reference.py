"""docs/reference.md, written from the code: every metric, route and flag.

`make reference` writes it, and tests/test_docs.py holds it to the code.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from loadgen.cli import app as generate_load
from policies.command_line.cli import app as solve_policy
from profiler.cli import app as profile_model
from server.cli import app as serve_model
from tests.support.exported_metrics import families
from tests.support.openapi import openapi_document

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
COMMANDS = {
    "serve-model": serve_model,
    "generate-load": generate_load,
    "solve-policy": solve_policy,
    "profile-model": profile_model,
}
_INTRODUCTION = """# Reference

Every metric, route and flag of this version. This page is written from the code, by `make reference`. The other pages
say what they are for: [metrics](runbook.md), [routes](quick-start.md), [settings](settings-and-security.md).
"""


def reference() -> str:
    """The page."""
    return "\n".join([_INTRODUCTION, *_metrics(), *_routes(), *_flags()])


def _metrics() -> Iterator[str]:
    yield "## Metrics\n\nOf `GET /metrics`, each with the prefix `batchwright_`. A counter's name has `_total` added.\n"
    rows = [(f"`{name}`", kind, ", ".join(labels), text) for name, kind, labels, text in families()]
    yield _table(("metric", "type", "labels", "meaning"), rows)


def _routes() -> Iterator[str]:
    yield "## Routes\n\n`GET /docs` of a server has their bodies, and `GET /openapi.json` their schemas.\n"
    paths = openapi_document()["paths"].items()
    rows = [(f"`{verb.upper()} {path}`", each["summary"]) for path, verbs in paths for verb, each in verbs.items()]
    yield _table(("route", "what it does"), rows)


def _flags() -> Iterator[str]:
    for name, app in COMMANDS.items():
        yield f"## Flags of {name}\n"
        params = typer.main.get_command(app).params
        rows = [(f"`{each.opts[0]}`", _help(each)) for each in params if each.param_type_name == "option"]
        yield _table(("flag", "meaning"), rows)


def _help(option: Any) -> str:
    """The help of a flag, with its default where the text does not have it."""
    shown = option.default not in (None, False) and "default" not in option.help
    return f"{option.help} (default: {option.default})" if shown else str(option.help)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(each.replace('|', '&#124;') for each in line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(reference())
