"""Tests of the history of a run and the series of its charts."""

from math import isfinite

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import history
from loadgen.history import RunHistory
from loadgen.report import Record, simulated_records
from loadgen.schedule import make_schedule
from policies.planning.simulation import Simulation
from policies.profile import load_profile

SIMULATION = Simulation(load_profile("googlenet-tesla-p4"), "timeout:5")
ARRIVALS = make_schedule("ramp:0.5:1.5", 1000.0, 4.0, 1).instants
HISTORY = history.history_from_run(SIMULATION.run(ARRIVALS), ARRIVALS)
NOTHING = history.history_from_records([])


def test_the_records_of_a_simulated_run_give_the_same_history() -> None:
    each = history.history_from_records(list(simulated_records(SIMULATION.services(ARRIVALS))))
    assert each.batches == pytest.approx(HISTORY.batches)
    assert each.end == pytest.approx(HISTORY.end)
    edges = history.windows([HISTORY])
    assert history.power(each, edges) == pytest.approx(history.power(HISTORY, edges))
    for actual, expected in zip(
        history.percentiles(each, edges, [0.5]), history.percentiles(HISTORY, edges, [0.5]), strict=True
    ):
        assert actual == pytest.approx(expected)


def test_the_windows_contain_all_requests_and_all_energy() -> None:
    edges = history.windows([HISTORY])
    widths = np.diff(edges)
    watts = history.power(HISTORY, edges)
    assert len(widths) == 60
    assert watts is not None
    assert HISTORY.energies is not None
    assert (watts * widths).sum() == pytest.approx(HISTORY.energies.sum())
    assert (history.rate(HISTORY.offered, edges) * widths).sum() == pytest.approx(len(ARRIVALS))


def test_a_window_without_arrivals_has_no_percentile() -> None:
    run = RunHistory(np.zeros(0), np.array([0.5, 2.5]), np.array([0.1, 0.3]), None, np.zeros(0), None)
    (values,) = history.percentiles(run, np.array([0.0, 1.0, 2.0, 3.0]), [0.5])
    assert values[[0, 2]].tolist() == pytest.approx([0.1, 0.3])
    assert np.isnan(values[1])


def test_each_step_of_the_rate_has_the_figures_of_its_arrivals() -> None:
    schedule = make_schedule("steps:1@1,3@1,0@5,9@9", 1000.0, 3.0, 1)
    run = history.history_from_run(SIMULATION.run(schedule.instants), schedule.instants)
    steps = history.step_figures(run, schedule.edges)
    assert [(step["start_s"], step["end_s"]) for step in steps] == [(0, 1), (1, 2), (2, 3)]
    counts = [int(((schedule.instants >= start) & (schedule.instants < start + 1)).sum()) for start in range(3)]
    assert [step["scheduled"] for step in steps] == [step["ok"] for step in steps] == counts
    second = (run.arrivals >= 1) & (run.arrivals < 2)
    assert steps[1]["p95_ms"] == pytest.approx(1e3 * np.quantile(run.responses[second], 0.95))
    assert steps[2]["p50_ms"] is None, "no request arrived"
    assert make_schedule("constant", 10.0, 3.0, 1).edges == ()


def test_each_step_of_the_rate_has_the_energy_and_power_of_the_batches_that_end_in_it() -> None:
    finishes = ((0.5, 2.0), (0.5, 2.0), (1.5, 8.0))  # of requests: instant, J
    records = [Record(0.1, 0.1, finished, 200, 2, energy=energy) for finished, energy in finishes]
    first, second, third = history.step_figures(history.history_from_records(records), (0.0, 1.0, 3.0, 4.0))
    assert (first["energy_per_request_mj"], first["mean_power_w"]) == pytest.approx((2000.0, 4.0))
    assert (second["energy_per_request_mj"], second["mean_power_w"]) == pytest.approx((8000.0, 4.0))
    assert (third["energy_per_request_mj"], third["mean_power_w"]) == (None, 0.0), "no batch ended"
    (unknown,) = history.step_figures(history.history_from_records([Record(0.0, 0.0, 1.0, 200)]), (0.0, 3.0))
    assert (unknown["energy_per_request_mj"], unknown["mean_power_w"]) == (None, None)


def test_the_steps_of_a_run_that_ended_early_are_those_that_began() -> None:
    run = history.history_from_records([Record(0.0, 0.0, 10.0, 200, 1, energy=50.0)])
    edges = (0.0, 60.0, 120.0)

    def steps(end: float) -> list[tuple[float, float, float | None]]:
        figures = history.step_figures(run, edges, end)
        return [(step["start_s"], step["end_s"], step["mean_power_w"]) for step in figures]

    assert steps(10.0) == [(0.0, 10.0, 5.0)]
    assert steps(90.0) == [(0.0, 60.0, 50 / 60), (60.0, 90.0, 0.0)]
    assert steps(125.0) == [(0.0, 60.0, 50 / 60), (60.0, 120.0, 0.0)]
    assert steps(0.0) == []


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=300))
def test_the_distribution_increases_from_the_shortest_to_the_longest(responses: list[float]) -> None:
    run = RunHistory(np.zeros(0), np.zeros(len(responses)), np.array(responses), None, np.zeros(0), None)
    values, shares = history.response_distribution(run)
    assert (values[0], values[-1]) == (min(responses), max(responses))
    assert (np.diff(values) >= 0).all()
    assert (np.diff(shares) > 0).all()


def test_batch_sizes_that_did_not_occur_have_share_0() -> None:
    run = RunHistory(np.zeros(0), np.zeros(0), np.zeros(0), {1: 3.0, 4: 1.0}, np.zeros(0), None)
    sizes, shares = history.batch_shares(run)
    assert sizes.tolist() == [1, 2, 3, 4]
    assert shares.tolist() == [0.75, 0, 0, 0.25]


def test_charts_show_at_most_2000_requests() -> None:
    arrivals, responses = history.points(HISTORY)
    assert 1000 <= len(arrivals) == len(responses) <= 2000
    assert (np.diff(arrivals) >= 0).all()


def test_a_run_without_responses_has_empty_series() -> None:
    edges = history.windows([NOTHING])
    assert isfinite(edges[-1])
    assert history.power(NOTHING, edges) is None
    assert np.isnan(history.percentiles(NOTHING, edges, [0.5])[0]).all()
    assert [len(values) for values in (*history.response_distribution(NOTHING), *history.batch_shares(NOTHING))] == [
        0
    ] * 4
    assert len(history.points(NOTHING)[0]) == 0


def test_a_value_missing_in_one_response_is_unknown_for_the_run() -> None:
    run = history.history_from_records([Record(0.0, 0.0, 1.0, 200, 1, energy=0.5), Record(0.0, 0.0, 1.0, 200)])
    assert run.batches is None
    assert run.energies is None
