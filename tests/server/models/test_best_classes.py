"""The best classes of an output: their order, equal values, and fewer classes than are asked for."""

import numpy as np
import pytest

from server.models.model import largest, top_classes


@pytest.mark.parametrize(
    ("values", "most", "expected"),
    [([1.0, 3.0, 2.0], 1, [1]), ([1.0, 3.0, 2.0], 2, [1, 2]), ([2.0, 3.0, 2.0], 5, [1, 0, 2]), ([0.0, 0.0], 2, [0, 1])],
)
def test_the_largest_values_come_first_and_equal_ones_by_index(
    values: list[float], most: int, expected: list[int]
) -> None:
    assert largest(np.array(values), most) == expected


def test_the_five_best_classes_have_their_share_of_all_classes() -> None:
    logits = np.log(np.array([1, 5, 2, 4, 3, 1], np.float32))
    best = top_classes(logits, "abcdef")
    assert [each["label"] for each in best][:4] == ["b", "d", "e", "c"]
    assert [each["probability"] for each in best] == pytest.approx([5 / 16, 4 / 16, 3 / 16, 2 / 16, 1 / 16])
