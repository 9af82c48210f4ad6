"""Text codec, token counts and predicted service times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.profile import Profile
from policies.types import SpecError
from server.api.open_inference.protocol import InferCall, parse_infer
from server.errors import BadInputError, TooLargeError
from server.models.images.torchvision_names import check_torchvision_name as check_name
from server.models.model import count_tokens
from server.models.texts.codec import ByteTokenizer, TextCodec
from server.models.texts.samples import DecodeState, GeneratedTokens, TextSample
from server.models.texts.size_predictor import make_size_predictor
from server.models.texts.spec import is_text

GENERATOR = TextCodec(vocab_size=259, max_prompt_tokens=8, max_new_tokens=6, pad_token_id=0, tokenizer=ByteTokenizer())
CLASSIFIER = TextCodec(vocab_size=259, max_prompt_tokens=8, max_new_tokens=0, pad_token_id=0, tokenizer=None)
PROFILE = Profile("p", (0.4, 0.5), lengths=(1, 6), length_service_times=((0.2, 0.7), (0.3, 0.8)))


def parse_call(inputs: list[dict[str, Any]], codec: TextCodec = GENERATOR, **fields: Any) -> InferCall:
    body = json.dumps({"inputs": inputs, **fields}).encode()
    return parse_infer(body, None, codec.signature(2), 100)


def ids(rows: list[list[int]], datatype: str = "INT64") -> dict[str, Any]:
    return {"name": "input_ids", "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": rows}


def limits(numbers: list[int]) -> dict[str, Any]:
    return {"name": "max_new_tokens", "datatype": "INT32", "shape": [len(numbers)], "data": numbers}


def read_samples(codec: TextCodec, call: InferCall) -> list[TextSample]:
    return codec.from_tensors(call.tensors, call.parameters).read()


def read_body(codec: TextCodec, body: bytes) -> TextSample:
    (sample,) = codec.from_body(body, "").read()
    assert isinstance(sample, TextSample)
    return sample


@pytest.mark.parametrize("text", ["hello", "Grüße, 世界", ""])
def test_the_byte_tokenizer_decodes_what_it_encoded(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert all(3 <= token < ByteTokenizer.vocab_size for token in ids)
    assert ByteTokenizer().decode([0, *ids, 1]) == text


def test_padding_at_the_end_of_a_row_is_stripped() -> None:
    samples = read_samples(GENERATOR, parse_call([ids([[5, 6, 0, 0], [7, 0, 8, 9]])]))
    assert samples == [TextSample([5, 6], 6), TextSample([7, 0, 8, 9], 6)]


def test_without_a_padding_token_every_id_is_kept() -> None:
    codec = replace(GENERATOR, pad_token_id=-1)
    assert read_samples(codec, parse_call([ids([[5, 0, 0], [6, 0, -1]])], codec)) == [
        TextSample([5, 0, 0], 6),
        TextSample([6, 0], 6),
    ]
    assert codec.pad_rows([[5, 0], [6]]).tolist() == [[5, 0], [6, -1]]
    assert codec.metadata_parameters()["pad_token_id"] == -1


def test_a_row_that_is_too_long_is_rejected_before_it_is_converted() -> None:
    class Unconvertible(np.ndarray[Any, Any]):
        def tolist(self) -> Any:
            raise AssertionError("the row is converted to a list")

    row = np.full(10_000, 5, np.int64).view(Unconvertible)
    with pytest.raises(BadInputError, match="10000 tokens; send 1 to 8"):
        GENERATOR.strip_padding(row)


def test_a_body_larger_than_any_text_within_the_limits_is_rejected_before_it_is_parsed() -> None:
    longest = json.dumps({"text": "\U0001d11e" * 128, "max_new_tokens": 3, "ignore_eos": True}).encode()
    with pytest.raises(BadInputError, match="512 tokens"):  # four tokens per character, but within the limit of bytes
        read_body(GENERATOR, longest)
    with pytest.raises(TooLargeError, match="over 2560; send a shorter text") as caught:
        read_body(GENERATOR, b'{"text":[' + b"[]," * 1000)
    assert caught.value.status == 413


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
def test_each_sample_has_its_own_limit_and_may_ignore_the_end_token(datatype: str) -> None:
    call = parse_call([ids([[5], [6]], datatype), limits([2, 3])], parameters={"ignore_eos": True})
    assert read_samples(GENERATOR, call) == [TextSample([5], 2, True), TextSample([6], 3, True)]


def test_limits_may_come_before_the_ids_and_in_binary() -> None:
    inputs: list[dict[str, Any]] = [limits([4, 5]), ids([[5, 7], [6, 8]])]
    blobs = [np.array([4, 5], "<i4").tobytes(), np.array([[5, 7], [6, 8]], "<i8").tobytes()]
    for entry, blob in zip(inputs, blobs, strict=True):
        del entry["data"]
        entry["parameters"] = {"binary_data_size": len(blob)}
    document = json.dumps({"inputs": inputs}).encode()
    call = parse_infer(document + b"".join(blobs), len(document), GENERATOR.signature(0), 100)
    assert read_samples(GENERATOR, call) == [TextSample([5, 7], 4), TextSample([6, 8], 5)]
    inputs[0]["parameters"]["binary_data_size"] += 1
    document = json.dumps({"inputs": inputs}).encode()
    with pytest.raises(BadInputError, match="41 but 40 bytes follow"):
        parse_infer(document + b"".join(blobs), len(document), GENERATOR.signature(0), 100)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([ids([[5, 259]])], "token id 259 is outside the vocabulary; send 0 to 258"),
        ([ids([[-1]])], "token id -1"),
        ([ids([[0, 0]])], "0 tokens; send 1 to 8"),
        ([ids([[5] * 9])], "9 tokens; send 1 to 8"),
        ([ids([[5]]), limits([7])], "max_new_tokens is 7; send 1 to 6"),
        ([ids([[5]]), limits([0])], "max_new_tokens is 0; send 1 to 6"),
        ([ids([[5]]), limits([1, 1])], "input max_new_tokens has 2 samples, input_ids has 1"),
        ([limits([1])], "no input_ids"),
        ([ids([[5]]), ids([[5]])], "the input's name is 'input_ids'"),
        ([ids([[5]]) | {"shape": [1, 0], "data": []}], "the shape is [1, 0]"),
        ([ids([[5]]) | {"shape": [1], "data": [5]}], "the shape is [1]"),
        ([ids([[5]]) | {"datatype": "FP32"}], "the datatype is 'FP32'"),
    ],
)
def test_an_input_out_of_bounds_is_rejected_with_the_bounds(inputs: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_samples(GENERATOR, parse_call(inputs))
    assert message in str(caught.value)


def test_only_a_generator_has_limits_and_only_a_classifier_classes() -> None:
    with pytest.raises(BadInputError, match="is a classifier; leave it out"):
        read_samples(CLASSIFIER, parse_call([ids([[5]])], CLASSIFIER, parameters={"max_new_tokens": 3}))
    with pytest.raises(BadInputError, match="send an array of objects"):
        parse_call([ids([[5]]), limits([3])], CLASSIFIER)
    wanted = [{"name": "output_ids", "parameters": {"classification": 2}}]
    with pytest.raises(BadInputError, match="leave `classification` out"):
        parse_call([ids([[5]])], outputs=wanted)
    with pytest.raises(BadInputError, match="not a raw body"):
        read_samples(GENERATOR, parse_infer(b"hello", 0, GENERATOR.signature(0), 100))


def test_a_json_body_has_a_text_and_its_parameters() -> None:
    sample = read_body(GENERATOR, b'{"text": "ab", "max_new_tokens": 3, "ignore_eos": true}')
    assert sample == TextSample([100, 101], 3, True)
    assert read_body(GENERATOR, b'{"text": "ab"}').max_new_tokens == 6


@pytest.mark.parametrize(
    ("body", "message"),
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
def test_a_malformed_json_body_is_bad_input(body: bytes, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_body(GENERATOR, body)
    assert message in str(caught.value)


def test_without_a_tokenizer_only_token_ids_are_accepted() -> None:
    with pytest.raises(BadInputError, match="send token ids"):
        read_body(CLASSIFIER, b'{"text": "a"}')


def test_padding_is_the_difference_to_the_longest_row() -> None:
    samples = [TextSample([3] * 2, 6), TextSample([3] * 5, 6), TextSample([3], 6)]
    assert count_tokens(samples, [None] * 3, None) == (8, 15)
    outputs = [GeneratedTokens([4] * 6), GeneratedTokens([4]), GeneratedTokens([4] * 2)]
    assert count_tokens(samples, outputs, None) == (8 + 9, 15 + 18)
    assert count_tokens([DecodeState(), samples[0]], [outputs[0], DecodeState()], 1) == (2 + 2, 2 + 2)
    assert count_tokens(["pixels"], ["logits"], None) == (0, 0)


def test_a_spec_is_a_folder_only_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("googlenet", "writer"):
        (tmp_path / name).mkdir()
    assert not is_text("googlenet")
    assert is_text("./writer")
    check_name("googlenet")
    with pytest.raises(SpecError, match=r"give \./writer"):
        check_name("writer")


def test_synthetic_samples_have_the_requested_length() -> None:
    rng = np.random.default_rng(0)
    assert {len(sample.tokens) for sample in CLASSIFIER.synthetic_samples(3, rng, 5)} == {5}
    generated = GENERATOR.synthetic_samples(3, rng, 5)
    assert {(sample.max_new_tokens, sample.ignore_eos) for sample in generated} == {(5, True)}
    assert GENERATOR.lengths == (1, 3, 4, 6)
    assert CLASSIFIER.lengths == (1, 4, 8)


def test_a_known_length_is_used_and_not_learned_from() -> None:
    predictor = make_size_predictor(PROFILE, True, "online")
    known = TextSample([5], 3, ignore_eos=True)
    for _ in range(20):
        predictor.observe(known, GeneratedTokens([1] * 3))
    assert predictor.predict(known) == pytest.approx(0.2 + 2 * 0.1)
    assert predictor.predict(TextSample([5], 6)) == pytest.approx(0.7)
    assert make_size_predictor(PROFILE, False, "learned").predict(TextSample([5] * 2)) == pytest.approx(0.3)


@pytest.mark.parametrize(("guess", "size"), [("limit", 0.7), ("online", 0.3), ("learned", 0.3)])
def test_an_unknown_length_is_predicted_from_earlier_samples(guess: Any, size: float) -> None:
    predictor = make_size_predictor(PROFILE, True, guess)
    for _ in range(300):
        predictor.observe(TextSample([5, 6], 6), GeneratedTokens([9, 1]))
    assert predictor.predict(TextSample([5, 6], 6)) == pytest.approx(size, abs=0.03)
