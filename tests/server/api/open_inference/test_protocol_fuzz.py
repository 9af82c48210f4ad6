"""Hostile input: each damaged call is accepted or rejected with a client error; benchmarks/fuzz.py runs longer."""

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from benchmarks.support.hostile_inputs import CASES, MOST_BYTES, MOST_SAMPLES, SIGNATURE, Case, good_calls, judge
from server.api.open_inference.protocol import parse_infer


@dataclass
class TracedMemory:
    """Memory that `judge` takes. Tracing Hypothesis as well would take three times as long.

    Attributes:
        kept: allocated by all cases so far and not freed, bytes.
        peak: the most at once, bytes.
    """

    kept: int = 0
    peak: int = 0

    def judge(self, case: Case) -> None:
        """Judge a case."""
        tracemalloc.start()
        try:
            judge(case)
        finally:
            current, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            self.peak = max(self.peak, self.kept + peak)
            self.kept += current


@pytest.fixture(scope="module")
def memory() -> Iterator[TracedMemory]:
    """All cases together take less than 64 MiB, whatever sizes they claim."""
    judge(Case("compress", ("gzip",)))
    traced = TracedMemory()
    yield traced
    assert 0 < traced.peak < 64 << 20


@settings(max_examples=150, derandomize=True)
@given(case=CASES)
def test_hostile_input_is_accepted_or_rejected_with_a_client_error(memory: TracedMemory, case: Case) -> None:
    memory.judge(case)


@settings(max_examples=100, derandomize=True)
@given(good_calls())
def test_calls_are_valid_before_they_are_damaged(call: tuple[dict[str, object], bytes]) -> None:
    header = json.dumps(call[0]).encode()
    parse_infer(header + call[1], len(header), SIGNATURE, MOST_SAMPLES)


def test_other_errors_than_client_errors_are_detected() -> None:
    with pytest.raises(TypeError):
        judge(Case("infer", ("no bytes", 1, "one too many")))
    assert judge(Case("decompress", (bytes(MOST_BYTES + 1), None))) == "TooLargeError"
