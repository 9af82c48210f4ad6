"""The computations of benchmarks/text_live.py, without its measurements."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support import text_figures
from benchmarks.text_live import (
    ONE_BIN,
    RESPONDING,
    Workload,
    at_overload,
    mean_ms,
    padding_of,
    poisson,
    short_name,
    table,
    throughput,
)
from loadgen.schedule import make_schedule
from loadgen.simulated import Simulation
from loadgen.sizes import RequestSizes, draw_request_lengths
from policies.profile import Profile

LENGTHS = np.tile(np.array([10.0, 20.0, 40.0, 80.0]), 80)
TEXTS = Profile("texts", (1.0,) * 8, lengths=(1, 8), length_service_times=((0.1, 0.8),) * 8)  # 0.1 s a token


@pytest.fixture
def work(tmp_path: Path) -> Workload:
    return at_overload(Workload(tmp_path / "work.csv", np.empty(0), LENGTHS, 0.1), TEXTS)


def records(work: Workload, spec: str) -> list[dict[str, Any]]:
    simulation = Simulation(TEXTS, spec, sizes=RequestSizes(work.tokens))
    return [record.to_json() for record in simulation.records(work.instants)]


def test_generate_load_reads_the_written_trace(work: Workload) -> None:
    words = dict(zip(work.arguments[::2], work.arguments[1::2], strict=True))
    instants = make_schedule(words["--arrivals"], None, None, 0).instants
    assert np.array_equal(instants, work.instants)
    drawn = float(words["--size-scale"]) * draw_request_lengths(words["--sizes"], words["--arrivals"], len(instants), 0)
    assert np.array_equal(drawn, 0.1 * LENGTHS)
    assert work.tokens[:4].tolist() == [1.0, 2.0, 4.0, 8.0]


def test_overload_exceeds_the_limit_of_many_bins_which_batches_of_one_length_reach(work: Workload) -> None:
    most = 8 / (0.1 * 3.75)  # mean of 1, 2, 4 and 8 tokens
    assert len(work.instants) / work.instants[-1] == pytest.approx(1.5 * most, rel=0.01)
    assert throughput(records(work, "multi-bin:4,batch_size=8,max_wait_ms=inf")) == pytest.approx(most, rel=0.05)
    assert throughput(records(work, ONE_BIN)) == pytest.approx(8 / 0.8)


def test_padding_is_the_excess_over_the_needed_tokens(work: Workload) -> None:
    assert padding_of(records(work, ONE_BIN), work) == pytest.approx(8 / 3.75 - 1)
    assert padding_of(records(work, "multi-bin:4,batch_size=8,max_wait_ms=inf"), work) == pytest.approx(0.0, abs=1e-12)


def test_the_first_eighth_of_a_run_does_not_count() -> None:
    rows = [{"scheduled_s": float(i), "finished_s": i + 1.0, "response_ms": 9.0 if i < 20 else 1.0} for i in range(160)]
    assert mean_ms(rows) == 1.0
    assert throughput(rows) == pytest.approx(1.0)
    assert throughput(rows, whole_run=True) == pytest.approx(1.0)


def test_slower_arrivals_have_the_same_requests(work: Workload) -> None:
    slower = poisson(work, 2.0, 100)
    assert slower.instants[0] == 0.0
    assert slower.instants[-1] / 100 == pytest.approx(0.5, rel=0.3)  # three standard errors of a mean of 100
    assert np.array_equal(slower.tokens, work.tokens[:100])


def test_the_record_becomes_tables_and_a_figure(tmp_path: Path) -> None:
    cell: dict[str, Any] = {"live_hz": [9.0, 11.0], "gain_live": [1.0, 1.0], "live_padding": [0.5, 0.4]}
    cell |= {"simulated_hz": 12.0, "gain_simulated": 1.0, "simulated_padding": 0.3}
    part: dict[str, Any] = {"device": "CPU", "requests": 8, "longest_tokens": 9.0, "mean_tokens": 4.5, "limit_hz": 20.0}
    part |= {"cells": {ONE_BIN: cell}, "loads": (0.5,), "rates_hz": [6.0], "moderate_requests": 4}
    part |= {"responses": [{spec: {"live_ms": 30.0, "simulated_ms": 20.0} for spec in RESPONDING}]}
    text = table({"generator": part, "classifier": part})
    assert "| static:8 | 9.0, 11.0 | 12.0 | 1.00, 1.00 | 1.00 | 50%, 40% | 30% |" in text
    assert "| multi-bin:4,inner=greedy | 30 (20) |" in text
    text_figures.draw({"generator": part, "classifier": part}, short_name, tmp_path / "text.png")
    assert (tmp_path / "text.png").stat().st_size > 10_000
    text_figures.draw({"generator": part}, short_name, tmp_path / "half.png")
    assert not (tmp_path / "half.png").exists()
