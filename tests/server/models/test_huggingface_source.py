"""Text models by transformers: a batch answers as its texts alone do, whoever joins or leaves; and what is loaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.types import SpecError
from server.backends.executor import Batch
from server.errors import NotFiniteError
from server.models.text import Generated, Text, Unfinished
from server.models.text_codec import ByteTokenizer

pytest.importorskip("transformers", reason="the extra text is not installed")
from server.backends.loading import device_of
from server.backends.torch_texts import TextDevice
from server.models.huggingface_source import load

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96}
    | {"initializer_range": 0.3, "tie_word_embeddings": False},
    "llama": {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    | {"max_position_embeddings": 96},
    "marian": {"architectures": ["MarianMTModel"], "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
    | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    | {"max_position_embeddings": 64, "decoder_start_token_id": 0, "init_std": 0.5, "scale_embedding": True},
    "bert": {"architectures": ["BertForSequenceClassification"], "num_hidden_layers": 2, "hidden_size": 32}
    | {"intermediate_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3}
    | {"id2label": {"0": "bad", "1": "so", "2": "good"}, "label2id": {"bad": 0, "so": 1, "good": 2}},
}
GENERATORS = ("gpt2", "llama", "marian", "translator")


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def folder_of(where: Path, kind: str, **changes: Any) -> Path:
    where.mkdir(exist_ok=True)
    config = {"model_type": kind, "vocab_size": 260, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    (where / "config.json").write_text(json.dumps(config | SMALL.get(kind, {}) | changes))
    return where


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> TextDevice:
    specs = {kind: str(folder_of(tmp_path_factory.mktemp(kind), kind)) for kind in SMALL} | {"translator": "translator"}
    nets = {kind: load(kind, spec, "random", 8)[1] for kind, spec in specs.items()}
    return TextDevice(nets, torch.device("cpu"))


def texts(count: int, seed: int = 0, longest: int = 24) -> list[Text]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, (count, 2)).tolist()
    return [Text(rng.integers(2, 259, prompt).tolist(), limit, forced=True) for prompt, limit in lengths]


def alone(device: TextDevice, model: str, asked: list[Text]) -> list[Generated]:
    return [device.serve(Batch(model, [text]))[0] for text in asked]


@pytest.mark.parametrize("model", GENERATORS)
def test_a_batch_generates_what_each_of_its_texts_does_alone(device: TextDevice, model: str) -> None:
    asked = texts(7)
    together = device.serve(Batch(model, asked))
    assert together == alone(device, model, asked)
    assert [len(output.tokens) for output in together] == [text.limit for text in asked]
    assert len({tuple(output.tokens[:4]) for output in together}) > 4, "so that a mixed-up row would show"


@pytest.mark.parametrize("model", GENERATORS)
def test_texts_may_join_and_leave_between_any_two_iterations(device: TextDevice, model: str) -> None:
    asked, rng = texts(9, seed=1), np.random.default_rng(5)
    waiting, here, done = list(range(9)), dict[int, Any](), dict[int, Any]()
    while waiting or here:
        newcomers = waiting[: int(rng.integers(0 if here else 1, 3))]
        batch = rng.permutation([*here, *newcomers]).tolist()[:5]  # who finds no place stays as they are
        waiting = [index for index in waiting if index not in batch]
        outputs = device.serve(Batch(model, [here.pop(index, asked[index]) for index in batch], 0, 1))
        for index, output in zip(batch, outputs, strict=True):
            (done if isinstance(output, Generated) else here)[index] = output
    assert [done[index] for index in range(9)] == alone(device, model, asked)


@pytest.mark.parametrize("model", GENERATORS)
def test_an_iteration_that_failed_can_be_run_again(device: TextDevice, model: str) -> None:
    asked = texts(3, seed=2)
    rows = device.serve(Batch(model, asked, 0, 1))
    assert all(isinstance(row, Unfinished) for row in rows)
    device.serve(Batch(model, rows, 1, 5))
    assert device.serve(Batch(model, rows, 1)) == alone(device, model, asked)
    assert device.serve(Batch(model, rows[1:], 1)) == alone(device, model, asked[1:])


def test_the_end_token_ends_a_text_unless_it_is_forced(device: TextDevice) -> None:
    (text,) = texts(1, seed=3)
    text = Text(text.tokens, 24, forced=True)
    net = device._nets["gpt2"]
    (whole,) = alone(device, "gpt2", [text])
    device = TextDevice({"gpt2": type(net)(net.net, frozenset({whole.tokens[6]}), net.start)}, torch.device("cpu"))
    end = [*whole.tokens].index(whole.tokens[6]) + 1
    free = Text(text.tokens, 24)
    outputs = device.serve(Batch("gpt2", [free, text]))
    assert [output.tokens for output in outputs] == [whole.tokens[:end], whole.tokens]
    assert isinstance(device.serve(Batch("gpt2", [free], 0, end - 1))[0], Unfinished)
    assert isinstance(device.serve(Batch("gpt2", [free], 0, end))[0], Generated)


def test_padding_changes_no_class(device: TextDevice) -> None:
    asked = texts(6, longest=60)
    together = np.stack(device.serve(Batch("bert", asked)))
    apart = np.stack([device.serve(Batch("bert", [text]))[0] for text in asked])
    assert together.dtype == np.float32
    assert np.abs(together - apart).max() < 1e-4 * np.abs(apart).max()  # float32 summed in another order
    assert np.abs(apart - apart[0]).max() > 0.1 * np.abs(apart).max()


def test_outputs_that_are_not_finite_are_no_answer(tmp_path: Path) -> None:
    _, net = load("m", str(folder_of(tmp_path / "m", "gpt2")), "random", 4)
    net.net.lm_head.weight[3] = float("nan")
    with pytest.raises(NotFiniteError):
        TextDevice({"m": net}, torch.device("cpu")).serve(Batch("m", texts(2)))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_folder_gives_the_weights_that_were_saved_in_it(tmp_path: Path, kind: str) -> None:
    spec = folder_of(tmp_path / "first", kind)
    served, net = load("m", str(spec), "random", 4)
    module: Any = getattr(net, "net", net)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.mul_(1.25)
    module.save_pretrained(tmp_path / "saved")
    again, loaded = load("m", str(tmp_path / "saved"), "auto", 4)
    assert (served.weights, again.weights) == ("random", "saved")
    asked = texts(3)
    outputs = [TextDevice({"m": each}, torch.device("cpu")).serve(Batch("m", asked)) for each in (net, loaded)]
    if kind == "bert":
        assert np.array_equal(outputs[0], outputs[1])
        assert again.labels == ("bad", "so", "good")
    else:
        assert outputs[0] == outputs[1]
    assert again.codec.tokenizer is None, "its words mean something, but nobody knows what"
    assert isinstance(served.codec.tokenizer, ByteTokenizer)


def test_bounds_follow_from_the_configuration(tmp_path: Path) -> None:
    causal = load("m", str(folder_of(tmp_path / "a", "gpt2")), "random", 4)[0].codec
    assert (causal.most_tokens, causal.most_new_tokens) == (48, 48), "which share 96 positions"
    bert = load("m", str(folder_of(tmp_path / "b", "bert") / "config.json"), "auto", 4)[0].codec
    assert (bert.most_tokens, bert.most_new_tokens, bert.vocabulary) == (64, 0, 260)


@pytest.mark.parametrize(
    ("kind", "changes", "weights", "says"),
    [
        ("gpt2", {}, "auto", "holds no weights"),
        ("gpt2", {"architectures": None}, "random", "architecture is ''"),
        ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "random", "GPT2DoubleHeadsModel"),
        ("bart", {}, "random", "is a bart"),
        ("nothing-known", {}, "random", "cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why_in_one_line(
    tmp_path: Path, kind: str, changes: dict[str, Any], weights: str, says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load("m", str(folder_of(tmp_path / "m", kind, **changes)), weights, 4)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


TINY_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
NO_PADDING = {"pad_token_id": None}


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]} | NO_PADDING, "no padding token"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]} | NO_PADDING, "no padding token"),
        ("bert", {"architectures": ["BertLMHeadModel"]}, "a BertLMHeadModel answers otherwise in a batch"),
        ("roberta", SMALL["bert"] | {"architectures": ["RobertaForSequenceClassification"]}, "out of bounds"),
        ("roberta", SMALL["bert"] | {"architectures": ["RobertaForCausalLM"], "is_decoder": True}, "a RobertaForCausa"),
        ("t5", TINY_T5 | {"architectures": ["T5ForSequenceClassification"]}, "does not generate"),
        (
            "mamba",
            {"architectures": ["MambaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2},
            "a MambaForCausa",
        ),
        ("xlnet", {"architectures": ["XLNetLMHeadModel"], "d_model": 32, "n_layer": 2, "n_head": 2}, "a xlnet cannot"),
    ],
)
def test_a_network_that_would_answer_nonsense_is_refused_in_one_line(
    tmp_path: Path, kind: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load("m", str(folder_of(tmp_path / "m", kind, **changes)), "random", 4)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", SMALL["llama"] | {"architectures": ["MistralForCausalLM"], "sliding_window": 8}),
        ("opt", {"architectures": ["OPTForCausalLM"], "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2}
         | {"num_attention_heads": 2, "word_embed_proj_dim": 32, "max_position_embeddings": 96, "init_std": 0.3}),
        ("t5", TINY_T5 | {"architectures": ["T5ForConditionalGeneration"]}),
    ],
)  # fmt: skip
def test_one_that_answers_as_by_itself_is_served_though_nobody_named_it(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    served, _ = load("m", str(folder_of(tmp_path / "m", kind, **changes)), "random", 4)
    assert served.codec.generates


def test_a_classifier_that_looks_for_its_padding_finds_it(tmp_path: Path) -> None:
    changes = {"architectures": ["GPT2ForSequenceClassification"], "pad_token_id": 7}
    served, net = load("m", str(folder_of(tmp_path / "m", "gpt2", **changes)), "random", 4)
    device, asked = TextDevice({"m": net}, torch.device("cpu")), texts(6)
    apart = np.stack([device.serve(Batch("m", [text]))[0] for text in asked])
    assert np.abs(np.stack(device.serve(Batch("m", asked))) - apart).max() < 1e-4 * np.abs(apart).max()
    assert served.codec.pad == 7


def test_where_the_configuration_names_no_padding_no_token_is_taken_for_it(tmp_path: Path) -> None:
    assert load("m", str(folder_of(tmp_path / "m", "gpt2", **NO_PADDING)), "random", 4)[0].codec.pad == -1


def test_tokens_that_a_folder_forbids_are_not_generated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path / "m", "gpt2")
    asked, (_, net) = texts(3, seed=3), load("m", str(folder), "random", 4)
    spoken = alone(TextDevice({"m": net}, torch.device("cpu")), "m", asked)
    often = sorted({token for output in spoken for token in output.tokens})
    net.net.generation_config.update(suppress_tokens=often[:3], bad_words_ids=[[often[3]], [5, 6]])
    net.net.save_pretrained(tmp_path / "saved")
    _, net = load("m", str(tmp_path / "saved"), "auto", 4)
    spoken = alone(TextDevice({"m": net}, torch.device("cpu")), "m", asked)
    assert not {*often[:4]} & {token for output in spoken for token in output.tokens}
    assert "may generate [5, 6]" in caplog.text


@pytest.mark.parametrize(("kind", "gone"), [("gpt2", "transformer.h.1.mlp.c_fc.weight"), ("bert", "classifier.bias")])
def test_weights_that_lack_some_are_refused_not_made_up(tmp_path: Path, kind: str, gone: str) -> None:
    _, net = load("m", str(folder_of(tmp_path / "m", kind)), "random", 4)
    module: Any = getattr(net, "net", net)
    module.save_pretrained(tmp_path / "saved", state_dict={k: v for k, v in module.state_dict().items() if k != gone})
    with pytest.raises(SpecError, match=f"lack '{gone}' \\(1 of "):
        load("m", str(tmp_path / "saved"), "auto", 4)


def test_tied_weights_are_not_missed(tmp_path: Path) -> None:
    _, net = load("m", str(folder_of(tmp_path / "m", "gpt2", tie_word_embeddings=True)), "random", 4)
    net.net.save_pretrained(tmp_path / "saved")
    assert load("m", str(tmp_path / "saved"), "auto", 4)[0].weights == "saved"


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "gpt2")
    (folder / "model.safetensors").write_bytes(b"nothing of the sort")
    with pytest.raises(SpecError, match="cannot be loaded"):
        load("m", str(folder), "auto", 4)


def test_pictures_and_texts_share_a_device() -> None:
    from server.backends.loading import load as load_all

    loaded = load_all({"net": "resnet18", "words": "text-classifier"}, "random", {"net": 2, "words": 2})
    device = device_of(loaded, torch.device("cpu"))
    (picture, _), (words, _) = loaded
    assert picture.name == "net"
    assert device.serve(Batch("net", [np.zeros((224, 224, 3), np.uint8)]))[0].shape == (1000,)
    assert device.serve(Batch("words", [Text([5, 6])]))[0].shape == (len(words.labels),)
