"""Tests of reading one sample of named tensors from a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.sample_file import Inputs, read_sample
from policies.types import SpecError

INPUTS: Inputs = {
    "x": (np.dtype("<f4"), (2, -1)),
    "n": (np.dtype("u1"), ()),
    "words": (np.dtype(object), (2,)),
}
SAMPLE: dict[str, Any] = {"x": [[1, 2.5, 3], [4, 5, 6]], "n": 255, "words": ["a", "größer"]}


def written(folder: Path, content: Any) -> Path:
    path = folder / "sample.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def check(sample: dict[str, Any]) -> None:
    assert (sample["x"].dtype, sample["x"].tolist()) == (np.float32, SAMPLE["x"])
    assert (sample["n"].dtype, sample["n"].shape, sample["n"].item()) == (np.uint8, (), 255)
    assert sample["words"].tolist() == [b"a", "größer".encode()]


@pytest.mark.parametrize("content", [SAMPLE, {"inputs": SAMPLE}])
def test_json_holds_nested_lists_by_input_name(tmp_path: Path, content: Any) -> None:
    check(read_sample(written(tmp_path, content), INPUTS))


def test_npz_holds_an_array_for_each_input(tmp_path: Path) -> None:
    path = tmp_path / "sample.npz"
    np.savez(path, x=np.array(SAMPLE["x"]), n=np.array(255), words=np.array(SAMPLE["words"]))
    check(read_sample(path, INPUTS))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": [[1, 2]]}, r"input x has the shape \[1, 2\], the model takes \[2, -1\]; give one sample"),
        ({"x": [[], []]}, r"input x has the shape \[2, 0\]"),
        ({"x": [1, 2]}, r"input x has the shape \[2\]"),
        ({"x": [[1, 2], [3]]}, "input x has lists of different lengths"),
        ({"x": [["1"], ["2"]]}, "input x has values of type .*, the model takes float32"),
        ({"x": [[None], [1]]}, "input x has values of type object"),
        ({"n": 256}, "input n has a value outside uint8; give 0 to 255"),
        ({"n": -1}, "input n has a value outside uint8"),
        ({"n": 1.0}, "input n has values of type float64, the model takes uint8"),
        ({"words": ["a", 1]}, "input words has a value of type int, the model takes texts"),
        ({"y": 1}, "has x, n, words, y; give a value by name for each input of the model: x, n, words"),
    ],
)
def test_a_sample_that_does_not_fit_is_an_error(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read_sample(written(tmp_path, SAMPLE | change), INPUTS)


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"inputs": 1}', "[" * 100_000])
def test_a_malformed_json_file_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(SpecError, match=r"sample\.json (holds list|is no json file|has inputs)"):
        read_sample(written(tmp_path, content), INPUTS)


def test_a_malformed_npz_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "sample.npz"
    for content in (b"", b"PK\x03\x04 cut off", b"text"):
        path.write_bytes(content)
        with pytest.raises(SpecError, match=r"sample\.npz is no npz file"):
            read_sample(path, INPUTS)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(SpecError, match="one array without a name"):
        read_sample(path, INPUTS)
    np.savez(path, x=np.array([{}]))
    with pytest.raises(SpecError, match="is no npz file"):
        read_sample(path, INPUTS)


def test_a_file_of_another_type_or_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"unknown type of the sample .*sample\.txt'; give FILE.json, FILE.npz or FILE.py:CLASS"
    ):
        read_sample(tmp_path / "sample.txt", INPUTS)
    for name in ("none.json", "none.npz"):
        with pytest.raises(SpecError, match=r"cannot read the sample .*none.* \(No such file or directory\)"):
            read_sample(tmp_path / name, INPUTS)
