"""Bins decided together: the record supports what its page says, and the tables are complete."""

from benchmarks import bins_live, joining_energy, joining_live, smdp_bins
from benchmarks.support.harness import load_record


def test_the_policy_never_costs_more_than_the_best_existing_one_and_gains_where_bins_matter() -> None:
    record = load_record("smdp_bins")
    assert len(record) == len(smdp_bins.SETTINGS) * len(smdp_bins.LOADS) + 2 * len(smdp_bins.WEIGHTED_LOADS)
    for key, found in record.items():
        assert ("smdp-bins:3" in found["policies"]) == (" 8 " in key)
        for spec in smdp_bins.TOGETHER:
            if spec not in found["policies"]:
                continue
            difference, half = found["policies"][spec]["to_best_existing"]
            assert difference <= half, (key, spec)
            assert key.endswith(" 0") <= (difference + half < 0.0), "without a weight of power it gains in each setting"


def test_energy_is_saved_for_time_and_the_cost_rises_only_where_hardly_anything_arrives() -> None:
    record = load_record("joining_energy")
    assert len(record) == len(joining_energy.LENGTHS) * len(joining_energy.WEIGHTS) * len(joining_energy.LOADS)
    for key, found in record.items():
        assert found["energy_change"][0] <= 0.0
        assert (found["cost_change"][0] > found["cost_change"][1] + 1e-4) <= (key.split()[1] == "0.05"), key


def test_live_runs_are_complete_and_were_sent_in_time() -> None:
    record = load_record("bins_live")
    assert len(record) == len(bins_live.LOADS) * len(bins_live.ROUNDS) * len(bins_live.POLICIES)
    assert all(found["send_lag_p99_ms"] < 10.0 for found in record.values())
    assert len(bins_live.table(record).splitlines()) == len(bins_live.LOADS) * len(bins_live.ROUNDS) + 2


def test_live_runs_of_continuous_batching_are_complete_and_were_sent_in_time() -> None:
    record = load_record("joining_live")
    rows = len(joining_live.LOADS) * len(joining_live.ROUNDS)
    assert len(record) == 1 + len(joining_live.POLICIES) * rows, "the profile and the runs"
    assert all(found["send_lag_p99_ms"] < 10.0 for key, found in record.items() if key != "profile")
    assert len(joining_live.table(record).splitlines()) == rows + 2
    assert len(joining_live.changes(record)) == rows


def test_the_tables_have_a_row_for_each_setting() -> None:
    for module in (smdp_bins, joining_energy):
        record = load_record(module.NAME)
        assert len(module.table(record).splitlines()) == len(record) + 2
