"""Write research/papers.md: every table and figure, in the order of the page."""

from collections.abc import Iterator

from benchmarks.support.harness import argument_parser
from research.papers import (
    actions,
    approximate_iteration,
    batching,
    conference,
    overview,
    overview_batching,
    overview_smdp,
    percentiles,
    runs,
    together,
    tradeoffs,
    truncation,
    variants,
)
from research.papers.setting import Section, write_page


def sections() -> Iterator[Section]:
    """The overview, the SMDP papers' tables and figures, those of the other papers."""
    results = runs.simulated()
    smdp = overview_smdp.journal(), overview_smdp.conference_paper()
    others = overview_batching.multi_bin(), overview_batching.lazy_batching(), overview_batching.batch_monitor()
    yield from overview.overview([*smdp, *others])
    yield runs.table_i(results)
    yield truncation.table_ii()
    yield approximate_iteration.table_iii()
    yield actions.proposition_4()
    yield actions.figure_3()
    yield tradeoffs.figure_4()
    yield tradeoffs.figure_5()
    yield runs.figure_6(results)
    yield variants.figure_7()
    yield variants.figure_8()
    yield variants.figure_9()
    yield truncation.figure_10()
    yield actions.figure_11()
    yield conference.figure_4()
    yield conference.figure_5()
    yield batching.multi_bin_figure_9()
    yield batching.predicted_lengths()
    yield batching.lazy_sensitivity()
    yield percentiles.beyond_the_papers()
    yield together.decided_together()


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    write_page(sections())
