"""Text models by transformers: classifiers, translators and generators, from a local folder or a configuration.

Imported only for a text model, since transformers is an extra and takes seconds to import. Nothing is downloaded.
"""

import logging
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from policies.types import SpecError
from server.errors import one_line
from server.models.images.torchvision_source import import_torchvision_models
from server.models.model import ServedModel
from server.models.texts.batch_check import check_batching
from server.models.texts.codec import ByteTokenizer, TextCodec, Tokenizer
from server.models.texts.networks import GenerativeNet, RowPositions, TextNet
from server.models.texts.spec import config_file

import_torchvision_models()  # transformers imports torchvision, which on some builds fails without this
import transformers  # noqa: E402
from transformers import AutoConfig, AutoTokenizer  # noqa: E402

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
_log = logging.getLogger(__name__)

_SEED = 20_260_121
_MAX_PROMPT_TOKENS = 512
_MAX_NEW_TOKENS = 256
_MARIAN = "marian"
_ENCODER_DECODERS = ("t5", "mt5", "umt5", _MARIAN)  # T5's positions are relative, Marian's absolute
_GENERATES = ("ForConditionalGeneration", "WithLMHeadModel", "MTModel")  # suffixes of architectures
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model", "*.spm")
_COMMON = {
    "vocab_size": ByteTokenizer.vocab_size,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}
# Four layers of width 256 take milliseconds on one core. Random weights have a standard deviation large enough for
# outputs to differ. Heads are not tied to embeddings: with random weights that would repeat the last token.
_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
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


def load_text_model(name: str, spec: str, weights: str, max_batch_size: int) -> tuple[ServedModel[TextCodec], TextNet]:
    """Load a text model in eval mode, float32, on the CPU.

    Args:
        name: name in URLs.
        spec: a key of `text_model_spec.BUILT_IN`, a folder as transformers saves it, or a configuration file.
        weights: "pretrained" (the folder's), "auto" (likewise; random with only a configuration) or "random".
        max_batch_size: of the served model.

    Raises:
        SpecError: the folder is incomplete, or the network's outputs differ in a batch.
    """
    config = _load_config(name, spec)
    auto_class = _auto_class(name, config)
    random = weights == "random" or (weights == "auto" and not Path(spec).is_dir())
    try:
        net = _random_net(auto_class, config) if random else _stored_net(name, auto_class, spec)
        net.eval().requires_grad_(False)
        if random and weights != "random":
            _log.warning("%s runs with RANDOM weights: its outputs mean nothing; give a folder with weights", name)
        codec = _make_codec(auto_class, config, _load_tokenizer(name, spec, config, random))
        labels = () if codec.generates else tuple(str(config.id2label[i]) for i in range(config.num_labels))
        text_net = _make_text_net(name, net, codec)
        check_batching(name, codec, text_net)
    except SpecError:
        raise
    except Exception as error:  # building an unknown network, or running it on any length, may raise anything
        raise SpecError(
            f"{name}: a {config.model_type} cannot be served from {spec!r} ({one_line(error)}); "
            "docs/texts.md lists the networks that can be served, or correct the configuration"
        ) from error
    origin = "random" if random else Path(spec).resolve().name
    return ServedModel(name, codec, labels, origin, max_batch_size), text_net


def _load_config(name: str, spec: str) -> Any:
    if spec in _BUILT_IN:
        model_type, shape = _BUILT_IN[spec]
        config = AutoConfig.for_model(model_type, **_COMMON, **shape)
        config.tie_word_embeddings = False  # T5's configuration overrides the argument
        return config
    try:
        return AutoConfig.from_pretrained(config_file(spec), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything on a damaged configuration
        raise SpecError(f"{name}: {str(config_file(spec))!r} cannot be read ({one_line(error)}); correct it") from error


def _auto_class(name: str, config: Any) -> str:
    """The transformers class that builds the network."""
    architecture = next(iter(config.architectures or ()), "")
    if config.is_encoder_decoder:
        if config.model_type not in _ENCODER_DECODERS:
            known = ", ".join(_ENCODER_DECODERS)
            raise SpecError(f"{name} is a {config.model_type}; of the encoder-decoder models give {known}")
        if architecture and not architecture.endswith(_GENERATES):
            raise SpecError(f"{name}: {architecture!r} does not generate; give one that ends in {_GENERATES[0]}")
        return "AutoModelForSeq2SeqLM"
    if architecture.endswith("ForSequenceClassification"):
        return "AutoModelForSequenceClassification"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "AutoModelForCausalLM"
    raise SpecError(
        f"{name}: the configuration's architecture is {architecture!r}; give one that ends in "
        "ForSequenceClassification, ForCausalLM or LMHeadModel, or an encoder-decoder model"
    )


def _random_net(auto_class: str, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):  # the same weights at every start, and the global generator is unchanged
        torch.manual_seed(_SEED)
        return getattr(transformers, auto_class).from_config(config)


def _stored_net(name: str, auto_class: str, folder: str) -> Any:
    if not _has_file(folder, _WEIGHTS):
        raise SpecError(f"{name}: {folder!r} has no weights ({' or '.join(_WEIGHTS)}); add them or --weights random")
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        net, found = getattr(transformers, auto_class).from_pretrained(
            folder, **local, weights_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # transformers may raise anything on damaged weights
        raise SpecError(f"{name}: the weights of {folder!r} cannot be loaded ({one_line(error)})") from error
    missing = sorted(found["missing_keys"])
    if missing:
        lack = f"lack {missing[0]!r} ({len(missing)} of {len(net.state_dict())})"
        raise SpecError(f"{name}: the weights of {folder!r} {lack}; save the whole {type(net).__name__}")
    return net


def _load_tokenizer(name: str, spec: str, config: Any, random: bool) -> Tokenizer | None:
    """The folder's tokenizer; if there is none, a `ByteTokenizer` for random weights, else None."""
    if Path(spec).is_dir() and _has_file(spec, _TOKENIZERS):
        try:
            return _StoredTokenizer(AutoTokenizer.from_pretrained(spec, local_files_only=True, trust_remote_code=False))
        except Exception as error:  # a missing package too: some tokenizers need sentencepiece
            raise SpecError(f"{name}: the tokenizer of {spec!r} cannot be loaded ({one_line(error)})") from error
    fits = config.vocab_size >= ByteTokenizer.vocab_size
    return ByteTokenizer() if random and fits else None


class _StoredTokenizer:
    """A tokenizer that transformers loaded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        return ids

    def decode(self, tokens: Any) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _make_codec(auto_class: str, config: Any, tokenizer: Tokenizer | None) -> TextCodec:
    """The codec, with limits from the configuration; prompt and output share the positions of a causal model."""
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 10**9
    longest = positions // 2 if auto_class == "AutoModelForCausalLM" else positions
    return TextCodec(
        vocab_size=config.vocab_size,
        max_prompt_tokens=min(longest, _MAX_PROMPT_TOKENS),
        max_new_tokens=0 if auto_class == "AutoModelForSequenceClassification" else min(longest, _MAX_NEW_TOKENS),
        pad_token_id=-1 if config.pad_token_id is None else config.pad_token_id,
        tokenizer=tokenizer,
    )


def _make_text_net(name: str, net: Any, codec: TextCodec) -> TextNet:
    if not codec.generates:
        return net
    generation = net.generation_config
    eos, suppressed = generation.eos_token_id, {*(generation.suppress_tokens or ())}
    for tokens in generation.bad_words_ids or ():
        suppressed.update(tokens if len(tokens) == 1 else ())
        if len(tokens) > 1:
            _log.warning("%s may generate %s: only single tokens can be suppressed", name, tokens)
    start = net.config.decoder_start_token_id if net.config.is_encoder_decoder else None
    positions = None
    if net.config.model_type == _MARIAN:
        decoder = net.get_decoder()
        decoder.embed_positions = positions = RowPositions(decoder.embed_positions)
    eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
    cache = "cache" if "cache" in signature(net.forward).parameters else "past_key_values"
    return GenerativeNet(net, eos_token_ids, start, cache, positions, sorted(suppressed))


def _has_file(folder: str, patterns: tuple[str, ...]) -> bool:
    return any(next(Path(folder).glob(pattern), None) for pattern in patterns)
