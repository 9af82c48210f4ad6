"""Text models by transformers: loading, and outputs in any batch that equal those of each sample alone."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.types import SpecError
from server.backends.executor import Batch
from server.errors import NotFiniteError
from server.models.texts.codec import ByteTokenizer
from server.models.texts.samples import DecodeState, GeneratedTokens, TextSample

pytest.importorskip("transformers", reason="the extra text is not installed")
from server.backends.loading import make_device
from server.backends.torch_texts import TextDevice
from server.models.sources import source_of
from server.models.texts.huggingface_source import load_text_model

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
    nets = {kind: load_text_model(kind, spec, "random", 8)[1] for kind, spec in specs.items()}
    return TextDevice(nets, torch.device("cpu"))


def random_samples(count: int, seed: int = 0, longest: int = 16) -> list[TextSample]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, (count, 2)).tolist()
    return [TextSample(rng.integers(2, 259, prompt).tolist(), limit, ignore_eos=True) for prompt, limit in lengths]


def serve_alone(device: TextDevice, model: str, samples: list[TextSample]) -> list[GeneratedTokens]:
    return [device.serve(Batch(model, [sample]))[0] for sample in samples]


@pytest.mark.parametrize("model", GENERATORS)
def test_a_batch_generates_the_same_as_each_sample_alone(device: TextDevice, model: str) -> None:
    samples = random_samples(7)
    together = device.serve(Batch(model, samples))
    assert together == serve_alone(device, model, samples)
    assert [len(output.tokens) for output in together] == [sample.max_new_tokens for sample in samples]
    assert len({tuple(output.tokens[:4]) for output in together}) > 4, (
        "outputs differ, so that exchanged rows would be detected"
    )


@pytest.mark.parametrize("model", GENERATORS)
def test_samples_can_join_and_leave_between_any_two_decode_steps(device: TextDevice, model: str) -> None:
    samples, rng = random_samples(9, seed=1), np.random.default_rng(5)
    waiting, running, done = list(range(9)), dict[int, Any](), dict[int, Any]()
    while waiting or running:
        joining = waiting[: int(rng.integers(0 if running else 1, 3))]
        batch = rng.permutation([*running, *joining]).tolist()[:5]  # rows beyond the batch stay suspended
        waiting = [index for index in waiting if index not in batch]
        outputs = device.serve(Batch(model, [running.pop(index, samples[index]) for index in batch], 0, 1))
        for index, output in zip(batch, outputs, strict=True):
            (done if isinstance(output, GeneratedTokens) else running)[index] = output
    assert [done[index] for index in range(9)] == serve_alone(device, model, samples)


@pytest.mark.parametrize("model", GENERATORS)
def test_a_decode_step_can_be_retried(device: TextDevice, model: str) -> None:
    samples = random_samples(3, seed=2)
    rows = device.serve(Batch(model, samples, 0, 1))
    assert all(isinstance(row, DecodeState) for row in rows)
    device.serve(Batch(model, rows, 1, 5))
    assert device.serve(Batch(model, rows, 1)) == serve_alone(device, model, samples)
    assert device.serve(Batch(model, rows[1:], 1)) == serve_alone(device, model, samples[1:])


def test_an_end_token_ends_an_output_unless_it_is_ignored(device: TextDevice) -> None:
    (sample,) = random_samples(1, seed=3)
    sample = TextSample(sample.tokens, 24, ignore_eos=True)
    net: Any = device._nets["gpt2"]
    (whole,) = serve_alone(device, "gpt2", [sample])
    net = replace(net, eos_token_ids=frozenset({whole.tokens[6]}))
    device = TextDevice({"gpt2": net}, torch.device("cpu"))
    end = [*whole.tokens].index(whole.tokens[6]) + 1
    ending = TextSample(sample.tokens, 24)
    outputs = device.serve(Batch("gpt2", [ending, sample]))
    assert [output.tokens for output in outputs] == [whole.tokens[:end], whole.tokens]
    assert isinstance(device.serve(Batch("gpt2", [ending], 0, end - 1))[0], DecodeState)
    assert isinstance(device.serve(Batch("gpt2", [ending], 0, end))[0], GeneratedTokens)


def test_padding_changes_no_logits(device: TextDevice) -> None:
    samples = random_samples(6, longest=60)
    together = np.stack(device.serve(Batch("bert", samples)))
    apart = np.stack([device.serve(Batch("bert", [sample]))[0] for sample in samples])
    assert together.dtype == np.float32
    assert np.abs(together - apart).max() < 1e-4 * np.abs(apart).max()  # float32 summed in another order
    assert np.abs(apart - apart[0]).max() > 0.1 * np.abs(apart).max()


def test_outputs_that_are_not_finite_raise(tmp_path: Path) -> None:
    _, net = load_text_model("m", str(folder_of(tmp_path / "m", "gpt2")), "random", 4)
    net.net.lm_head.weight[3] = float("nan")
    with pytest.raises(NotFiniteError):
        TextDevice({"m": net}, torch.device("cpu")).serve(Batch("m", random_samples(2)))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_folder_has_the_weights_that_were_saved_in_it(tmp_path: Path, kind: str) -> None:
    spec = folder_of(tmp_path / "first", kind)
    served, net = load_text_model("m", str(spec), "random", 4)
    module: Any = getattr(net, "net", net)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.mul_(1.25)
    module.save_pretrained(tmp_path / "saved")
    again, loaded = load_text_model("m", str(tmp_path / "saved"), "pretrained", 4)
    assert (served.weights, again.weights) == ("random", "saved")
    samples = random_samples(3)
    outputs = [TextDevice({"m": each}, torch.device("cpu")).serve(Batch("m", samples)) for each in (net, loaded)]
    if kind == "bert":
        assert np.array_equal(outputs[0], outputs[1])
        assert again.labels == ("bad", "so", "good")
    else:
        assert outputs[0] == outputs[1]
    assert again.codec.tokenizer is None, "the meaning of trained token ids is unknown"
    assert isinstance(served.codec.tokenizer, ByteTokenizer)


def test_a_configuration_has_no_pretrained_weights() -> None:
    with pytest.raises(SpecError, match="'text-classifier' has no weights"):
        load_text_model("m", "text-classifier", "pretrained", 4)
    assert load_text_model("m", "text-classifier", "auto", 4)[0].weights == "random"


def test_limits_follow_from_the_configuration(tmp_path: Path) -> None:
    causal = load_text_model("m", str(folder_of(tmp_path / "a", "gpt2")), "random", 4)[0].codec
    assert (causal.max_prompt_tokens, causal.max_new_tokens) == (48, 48), "which share 96 positions"
    bert = load_text_model("m", str(folder_of(tmp_path / "b", "bert") / "config.json"), "auto", 4)[0].codec
    assert (bert.max_prompt_tokens, bert.max_new_tokens, bert.vocab_size) == (64, 0, 260)


@pytest.mark.parametrize(
    ("kind", "changes", "weights", "message"),
    [
        ("gpt2", {}, "pretrained", "has no weights"),
        ("gpt2", {}, "auto", "has no weights"),
        ("gpt2", {"architectures": None}, "random", "architecture is ''"),
        ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "random", "GPT2DoubleHeadsModel"),
        ("bart", {}, "random", "is a bart"),
        ("nothing-known", {}, "random", "cannot be read"),
    ],
)
def test_an_unusable_folder_is_rejected_with_a_message_of_one_line(
    tmp_path: Path, kind: str, changes: dict[str, Any], weights: str, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load_text_model("m", str(folder_of(tmp_path / "m", kind, **changes)), weights, 4)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


TINY_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
NO_PADDING = {"pad_token_id": None}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]} | NO_PADDING, "no padding token"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]} | NO_PADDING, "no padding token"),
        ("bert", {"architectures": ["BertLMHeadModel"]}, "outputs of a BertLMHeadModel in a batch differ"),
        ("roberta", SMALL["bert"] | {"architectures": ["RobertaForSequenceClassification"]}, "out of bounds"),
        ("roberta", SMALL["bert"] | {"architectures": ["RobertaForCausalLM"], "is_decoder": True}, "a RobertaForCausa"),
        ("t5", TINY_T5 | {"architectures": ["T5ForSequenceClassification"]}, "does not generate"),
        (
            "mamba",
            {"architectures": ["MambaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2},
            "a MambaForCausa|a mamba cannot",  # by the version of transformers
        ),
        ("xlnet", {"architectures": ["XLNetLMHeadModel"], "d_model": 32, "n_layer": 2, "n_head": 2}, "a xlnet cannot"),
    ],
)
def test_a_network_with_wrong_outputs_in_a_batch_is_rejected_with_a_message_of_one_line(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        load_text_model("m", str(folder_of(tmp_path / "m", kind, **changes)), "random", 4)
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
def test_any_other_network_with_the_same_outputs_in_a_batch_is_served(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    served, _ = load_text_model("m", str(folder_of(tmp_path / "m", kind, **changes)), "random", 4)
    assert served.codec.generates


def test_a_classifier_that_searches_the_padding_token_finds_it(tmp_path: Path) -> None:
    changes = {"architectures": ["GPT2ForSequenceClassification"], "pad_token_id": 7}
    served, net = load_text_model("m", str(folder_of(tmp_path / "m", "gpt2", **changes)), "random", 4)
    device, samples = TextDevice({"m": net}, torch.device("cpu")), random_samples(6)
    apart = np.stack([device.serve(Batch("m", [sample]))[0] for sample in samples])
    assert np.abs(np.stack(device.serve(Batch("m", samples))) - apart).max() < 1e-4 * np.abs(apart).max()
    assert served.codec.pad_token_id == 7


def test_without_a_padding_token_in_the_configuration_no_id_is_padding(tmp_path: Path) -> None:
    assert (
        load_text_model("m", str(folder_of(tmp_path / "m", "gpt2", **NO_PADDING)), "random", 4)[0].codec.pad_token_id
        == -1
    )


def test_tokens_that_a_folder_suppresses_are_not_generated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path / "m", "gpt2")
    samples, (_, net) = random_samples(3, seed=3), load_text_model("m", str(folder), "random", 4)
    generated = serve_alone(TextDevice({"m": net}, torch.device("cpu")), "m", samples)
    frequent = sorted({token for output in generated for token in output.tokens})
    net.net.generation_config.update(suppress_tokens=frequent[:3], bad_words_ids=[[frequent[3]], [5, 6]])
    net.net.save_pretrained(tmp_path / "saved")
    _, net = load_text_model("m", str(tmp_path / "saved"), "auto", 4)
    generated = serve_alone(TextDevice({"m": net}, torch.device("cpu")), "m", samples)
    assert not {*frequent[:4]} & {token for output in generated for token in output.tokens}
    assert "may generate [5, 6]" in caplog.text


@pytest.mark.parametrize(("kind", "gone"), [("gpt2", "transformer.h.1.mlp.c_fc.weight"), ("bert", "classifier.bias")])
def test_incomplete_weights_are_rejected(tmp_path: Path, kind: str, gone: str) -> None:
    _, net = load_text_model("m", str(folder_of(tmp_path / "m", kind)), "random", 4)
    module: Any = getattr(net, "net", net)
    module.save_pretrained(tmp_path / "saved", state_dict={k: v for k, v in module.state_dict().items() if k != gone})
    with pytest.raises(SpecError, match=f"lack '{gone}' \\(1 of "):
        load_text_model("m", str(tmp_path / "saved"), "auto", 4)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    _, net = load_text_model("m", str(folder_of(tmp_path / "m", "gpt2", tie_word_embeddings=True)), "random", 4)
    net.net.save_pretrained(tmp_path / "saved")
    assert load_text_model("m", str(tmp_path / "saved"), "auto", 4)[0].weights == "saved"


def test_damaged_weights_are_rejected(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "gpt2")
    (folder / "model.safetensors").write_bytes(b"nothing of the sort")
    with pytest.raises(SpecError, match="cannot be loaded"):
        load_text_model("m", str(folder), "auto", 4)


def test_image_and_text_models_share_a_device() -> None:
    specs = {"image": "squeezenet1_1", "text": "text-classifier"}
    loaded = [source_of(spec).load(name, "random", 2, 1) for name, spec in specs.items()]
    device = make_device(loaded, torch.device("cpu"))
    (image, _), (text, _) = loaded
    assert image.name == "image"
    assert device.serve(Batch("image", [np.zeros((224, 224, 3), np.uint8)]))[0].shape == (1000,)
    assert device.serve(Batch("text", [TextSample([5, 6])]))[0].shape == (len(text.labels),)
