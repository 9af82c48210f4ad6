"""The pipeline that reads pages: the text of drawn pages, alone and in batches of several calls."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.read_text.detector import HEIGHT, WIDTH, Detector
from examples.read_text.page import draw_page
from examples.read_text.read import cut_line
from tests.support.example import running_example
from tests.support.http_client import fetch

PAGES: tuple[list[str], ...] = (
    ["Pipelines call several models"],
    ["The first line", "A second one", "Hello Batchwright 2026"],
    [],
    ["different words of text", "Requests share batches"],
)


def test_the_example_reads_the_lines_of_pages(tmp_path: Path) -> None:
    with running_example("read_text", tmp_path) as example:
        answer = example.call()
        assert [line["text"] for line in answer["outputs"]] == [
            "Pipelines call several models",
            "Each step is a request",
        ]
        assert min(line["score"] for line in answer["outputs"]) > 0.9
        assert [step["model"] for step in answer["steps"]] == ["det", "rec", "rec"]
        (tmp_path / "broken.png").write_bytes(draw_page(["broken"])[:100])
        refused = example.call(data_binary=f"@{tmp_path}/broken.png")

        def read(lines: list[str]) -> Any:
            return fetch(example.server.url, "/predict/read", draw_page(lines)).json

        with ThreadPoolExecutor(len(PAGES)) as pool:
            answers = list(pool.map(read, PAGES))
    assert refused == {"error": "the model cannot decode the body: the body is no JPEG or PNG"}
    assert [[line["text"] for line in answer["outputs"]] for answer in answers] == list(PAGES)


def test_the_boxes_of_a_page_are_those_of_its_marks() -> None:
    probability = np.zeros((HEIGHT, WIDTH), np.float32)
    probability[200:210, 100:300] = 0.9
    probability[40:50, 20:120] = 0.9
    probability[300:302, 100:300] = 0.9  # too low
    probability[400:410, 100:300] = 0.4  # too unlikely
    grow = [round(1.6 * 10 * width / (2 * (10 + width))) for width in (100, 200)]
    expected = [
        [20 - grow[0], 40 - grow[0], 120 + grow[0], 50 + grow[0]],
        [100 - grow[1], 200 - grow[1], 300 + grow[1], 210 + grow[1]],
    ]
    assert Detector().boxes(probability).tolist() == expected
    assert Detector().boxes(0 * probability).shape == (0, 4)


@pytest.mark.parametrize(("box", "width"), [((0, 0, 96, 48), 96), ((0, 0, 50, 24), 104), ((5, 5, 5, 5), 48)])
def test_a_line_is_as_wide_as_its_proportions_say_in_whole_steps(box: tuple[int, ...], width: int) -> None:
    line = cut_line(Image.new("RGB", (200, 100)), box)
    assert line.shape == (3, 48, width)
