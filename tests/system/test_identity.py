"""A real model on the CPU: results do not depend on the batch, and `auto` serves from a profile."""

import json
from pathlib import Path

from benchmarks.identity import check, check_mixed
from benchmarks.support.harness import serving
from tests.support.http_client import fetch, photograph


def profile_file(folder: Path) -> str:
    """Write a synthetic profile, so that nothing is measured."""
    path = folder / "p.json"
    sizes = {"batch_size": [1, 32], "service_time_s": [0.01, 0.2]}
    path.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "synthetic", **sizes}))
    return str(path)


def test_results_are_the_same_in_random_batches_and_corrupt_inputs_affect_no_other_request(
    tmp_path: Path,
) -> None:
    outcome = check("squeezenet1_1", 48, 5, "--profile", profile_file(tmp_path))
    assert (outcome.refused, outcome.others) == (5, 0)
    assert outcome.batch_sizes > 1
    assert outcome.error < 1e-4
    assert outcome.difference > 100 * outcome.error


def test_calls_of_every_kind_get_their_own_answers_and_leave_nothing_behind() -> None:
    record = check_mixed(300)
    assert record["wrong"] == []
    assert {"pixels: 200", "encoded: 200", "tensors: 200", "JSON: 200", "corrupt: 400"} <= record["ends"].keys()
    assert record["abandoned"]["calls"] > 0
    assert record["swaps"] > 0
    assert record["loads"] > 0


def test_the_automatic_policy_serves_a_photograph_by_a_real_model(tmp_path: Path) -> None:
    arguments = ["squeezenet1_1", "--device", "cpu", "--weights", "random", "--profile", profile_file(tmp_path)]
    with serving(*arguments) as server:
        answer = fetch(server.url, "/predict", photograph()).json
        assert len(answer["predictions"]) == 5
        assert not answer["predictions"][0]["label"].startswith("class "), "the weights' own labels"
        assert answer["energy_mj"] is None
        assert answer["energy_source"] == "none"
        assert fetch(server.url, "/admin/models/squeezenet1_1/policy").json["spec"] == "auto"
        assert fetch(server.url, "/v2/models/squeezenet1_1").json["parameters"]["weights"] == "random"
        assert server.metric("batchwright_random_weights") == {'{model="squeezenet1_1"}': 1.0}
