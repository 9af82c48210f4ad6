"""The pipeline that ranks texts by an encoder with trained weights."""

from pathlib import Path

from tests.support.example import running_example


def test_the_example_ranks_texts_by_their_similarity_to_a_query(tmp_path: Path) -> None:
    with running_example("search", tmp_path) as example:
        answer = example.call()
    outputs = answer["outputs"]
    assert outputs["order"] == [1, 0]
    assert outputs["scores"][0] > outputs["scores"][1] + 0.1
    assert [step["model"] for step in answer["steps"]] == ["minilm"] * 3
