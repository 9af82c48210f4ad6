"""Models of users: identified answers from three sources, innocent requests beside faults, and hostile bodies."""

from pathlib import Path

import pytest

from benchmarks.user_models import faults, hostile, same_from_three_sources


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
def test_a_function_gives_the_same_answers_from_three_sources() -> None:
    for model, result in same_from_three_sources(50).items():
        assert result["wrong"] == 0, model
        assert result["samples"] > 500


@pytest.mark.slow
def test_faults_of_the_code_cost_no_other_request() -> None:
    results = faults([101, 102, 103, 104, 106, 108, 109], 100)
    for about, result in results.items():
        assert result["innocent"] == 98
        assert result["innocent_lost"] == 0, about
        assert [(each["status"], each["count"]) for each in result["poisoned"]] == [(500, 2)], about
    assert results["one row too few"]["poisoned"][0]["error"].startswith("the model returned output y of shape [0, 2]")


@pytest.mark.slow
def test_hostile_bodies_are_client_errors() -> None:
    result = hostile(2000)
    assert result["first_failures"] == []
    assert result["statuses"].keys() <= {"200", "400", "413"}
    assert result["statuses"]["200"] > 100
