"""The calls of benchmarks/identity.py: only a call's own answer is right."""

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.support.mixed_calls import FEATURES, KINDS, MixedCall, MixedCalls
from server.models.images.codec import ImageCodec


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[MixedCall]]:
    """Calls by kind."""
    calls = MixedCalls(FEATURES, np.random.default_rng(1))
    found: dict[str, list[MixedCall]] = {}
    for _ in range(300):
        call = calls.draw()
        found.setdefault(call.kind, []).append(call)
    return found


def _answer(call: MixedCall) -> bytes:
    """The answer of an emulated device to a call of binary pixels."""
    begin = int(call.headers["Inference-Header-Content-Length"])
    pixels = np.frombuffer(call.body[begin:], np.uint8).reshape(-1, 224, 224, 3)
    return b"".join(ImageCodec().emulate(each).tobytes() for each in pixels)


def test_every_kind_is_drawn_with_one_sample_or_several(drawn: dict[str, list[MixedCall]]) -> None:
    assert drawn.keys() == KINDS.keys()
    assert {call.samples for call in drawn["pixels"]} == set(range(1, 9))


@pytest.mark.parametrize("kind", ["pixels", "raw pixels"])
def test_only_the_answer_to_the_same_pixels_is_right(drawn: dict[str, list[MixedCall]], kind: str) -> None:
    for call in drawn[kind]:
        for other in drawn[kind]:
            assert call.is_right(_answer(other), 0) is (call is other)


def test_only_the_outputs_of_the_same_tensors_are_right(drawn: dict[str, list[MixedCall]]) -> None:
    calls = MixedCalls(FEATURES, np.random.default_rng(1))
    answers: list[bytes] = []
    for call in drawn["JSON"]:
        x, shift = (np.array(each["data"], np.float32) for each in json.loads(call.body)["inputs"])
        rows: list[Any] = [calls._tensors.emulate({"x": x[row], "shift": shift[row]}) for row in range(call.samples)]
        outputs = [{"name": key, "data": np.ravel([row[key] for row in rows]).tolist()} for key in ("y", "sum")]
        answers.append(json.dumps({"outputs": outputs}).encode())
    for index, call in enumerate(drawn["JSON"]):
        assert [call.is_right(answer, 0) for answer in answers] == [each == index for each in range(len(answers))]
