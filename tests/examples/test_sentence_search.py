"""The sentence encoder of a package by hf:FOLDER, and the search over twenty sentences."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("all_minilm_l6_v2")
pytest.importorskip("transformers")

from benchmarks.support.harness import ROOT
from tests.support.example import running_example
from tests.support.tiny_encoder import embedding_of

QUERY = "How do I make bread?"


def test_embeddings_are_those_of_the_library_and_bread_is_found(tmp_path: Path) -> None:
    with running_example("sentence_search", tmp_path) as example:
        answer = example.call()
        search = [sys.executable, str(ROOT / "examples" / "sentence_search" / "search.py"), example.server.url, QUERY]
        lines = subprocess.run(search, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    vector = answer["data"][0]["embedding"]
    np.testing.assert_allclose(vector, embedding_of(tmp_path / "all-MiniLM-L6-v2", QUERY), atol=1e-5)
    assert {line.partition(" ")[2] for line in lines[:2]} == {
        "She bakes bread with rye flour every Sunday.",
        "Knead the dough for ten minutes before it rises.",
    }
