"""Half a minute of the soak: faults, swaps, bursts, leavers, rubbish; the long run is benchmarks/soak.py."""

import pytest

from benchmarks.soak import soak


@pytest.mark.slow
def test_everybody_gets_one_answer_their_own_and_the_books_agree() -> None:
    record = soak(0.4)
    assert record["wrong"] == []
    ends = record["ends"]
    assert {"good: 200", "corrupt: 400", "leaver: while sending", "leaver: before the answer"} <= ends.keys()
    assert record["counted_by_the_server"]["cancelled"] > 0
    assert len(record["swaps"]) > 3
    assert record["faults"] > 2
