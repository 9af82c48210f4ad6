"""Texts: what may be sent, what is padding, and how long a text is expected to take."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.profile import Profile
from policies.types import SpecError
from server.api.open_inference.protocol import InferCall, parse_infer
from server.api.open_inference.routes import check_outputs
from server.errors import BadInputError, TooLargeError
from server.models.text import Generated, Text, Unfinished, tokens_of
from server.models.text_codec import ByteTokenizer, TextCodec
from server.models.text_lengths import sizes_of
from server.models.text_sources import is_text
from server.models.torchvision_source import check_name

GENERATOR = TextCodec(vocabulary=259, most_tokens=8, most_new_tokens=6, pad=0, tokenizer=ByteTokenizer())
CLASSIFIER = TextCodec(vocabulary=259, most_tokens=8, most_new_tokens=0, pad=0, tokenizer=None)
PROFILE = Profile("p", (0.4, 0.5), lengths=(1, 6), length_service_times=((0.2, 0.7), (0.3, 0.8)))


def called(inputs: list[dict[str, Any]], codec: TextCodec = GENERATOR, **fields: Any) -> InferCall:
    body = json.dumps({"inputs": inputs, **fields}).encode()
    names = [codec.output(2).name]
    return parse_infer(body, None, codec.input, names, 100)


def ids(rows: list[list[int]], datatype: str = "INT64") -> dict[str, Any]:
    return {"name": "input_ids", "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": rows}


def limits(numbers: list[int]) -> dict[str, Any]:
    return {"name": "max_new_tokens", "datatype": "INT32", "shape": [len(numbers)], "data": numbers}


def texts_of(codec: TextCodec, call: InferCall) -> list[Text]:
    return codec.from_tensor(call.tensor, call.beside, call.parameters).read()


def read_text(codec: TextCodec, body: bytes) -> Text:
    (text,) = codec.from_body(body).read()
    assert isinstance(text, Text)
    return text


@pytest.mark.parametrize("text", ["hello", "Grüße, 世界", ""])
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert all(3 <= token < ByteTokenizer.vocabulary for token in ids)
    assert ByteTokenizer().decode([0, *ids, 1]) == text


def test_padding_at_the_end_of_a_row_is_no_part_of_its_text() -> None:
    texts = texts_of(GENERATOR, called([ids([[5, 6, 0, 0], [7, 0, 8, 9]])]))
    assert texts == [Text([5, 6], 6), Text([7, 0, 8, 9], 6)]


def test_where_no_id_pads_every_id_is_part_of_the_text() -> None:
    codec = replace(GENERATOR, pad=-1)
    assert texts_of(codec, called([ids([[5, 0, 0], [6, 0, -1]])], codec)) == [Text([5, 0, 0], 6), Text([6, 0], 6)]
    assert codec.padded([[5, 0], [6]]).tolist() == [[5, 0], [6, -1]]
    assert codec.parameters()["pad_token_id"] == -1


def test_a_row_that_is_too_long_is_refused_as_it_came() -> None:
    class Row(np.ndarray[Any, Any]):
        def tolist(self) -> Any:
            raise AssertionError("millions of numbers would be made")

    row = np.full(10_000, 5, np.int64).view(Row)
    with pytest.raises(BadInputError, match="10000 tokens; send 1 to 8"):
        GENERATOR.unpadded(row)


def test_a_body_that_no_text_within_bounds_needs_is_refused_before_it_is_read() -> None:
    longest = json.dumps({"text": "\U0001d11e" * 128, "max_new_tokens": 3, "ignore_eos": True}).encode()
    with pytest.raises(BadInputError, match="512 tokens"):  # which is four a character, but not over the bytes
        read_text(GENERATOR, longest)
    with pytest.raises(TooLargeError, match="over 2560; send a shorter text") as caught:
        read_text(GENERATOR, b'{"text":[' + b"[]," * 1000)
    assert caught.value.status == 413


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
def test_each_sample_has_its_own_limit_and_may_be_forced(datatype: str) -> None:
    call = called([ids([[5], [6]], datatype), limits([2, 3])], parameters={"ignore_eos": True})
    assert texts_of(GENERATOR, call) == [Text([5], 2, True), Text([6], 3, True)]


def test_limits_may_come_before_the_ids_and_in_binary() -> None:
    inputs: list[dict[str, Any]] = [limits([4, 5]), ids([[5, 7], [6, 8]])]
    blobs = [np.array([4, 5], "<i4").tobytes(), np.array([[5, 7], [6, 8]], "<i8").tobytes()]
    for entry, blob in zip(inputs, blobs, strict=True):
        del entry["data"]
        entry["parameters"] = {"binary_data_size": len(blob)}
    document = json.dumps({"inputs": inputs}).encode()
    call = parse_infer(document + b"".join(blobs), len(document), GENERATOR.input, ["output_ids"], 100)
    assert texts_of(GENERATOR, call) == [Text([5, 7], 4), Text([6, 8], 5)]
    inputs[0]["parameters"]["binary_data_size"] += 1
    document = json.dumps({"inputs": inputs}).encode()
    with pytest.raises(BadInputError, match="41 but 40 bytes follow"):
        parse_infer(document + b"".join(blobs), len(document), GENERATOR.input, ["output_ids"], 100)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([ids([[5, 259]])], "token id 259 is outside the vocabulary; send 0 to 258"),
        ([ids([[-1]])], "token id -1"),
        ([ids([[0, 0]])], "0 tokens; send 1 to 8"),
        ([ids([[5] * 9])], "9 tokens; send 1 to 8"),
        ([ids([[5]]), limits([7])], "max_new_tokens is 7; send 1 to 6"),
        ([ids([[5]]), limits([0])], "max_new_tokens is 0; send 1 to 6"),
        ([ids([[5]]), limits([1, 1])], "input max_new_tokens is for 2 samples, input_ids for 1"),
        ([limits([1])], "no input_ids"),
        ([ids([[5]]), ids([[5]])], "the input's name is 'input_ids'"),
        ([ids([[5]]) | {"shape": [1, 0], "data": []}], "the shape is [1, 0]"),
        ([ids([[5]]) | {"shape": [1], "data": [5]}], "the shape is [1]"),
        ([ids([[5]]) | {"datatype": "FP32"}], "the datatype is 'FP32'"),
    ],
)
def test_what_a_model_cannot_take_is_refused_with_its_bounds(inputs: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(BadInputError) as caught:
        texts_of(GENERATOR, called(inputs))
    assert says in str(caught.value)


def test_only_a_generator_has_limits_and_only_a_classifier_classes() -> None:
    with pytest.raises(BadInputError, match="classifies; leave it out"):
        texts_of(CLASSIFIER, called([ids([[5]])], CLASSIFIER, parameters={"max_new_tokens": 3}))
    with pytest.raises(BadInputError, match="send an array of one object"):
        called([ids([[5]]), limits([3])], CLASSIFIER)
    wanted = [{"name": "output_ids", "parameters": {"classification": 2}}]
    with pytest.raises(BadInputError, match="leave `classification` out"):
        check_outputs(called([ids([[5]])], outputs=wanted), GENERATOR)
    with pytest.raises(BadInputError, match="not a raw body"):
        texts_of(GENERATOR, parse_infer(b"hello", 0, GENERATOR.input, ["output_ids"], 100))


def test_a_json_call_brings_a_text_and_its_wishes() -> None:
    said = read_text(GENERATOR, b'{"text": "ab", "max_new_tokens": 3, "ignore_eos": true}')
    assert said == Text([100, 101], 3, True)
    assert read_text(GENERATOR, b'{"text": "ab"}').limit == 6


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"hello", "not valid JSON"),
        (b'["hello"]', 'send an object with "text"'),
        (b'{"text": 5}', 'send an object with "text"'),
        (b'{"text": "a", "temperature": 1}', "unknown key 'temperature'"),
        (b'{"text": "a", "max_new_tokens": "3"}', "max_new_tokens is '3'; send an integer"),
        (b'{"text": "a", "max_new_tokens": true}', "max_new_tokens is True; send an integer"),
        (b'{"text": "a", "max_new_tokens": 7}', "send 1 to 6"),
        (b'{"text": "a", "ignore_eos": 1}', "ignore_eos is 1; send true or false"),
        (b'{"text": ""}', "0 tokens; send 1 to 8"),
        (b'{"text": "abcdefghi"}', "9 tokens; send 1 to 8"),
        (json.dumps({"text": "a" * 129}).encode(), "129 characters, over 128"),
    ],
)
def test_a_json_call_that_cannot_be_used_says_why(body: bytes, says: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_text(GENERATOR, body)
    assert says in str(caught.value)


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    with pytest.raises(BadInputError, match="send token ids"):
        read_text(CLASSIFIER, b'{"text": "a"}')


def test_padding_is_what_the_shorter_ones_lack() -> None:
    texts = [Text([3] * 2, 6), Text([3] * 5, 6), Text([3], 6)]
    assert tokens_of(texts, [None] * 3, None) == (8, 15)
    outputs = [Generated([4] * 6), Generated([4]), Generated([4] * 2)]
    assert tokens_of(texts, outputs, None) == (8 + 9, 15 + 18)
    assert tokens_of([Unfinished(), texts[0]], [outputs[0], Unfinished()], 1) == (2 + 2, 2 + 2)
    assert tokens_of(["pixels"], ["logits"], None) == (0, 0)


def test_a_folder_is_meant_only_where_a_slash_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("googlenet", "writer"):
        (tmp_path / name).mkdir()
    assert not is_text("googlenet")
    assert is_text("./writer")
    check_name("googlenet")
    with pytest.raises(SpecError, match=r"give \./writer"):
        check_name("writer")


def test_synthetic_texts_have_the_length_that_a_profile_asks_for() -> None:
    rng = np.random.default_rng(0)
    assert {len(text.tokens) for text in CLASSIFIER.synthetic_of_length(3, 5, rng)} == {5}
    assert {(text.limit, text.forced) for text in GENERATOR.synthetic_of_length(3, 5, rng)} == {(5, True)}
    assert GENERATOR.lengths == (1, 3, 4, 6)
    assert CLASSIFIER.lengths == (1, 4, 8)


def test_a_length_that_is_known_needs_no_guess_and_teaches_nothing() -> None:
    sizes = sizes_of(PROFILE, True, "online")
    forced = Text([5], 3, forced=True)
    for _ in range(20):
        sizes.observe(forced, Generated([1] * 3))
    assert sizes.of(forced) == pytest.approx(0.2 + 2 * 0.1)
    assert sizes.of(Text([5], 6)) == pytest.approx(0.7)
    assert sizes_of(PROFILE, False, "learned").of(Text([5] * 2)) == pytest.approx(0.3)


@pytest.mark.parametrize(("guess", "size"), [("limit", 0.7), ("online", 0.3), ("learned", 0.3)])
def test_a_length_that_is_not_known_is_guessed_from_the_texts_before(guess: Any, size: float) -> None:
    sizes = sizes_of(PROFILE, True, guess)
    for _ in range(300):
        sizes.observe(Text([5, 6], 6), Generated([9, 1]))
    assert sizes.of(Text([5, 6], 6)) == pytest.approx(size, abs=0.03)
