"""The page's first part: a row for every table and figure that is printed in the five papers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.support.harness import markdown_table
from research.papers.setting import Claim, Section

Result = Literal["reproduced", "different", "not possible here", "no numbers"]
RESULTS: tuple[Result, ...] = ("reproduced", "different", "not possible here", "no numbers")


@dataclass(frozen=True, slots=True)
class Row:
    """A table or figure of a paper.

    Attributes:
        item: its number.
        result: `no numbers` are drawings and settings, with nothing to compute.
        printed: what the paper has, in numbers or words.
        ours: the same of ours.
        note: the difference, or why it differs or is not possible.
    """

    item: str
    result: Result
    printed: str
    ours: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's rows.

    Attributes:
        title: authors and place.
        rows: in the order of the paper.
    """

    title: str
    rows: Sequence[Row]

    def number(self, result: Result) -> int:
        """How many rows have this result."""
        return sum(row.result == result for row in self.rows)


def judged(item: str, printed: str, ours: str, claims: Sequence[Claim], note: str = "") -> Row:
    """Return a row that is reproduced if every claim holds, and else different, with the claims that do not hold."""
    failing = "; ".join(
        f"{claim.text}: {claim.instead}" if claim.instead else claim.text for claim in claims if not claim.holds
    )
    if not failing:
        return Row(item, "reproduced", printed, ours, note)
    return Row(item, "different", printed, ours, "; ".join(filter(None, (f"not so: {failing}", note))))


def overview(papers: Sequence[Paper]) -> list[Section]:
    """The counts, and a table for each paper."""
    counts = [[paper.title, *(str(paper.number(result)) for result in RESULTS)] for paper in papers]
    counts.append(["all", *(str(sum(paper.number(result) for paper in papers)) for result in RESULTS)])
    summary = f"""\
How many of the printed tables and figures are computed again with the same result, come out differently, or need a
device or data that are not here. A row is different where at least one statement of the paper about it fails. Multi-bin
batching, LazyBatching and BatchMonitor are read from the records of `make paper-batching`.

{markdown_table(["paper", *RESULTS], counts, right_aligned=range(1, 5))}"""
    return [Section("Every table and figure", summary), *(_table(paper) for paper in papers)]


def _table(paper: Paper) -> Section:
    heads = ("", "result", "printed", "ours", "difference or reason")
    rows = [(row.item, row.result, row.printed, row.ours, row.note) for row in paper.rows]
    return Section(paper.title, markdown_table(heads, rows))
