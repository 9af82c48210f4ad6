"""A short run of benchmarks/soak.py: faults, policy swaps, bursts, disconnects and malformed calls."""

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
        (30, 3, 3, True),  # rejected before the number of samples was known
        (30, 7, 3, True),
        (31, 7, 2, True),  # one call completed before its disconnect
        (30, 2, 3, False),
        (30, 3, 2, False),
        (30, 7, 4, False),
        (29, 7, 3, False),
        (34, 3, 0, False),
        (30, 3, 10, False),  # calls that never connected are not counted
    ],
)
def test_the_audit_compares_the_counts_of_client_and_server(
    ok: int, rejected: int, cancelled: int, agree: bool
) -> None:
    assert (audit(books(), {"ok": ok, "rejected": rejected, "cancelled": cancelled}) == []) is agree


@pytest.mark.slow
def test_each_call_gets_its_own_response_and_the_counts_agree() -> None:
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
