"""The queries of benchmarks/scrape.py, and the Dockerfile's steps as benchmarks/container.py reads them."""

import pytest

from benchmarks.container import copied, steps, target
from benchmarks.scrape import data_query, shortened
from deploy.expressions import Expression, all_expressions


def test_windows_and_offsets_are_shortened_and_names_are_not() -> None:
    assert shortened("a:b:rate5m[1h] offset 1d") == "a:b:rate5m[20s] offset 40s"


@pytest.mark.parametrize(
    ("alert", "query"),
    [
        ("a > 0.1 and b == 0", "a > bool 0.1 and b == bool 0"),
        ('absent(up{job="x"})', '(up{job="x"})'),
        ("(a unless a offset 1h) > 0", "(a and a offset 20s) > bool 0"),
    ],
)
def test_the_query_of_an_alert_returns_data_where_its_condition_is_false(alert: str, query: str) -> None:
    assert data_query(Expression("here", alert, "alert")) == query


def test_all_grafana_variables_are_replaced() -> None:
    assert not [expression.where for expression in all_expressions() if "$" in data_query(expression)]


def test_a_dockerfiles_steps_are_read_with_their_continued_lines() -> None:
    text = '# a comment\nFROM x\n\nRUN a \\\n    && b\nCMD ["c"]\n'
    assert steps(text) == [("FROM", "x"), ("RUN", "a && b"), ("CMD", '["c"]')]


def test_a_stage_has_the_steps_of_the_one_that_it_is_based_on() -> None:
    all_steps = steps("FROM x AS base\nRUN a\nFROM base AS gpu\nRUN b\nFROM base AS any\nRUN c\n")
    assert target(all_steps, "gpu") == [("RUN", "a"), ("RUN", "b")]
    assert target(all_steps, "any") == [("RUN", "a"), ("RUN", "c")]


def test_files_of_dockerignore_are_not_copied() -> None:
    files = copied(["/docs/", "tests/"])
    assert "server/cli.py" in files
    assert not [file for file in files if file.startswith(("docs/", "tests/"))]
