"""A real model on the CPU: everybody gets their own answer, and a profile makes `auto` work."""

import json
from pathlib import Path

from benchmarks.identity import check
from benchmarks.support.harness import serving
from tests.support.http_client import ask, photograph


def profile_file(folder: Path) -> str:
    """A made-up profile, so that no test has to measure."""
    path = folder / "p.json"
    sizes = {"batch_size": [1, 32], "service_time_s": [0.01, 0.2]}
    path.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "made-up", **sizes}))
    return str(path)


def test_answers_under_random_batch_sizes_are_those_given_alone_and_corrupt_ones_disturb_nobody(
    tmp_path: Path,
) -> None:
    outcome = check("squeezenet1_1", 48, 5, "--profile", profile_file(tmp_path))
    assert (outcome.refused, outcome.others) == (5, 0)
    assert outcome.batch_sizes > 1
    assert outcome.error < 1e-4
    assert outcome.difference > 100 * outcome.error


def test_the_automatic_policy_serves_a_photograph_by_a_real_model(tmp_path: Path) -> None:
    arguments = ["squeezenet1_1", "--device", "cpu", "--weights", "random", "--profile", profile_file(tmp_path)]
    with serving(*arguments) as server:
        answer = ask(server.url, "/predict", photograph()).json
        assert len(answer["predictions"]) == 5
        assert not answer["predictions"][0]["label"].startswith("class "), "the weights' own labels"
        assert answer["energy_mj"] is None
        assert answer["energy_source"] == "none"
        assert ask(server.url, "/admin/models/squeezenet1_1/policy").json["spec"] == "auto"
        assert ask(server.url, "/v2/models/squeezenet1_1").json["parameters"] == {"weights": "random"}
