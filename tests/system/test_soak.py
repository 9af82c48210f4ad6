"""Half a minute of the soak: faults, swaps, bursts, leavers, rubbish; the long run is benchmarks/soak.py."""

import pytest

from benchmarks.soak import audit, soak
from benchmarks.soak_calls import Books


def books() -> Books:
    found = Books()
    for kind, status, samples, calls in (
        *(("good", 200, 1, 10), ("several", 200, 4, 5), ("several", 503, 3, 2), ("good", 503, 1, 1)),
        *(("leaver", "while sending", 1, 3), ("leaver", "never came", 1, 7)),
    ):
        for _ in range(calls):
            found.end(kind, status, samples)
    return found


@pytest.mark.parametrize(
    ("ok", "rejected", "cancelled", "agree"),
    [
        (30, 3, 3, True),  # refused before anybody knew how many samples there were
        (30, 7, 3, True),
        (31, 7, 2, True),  # one who left was answered all the same
        (30, 2, 3, False),
        (30, 3, 2, False),
        (30, 7, 4, False),
        (29, 7, 3, False),
        (34, 3, 0, False),
        (30, 3, 10, False),  # who never came is in no books
    ],
)
def test_the_books_agree_or_do_not(ok: int, rejected: int, cancelled: int, agree: bool) -> None:
    assert (audit(books(), {"ok": ok, "rejected": rejected, "cancelled": cancelled}) == []) is agree


@pytest.mark.slow
def test_everybody_gets_one_answer_their_own_and_the_books_agree() -> None:
    record = soak(0.4)
    assert record["wrong"] == []
    ends = record["ends"]
    assert {
        "good: 200",
        "several: 200",
        "corrupt: 400",
        "leaver: while sending",
        "leaver: before the answer",
    } <= ends.keys()
    assert record["counted_by_the_server"]["cancelled"] > 0
    assert len(record["swaps"]) > 3
    assert {"error:1", "oom:31"} <= record["faults"].keys()
