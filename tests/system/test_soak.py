"""Some seconds of the soak: faults, policy swaps, bursts, abandoned calls; benchmarks/soak.py runs longer."""

import pytest

from benchmarks.soak import audit, soak
from benchmarks.support.soak_clients import ClientCounts


def counts() -> ClientCounts:
    found = ClientCounts()
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
        (30, 3, 3, True),  # rejected before the number of samples was read
        (30, 7, 3, True),
        (31, 7, 2, True),  # an abandoned call was answered all the same
        (30, 2, 3, False),
        (30, 3, 2, False),
        (30, 7, 4, False),
        (29, 7, 3, False),
        (34, 3, 0, False),
        (30, 3, 10, False),  # a call whose connection failed is not counted
    ],
)
def test_audit_compares_client_and_server_counts(ok: int, rejected: int, cancelled: int, agree: bool) -> None:
    assert (audit(counts(), {"ok": ok, "rejected": rejected, "cancelled": cancelled}) == []) is agree


@pytest.mark.parametrize(
    ("expired", "cancelled", "agree"),
    [
        (1, 1, True),  # both calls ended before their bodies were read
        (4, 3, True),
        (3, 2, True),
        (5, 2, True),  # one request of the abandoned call expired
        (0, 1, False),
        (5, 3, False),
        (1, 0, False),  # nothing of the abandoned call is counted
        (4, 4, False),
    ],
)
def test_audit_allows_for_samples_that_the_server_never_counted(expired: int, cancelled: int, agree: bool) -> None:
    found = ClientCounts()
    found.end("hurried", 504, 4)
    found.end("leaver", "while sending", 3)
    assert (audit(found, {"expired": expired, "cancelled": cancelled}) == []) is agree


@pytest.mark.slow
def test_every_call_gets_its_own_answer_and_the_counts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    # half of the load, and shorter phases of filling and draining, since calls take most of the processor time
    for name, value in {"LOAD": 0.4, "_FILLING_S": 0.6, "_DRAIN_S": 3.0, "_DRAINED_AT": 1.5}.items():
        monkeypatch.setattr(f"benchmarks.soak.{name}", value)
    record = soak(0.2)
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
    assert record["swaps"], "others follow, on a busy machine after this run"
    assert "error:1" in record["faults"], "the others follow, on a busy machine after this run"
