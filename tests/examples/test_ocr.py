"""The recogniser of text lines: the text of drawn lines, alone and in batches of different widths."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.ocr.lines import draw_line, random_line
from examples.ocr.model import HEIGHT, Recogniser
from policies.profile import Profile
from tests.support.example import running_example
from tests.support.http_client import fetch

PROFILE = Profile("ocr", (0.1,) * 8, lengths=(64, 1600), length_service_times=((0.01, 0.1),) * 8)
LINES = ("short", "a line of text", "Hello Batchwright 2026", "several words of different lengths")


def test_the_example_reads_lines_of_different_widths_in_one_batch(tmp_path: Path) -> None:
    with running_example("ocr", tmp_path, PROFILE) as example:
        outputs = example.call()["outputs"]
        assert outputs["text"] == "Hello Batchwright 2026"
        assert outputs["score"] > 0.9
        (tmp_path / "broken.png").write_bytes(draw_line("broken")[:100])
        refused = example.call(data_binary=f"@{tmp_path}/broken.png")
        example.server.set_policy("ocr", "static:4,max_wait_ms=20000")

        def read(text: str) -> Any:
            return fetch(example.server.url, "/predict", draw_line(text)).json

        with ThreadPoolExecutor(len(LINES)) as pool:
            answers = list(pool.map(read, LINES))
    assert refused == {"error": "the model cannot decode the body: the body is no JPEG or PNG"}
    assert {answer["batch_size"] for answer in answers} == {4}
    assert [answer["outputs"]["text"] for answer in answers] == list(LINES)


def test_a_picture_keeps_its_proportions_and_ends_in_grey(tmp_path: Path) -> None:
    Image.new("RGB", (30, 12), (255, 0, 0)).save(tmp_path / "red.png")
    image = Recogniser().decode((tmp_path / "red.png").read_bytes(), "image/png")["image"]
    assert image.shape == (3, HEIGHT, 120)
    np.testing.assert_array_equal(image[:, 0, 0], [-1, -1, 1])  # BGR
    Image.new("RGB", (31, 12), (255, 0, 0)).save(tmp_path / "red.png")
    image = Recogniser().decode((tmp_path / "red.png").read_bytes(), "image/png")["image"]
    assert image.shape == (3, HEIGHT, 128)
    np.testing.assert_array_equal(image[:, 5, 123:], [[-1, 0, 0, 0, 0], [-1, 0, 0, 0, 0], [1, 0, 0, 0, 0]])


def test_a_line_that_is_too_wide_is_refused_before_it_is_scaled(tmp_path: Path) -> None:
    Image.new("L", (30_000, 1)).save(tmp_path / "wide.png")
    with pytest.raises(ValueError, match="the line is 1440000 pixels wide at a height of 48, over 1600"):
        Recogniser().decode((tmp_path / "wide.png").read_bytes(), "image/png")


@pytest.mark.parametrize(("size", "message"), [((300, 60_000), "300 x 60000 pixels"), ((20_000, 10_000), "more than")])
def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded(
    tmp_path: Path, size: tuple[int, int], message: str
) -> None:
    Image.new("1", size).save(tmp_path / "large.png")
    with pytest.raises(ValueError, match=f"the image has {message}"):
        Recogniser().decode((tmp_path / "large.png").read_bytes(), "image/png")


def test_characters_are_given_once_without_blanks() -> None:
    class Session:
        def run(self, _outputs: Any, _inputs: Any) -> tuple[Any]:
            steps = [[0, 1, 1, 0, 1, 2, 2, 3], [0] * 8]
            return (np.eye(4, dtype=np.float32)[steps] * np.float32(0.5),)

    model = Recogniser()
    model.session, model.characters = Session(), np.array(["", "a", "b", " "])
    outputs = model.run(np.zeros((2, 3, HEIGHT, 64), np.float32))
    assert outputs["text"].tolist() == [b"aab ", b""]
    assert outputs["score"].tolist() == [0.5, 0.0]
    assert model.render({name: array[0, ...] for name, array in outputs.items()}) == {"text": "aab ", "score": 0.5}


def test_random_lines_have_the_length_asked_for() -> None:
    rng = random.Random(0)
    for length in range(1, 61):
        line = random_line(rng, length)
        assert len(line) == length
        assert line == line.strip()
