"""Hugging Face's text models: classifiers, translators and generators, from a local folder or a configuration.

Imported only when a text model is asked for: transformers is an extra, and takes seconds. No hub is ever asked.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from policies.types import SpecError
from server.models.huggingface_check import check_answers
from server.models.model import ServedModel
from server.models.text_codec import ByteTokenizer, TextCodec, Tokenizer
from server.models.text_networks import Generator, RowPositions, TextNet
from server.models.text_sources import config_file
from server.models.torchvision_source import torchvision_models

torchvision_models()  # transformers imports torchvision, which cannot be on every torch before this
import transformers  # noqa: E402
from transformers import AutoConfig, AutoTokenizer  # noqa: E402

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
_log = logging.getLogger(__name__)

_SEED = 20_260_121
_MOST_TOKENS = 512  # of a prompt
_MOST_NEW_TOKENS = 256
_RELATIVE, _MARIAN = ("t5", "mt5", "umt5"), "marian"  # a token's place: relative to others, or in the text
_TRANSLATES = ("ForConditionalGeneration", "WithLMHeadModel", "MTModel")
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model", "*.spm")
_SHARED = {
    "vocab_size": ByteTokenizer.vocabulary,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}
# Four layers of 256 take milliseconds on one core. Weights are drawn wide enough for answers to differ, and heads are
# not tied to embeddings: a network that has learned nothing would repeat its last token for ever.
_SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "text-classifier": (
        "bert",
        {
            "architectures": ["BertForSequenceClassification"],
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_attention_heads": 4,
            "initializer_range": 0.15,
        },
    ),
    "translator": (
        "t5",
        {
            "architectures": ["T5ForConditionalGeneration"],
            "num_layers": 4,
            "d_model": 256,
            "d_ff": 1024,
            "num_heads": 4,
            "initializer_factor": 0.3,
            "decoder_start_token_id": 0,
        },
    ),
    "text-generator": (
        "gpt2",
        {
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": 4,
            "n_embd": 256,
            "n_head": 4,
            "initializer_range": 0.15,
        },
    ),
}


def load(name: str, spec: str, weights: str, max_batch_size: int) -> tuple[ServedModel[TextCodec], TextNet]:
    """A text model in eval mode, float32 on the CPU.

    Args:
        name: as in URLs.
        spec: one of `SMALL`, a folder as transformers saves it, or a configuration file.
        weights: "auto" takes the folder's, and random ones where there is only a configuration; "random".
        max_batch_size: what the served model announces.

    Raises:
        SpecError: the folder does not hold what is needed, or its network does not answer here as it does by itself.
    """
    config = _config(name, spec)
    kind = _kind(name, config)
    try:
        return _tried(name, spec, (kind, config), weights, max_batch_size)
    except SpecError:
        raise
    except Exception as error:  # whatever an unknown network raises that is built, or given texts of any length
        raise SpecError(
            f"{name}: a {config.model_type} cannot be served from {spec!r} ({_line(error)}); "
            "docs/texts.md says which networks can be, or mend the configuration"
        ) from error


def _tried(
    name: str, spec: str, shape: tuple[str, Any], weights: str, max_batch_size: int
) -> tuple[ServedModel[TextCodec], TextNet]:
    kind, config = shape
    random = weights == "random" or not Path(spec).is_dir()
    net = _random(kind, config) if random else _stored(name, kind, spec)
    net.eval().requires_grad_(False)
    if random and weights != "random":
        _log.warning("%s runs with RANDOM weights: what it says means nothing; give a folder with weights", name)
    codec = _codec(kind, config, _tokenizer(name, spec, config, random))
    labels = tuple(str(config.id2label[i]) for i in range(config.num_labels)) if not codec.generates else ()
    origin = "random" if random else Path(spec).resolve().name
    network = _net(name, net, codec)
    check_answers(name, codec, network)
    return ServedModel(name, codec, labels, origin, max_batch_size), network


def _config(name: str, spec: str) -> Any:
    if spec in _SMALL:
        kind, shape = _SMALL[spec]
        config = AutoConfig.for_model(kind, **_SHARED, **shape)
        config.tie_word_embeddings = False  # which T5's overrules
        return config
    try:
        return AutoConfig.from_pretrained(config_file(spec), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged configuration makes transformers raise
        raise SpecError(f"{name}: {str(config_file(spec))!r} cannot be read ({_line(error)}); mend it") from error


def _kind(name: str, config: Any) -> str:
    """Which of transformers' automatic classes builds the network."""
    architecture = next(iter(config.architectures or ()), "")
    if config.is_encoder_decoder:
        if config.model_type not in (*_RELATIVE, _MARIAN):
            known = ", ".join((*_RELATIVE, _MARIAN))
            raise SpecError(f"{name} is a {config.model_type}; of encoders with a decoder there is {known}")
        if architecture and not architecture.endswith(_TRANSLATES):
            raise SpecError(f"{name}: {architecture!r} does not generate; give one that ends in {_TRANSLATES[0]}")
        return "AutoModelForSeq2SeqLM"
    if architecture.endswith("ForSequenceClassification"):
        return "AutoModelForSequenceClassification"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "AutoModelForCausalLM"
    raise SpecError(
        f"{name}: the configuration's architecture is {architecture!r}; give one that ends in "
        "ForSequenceClassification, ForCausalLM or LMHeadModel, or an encoder with a decoder"
    )


def _random(kind: str, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):  # every start draws the same weights, and nobody else's numbers change
        torch.manual_seed(_SEED)
        return getattr(transformers, kind).from_config(config)


def _stored(name: str, kind: str, folder: str) -> Any:
    if not _holds(folder, _WEIGHTS):
        raise SpecError(f"{name}: {folder!r} holds no weights ({' or '.join(_WEIGHTS)}); add them or --weights random")
    where = {"local_files_only": True, "trust_remote_code": False}
    try:
        net, found = getattr(transformers, kind).from_pretrained(
            folder, **where, weights_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # whatever damaged weights make transformers raise
        raise SpecError(f"{name}: the weights of {folder!r} cannot be loaded ({_line(error)})") from error
    missing = sorted(found["missing_keys"])
    if missing:
        lack = f"lack {missing[0]!r} ({len(missing)} of {len(net.state_dict())})"
        raise SpecError(f"{name}: the weights of {folder!r} {lack}; save the whole {type(net).__name__}")
    return net


def _tokenizer(name: str, spec: str, config: Any, random: bool) -> Tokenizer | None:
    """The folder's; bytes where there is none and the words mean nothing anyway."""
    if Path(spec).is_dir() and _holds(spec, _TOKENIZERS):
        try:
            return _Words(AutoTokenizer.from_pretrained(spec, local_files_only=True, trust_remote_code=False))
        except Exception as error:  # a missing package too: some tokenizers need sentencepiece
            raise SpecError(f"{name}: the tokenizer of {spec!r} cannot be loaded ({_line(error)})") from error
    fits = config.vocab_size >= ByteTokenizer.vocabulary
    return ByteTokenizer() if random and fits else None


class _Words:
    """Transformers' tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        return ids

    def decode(self, tokens: Any) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _codec(kind: str, config: Any, tokenizer: Tokenizer | None) -> TextCodec:
    """Bounds: a causal model's positions are shared by what comes in and what goes out."""
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 10**9
    share = positions // 2 if kind == "AutoModelForCausalLM" else positions
    return TextCodec(
        vocabulary=config.vocab_size,
        most_tokens=min(share, _MOST_TOKENS),
        most_new_tokens=0 if kind == "AutoModelForSequenceClassification" else min(share, _MOST_NEW_TOKENS),
        pad=-1 if config.pad_token_id is None else config.pad_token_id,
        tokenizer=tokenizer,
    )


def _net(name: str, net: Any, codec: TextCodec) -> TextNet:
    if not codec.generates:
        return net
    wishes = net.generation_config
    ends, never = wishes.eos_token_id, {*(wishes.suppress_tokens or ())}
    for words in wishes.bad_words_ids or ():
        never.update(words if len(words) == 1 else ())
        if len(words) > 1:
            _log.warning("%s may generate %s: only single tokens are kept from being generated", name, words)
    start = net.config.decoder_start_token_id if net.config.is_encoder_decoder else None
    positions = None
    if net.config.model_type == _MARIAN:
        decoder = net.get_decoder()
        decoder.embed_positions = positions = RowPositions(decoder.embed_positions)
    return Generator(net, frozenset([ends] if isinstance(ends, int) else ends or ()), start, positions, sorted(never))


def _holds(folder: str, patterns: tuple[str, ...]) -> bool:
    return any(next(Path(folder).glob(pattern), None) for pattern in patterns)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
