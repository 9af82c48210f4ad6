"""How benchmarks/scrape.py asks; that every query has data is what it measures."""

import pytest

from benchmarks.container import copied, steps
from benchmarks.scrape import asked, shortened
from deploy.expressions import Expression, all_expressions


def test_windows_and_offsets_are_shortened_and_names_are_left_alone() -> None:
    assert shortened("a:b:rate5m[1h] offset 1d") == "a:b:rate5m[20s] offset 40s"


@pytest.mark.parametrize(
    ("alert", "query"),
    [
        ("a > 0.1 and b == 0", "a > bool 0.1 and b == bool 0"),
        ('absent(up{job="x"})', '(up{job="x"})'),
        ("(a unless a offset 1h) > 0", "(a and a offset 20s) > bool 0"),
    ],
)
def test_an_alert_is_asked_for_what_it_compares(alert: str, query: str) -> None:
    assert asked(Expression("here", alert, "alert")) == query


def test_no_variable_of_grafana_is_left() -> None:
    assert not [expression.where for expression in all_expressions() if "$" in asked(expression)]


def test_a_dockerfiles_steps_are_read_with_their_continued_lines() -> None:
    text = '# a comment\nFROM x\n\nRUN a \\\n    && b\nCMD ["c"]\n'
    assert steps(text) == [("FROM", "x"), ("RUN", "a && b"), ("CMD", '["c"]')]


def test_what_dockerignore_names_is_not_copied() -> None:
    files = copied(["/docs/", "tests/"])
    assert "server/cli.py" in files
    assert not [file for file in files if file.startswith(("docs/", "tests/"))]
