"""Tests of the report of a run and its tables."""

import json
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from rich.console import Console

from loadgen.report import Record, Report, RunObjective, RunOutcome, make_report, outcome_from_records, outcome_from_run
from loadgen.tables import comparison_table, report_table
from policies.queue.simulator import Run

KEYS = [
    *("scheduled", "ok", "errors", "arrival_rate_hz", "mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "max_ms"),
    *("throughput_hz", "mean_batch_size", "energy_per_request_mj", "mean_power_w", "slo_attainment"),
    *("send_lag_p99_ms", "slo_violations", "cost"),
]
SERVED = Record(1.0, 1.0, 1.5, 200, batch_size=1, waiting=0.1, service=0.4, energy=0.5)
PAIR = Record(2.0, 2.25, 3.0, 200, batch_size=2, waiting=0.3, service=0.5, energy=0.25)

RUN = Run(
    scheduled=3,
    responses=np.array([0.5, 1.0, 1.0]),
    arrivals=np.array([1.0, 2.0, 2.0]),
    waits=np.zeros(3),
    batch_sizes=np.array([1, 2]),
    finishes=np.array([1.5, 3.0]),
    energies=np.array([0.5, 0.5]),
    elapsed=2.0,
)


def report_of(*records: Record, slo: float = inf) -> Report:
    return make_report(outcome_from_records(records), 4.0, RunObjective(slo))


def rendered(thing: object) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        console.print(thing)
    return captured.get()


def test_the_keys_and_their_order_are_those_of_the_contract() -> None:
    assert list(report_of(SERVED)) == KEYS


def test_response_time_counts_from_the_scheduled_instant() -> None:
    assert report_of(PAIR)["mean_ms"] == 1000.0
    assert report_of(PAIR)["send_lag_p99_ms"] == 250.0


def test_each_batch_counts_once_in_the_mean_batch_size() -> None:
    assert report_of(SERVED, PAIR, PAIR)["mean_batch_size"] == 1.5


def test_throughput_and_power_are_from_first_arrival_to_last_response() -> None:
    content = report_of(PAIR, SERVED, PAIR)
    assert content["throughput_hz"] == 3 / 2.0
    assert content["mean_power_w"] == 1.0 / 2.0
    assert content["energy_per_request_mj"] == pytest.approx(1000 / 3)
    assert content["arrival_rate_hz"] == 3 / 4.0


def test_errors_are_counted_by_status_and_excluded_from_response_times() -> None:
    lost = [replace(SERVED, status=503, finished=9.0), replace(SERVED, status="timeout"), replace(SERVED, status=503)]
    content = report_of(SERVED, *lost)
    assert (content["scheduled"], content["ok"], content["errors"]) == (4, 1, {"503": 2, "timeout": 1})
    assert content["max_ms"] == 500.0


def test_slo_attainment_is_a_share_of_all_scheduled_requests() -> None:
    refused = replace(SERVED, status=503)
    assert report_of(SERVED, PAIR, refused, refused, slo=0.5)["slo_attainment"] == 0.25
    assert report_of(SERVED, PAIR, refused, refused, slo=0.5)["slo_violations"] == 3
    assert report_of(SERVED)["slo_attainment"] is report_of(SERVED)["slo_violations"] is None


def test_the_cost_is_the_weighted_sum_of_mean_response_time_in_ms_and_mean_power_in_w() -> None:
    outcome = outcome_from_records([PAIR, SERVED, PAIR])
    content = make_report(outcome, 4.0, RunObjective(w1=2.0, w2=10.0))
    assert content["mean_ms"] is not None
    assert content["cost"] == pytest.approx(2 * content["mean_ms"] + 10 * 0.5)
    dark = make_report(replace(outcome, energy=None), 4.0, RunObjective(w2=10.0))
    assert dark["cost"] is None
    assert make_report(replace(outcome, energy=None), 4.0)["cost"] == content["mean_ms"]


@pytest.mark.parametrize("records", [[], [replace(SERVED, status="connection")]])
def test_without_responses_the_values_are_null_and_never_nan(records: list[Record]) -> None:
    content = report_of(*records)
    assert json.dumps(content, allow_nan=False)
    assert [key for key in KEYS[4:14] if content[key] is not None] == []  # type: ignore[literal-required]
    assert content["ok"] == 0


def test_a_value_missing_in_one_response_is_null_for_the_run() -> None:
    content = report_of(SERVED, replace(SERVED, batch_size=None, energy=None))
    assert content["mean_batch_size"] is None
    assert content["energy_per_request_mj"] is None
    assert content["mean_power_w"] is None


def test_a_simulated_run_has_the_same_report_without_send_lag() -> None:
    content = make_report(outcome_from_run(RUN), 4.0)
    assert content == report_of(SERVED, PAIR, PAIR) | {"send_lag_p99_ms": None}


def test_a_simulated_run_without_energies_has_no_power() -> None:
    assert make_report(outcome_from_run(replace(RUN, energies=None)), 4.0)["mean_power_w"] is None


def test_a_duration_of_zero_has_no_rate() -> None:
    outcome = RunOutcome(1, np.array([0.5]), {}, 0.5, None, None)
    assert make_report(outcome, 0.0)["arrival_rate_hz"] is None


def test_the_table_leaves_out_unknown_values() -> None:
    text = rendered(report_table(report_of(SERVED, replace(SERVED, status=503, energy=None)), RunObjective(inf)))
    assert "not answered: 503" in text
    assert "500" in text
    assert "SLO" not in text


@pytest.mark.parametrize(("w2", "shown"), [(0.0, False), (2.0, True)])
def test_the_cost_is_shown_with_a_weight_of_power(w2: float, shown: bool) -> None:
    objective = RunObjective(inf, w2=w2)
    assert ("cost" in rendered(report_table(report_of(SERVED), objective))) == shown
    assert ("cost" in rendered(comparison_table({"greedy": report_of(SERVED)}, objective))) == shown


def test_the_comparison_has_one_row_per_policy() -> None:
    text = rendered(
        comparison_table(
            {"greedy": report_of(SERVED, slo=1.0), "static:2": report_of(slo=1.0)}, RunObjective(1.0, w2=2.0)
        )
    )
    assert [line for line in text.splitlines() if "greedy" in line]
    assert [line for line in text.splitlines() if "static:2" in line and "-" in line]
    assert "late: not answered within 1000 ms" in text
    assert "cost: 1 x mean ms + 2 x W" in text


def test_a_comparison_fits_eighty_columns() -> None:
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(
            comparison_table({"smdp:slo_p95_ms=50": report_of(SERVED, PAIR, slo=1.0)}, RunObjective(1.0, w2=2.0))
        )
    assert "smdp:slo_p95_ms=" in captured.get().splitlines()[1]
    assert "…" not in captured.get()


def test_the_lines_of_the_output_file_have_the_units_of_their_keys() -> None:
    line = PAIR.to_json()
    assert (line["response_ms"], line["waiting_ms"], line["energy_mj"]) == (1000.0, 300.0, 250.0)
    assert replace(PAIR, energy=None).to_json()["energy_mj"] is None
