"""Bins decided together: the record supports what its page says, and the tables are complete."""

from benchmarks.support.harness import load_record
from research import bins_live, smdp_bins


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


def test_live_runs_are_complete_and_were_sent_in_time() -> None:
    record = load_record("bins_live")
    assert len(record) == len(bins_live.LOADS) * len(bins_live.ROUNDS) * len(bins_live.POLICIES)
    assert all(found["send_lag_p99_ms"] < 10.0 for found in record.values())
    assert len(bins_live.table(record).splitlines()) == len(bins_live.LOADS) * len(bins_live.ROUNDS) + 2


def test_the_table_has_a_row_for_each_setting() -> None:
    record = load_record(smdp_bins.NAME)
    assert len(smdp_bins.table(record).splitlines()) == len(record) + 2
