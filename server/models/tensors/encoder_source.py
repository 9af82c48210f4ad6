"""Encoders of Hugging Face and sentence-transformers: NAME=hf:ID_OR_FOLDER[,task=...][,max_batch_tokens=N].

Needs the extra `text`. A folder has the files that transformers and sentence-transformers save. Imported in workers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.model import BadInput, Model, Tensor
from policies.types import SpecError
from server.errors import one_line
from server.models.encoder_spec import EncoderSpec

_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_ONNX = ("onnx/model.onnx", "model.onnx")
_FILES = ["*.json", "*.txt", "*.model", "*/config.json"]
_KINDS = (["model*.safetensors"], ["pytorch_model*.bin"], ["onnx/model.onnx"])  # of weights, of which one is needed
_NEW_NAMES = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}  # of pooling, since version 5
_CONNECT_LIMIT = 5.0  # s
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl")  # which begin after the padding
_SHORTEST = 8  # tokens, of the lengths that are measured
_TEXT = "A batch of texts takes as long as its longest text, and so short ones wait for it."
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class EncoderModel(Model):
    """An encoder: token ids in; embeddings, logits of classes, or a score of relevance out.

    `decode` reads a text, or JSON: a text, a list of token ids, {"query": ..., "text": ...} where the task is rerank,
    or {"inputs": [...], "truncate": true} with several of these.
    """

    def __init__(self, spec: str) -> None:
        """Read configuration and tokenizer of `hf:...`.

        Raises:
            SpecError: a package or a file is missing, or a module of the folder is not supported.
        """
        parsed = EncoderSpec.parse(spec)
        transformers = _import_transformers()
        self._folder = _folder_of(parsed.source)
        _require(self._folder, "config.json")
        self._config = transformers.AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
        self._tokenizer, self._cutting, self._largest = self._read_tokenizer(transformers)
        self.max_batch_tokens = parsed.max_batch_tokens  # type: ignore[misc]
        self._head = parsed.task or _task_of(self._config)
        _check_task(self._head, self._config, parsed)
        self._parts = _pooling(self._folder) if self._head == "embed" else None
        self._prompt = _default_prompt(self._folder) if self._head == "embed" else ""
        self._set_signature()

    def _read_tokenizer(self, transformers: Any) -> tuple[Any, Any, int]:
        """The tokenizer, the same one that cuts texts at the greatest length, and that length, tokens."""
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self._folder, use_fast=True)
            plain = tokenizer.backend_tokenizer
        except Exception as error:
            raise SpecError(f"{self._folder} has no tokenizer that can be read: {one_line(error)}") from error
        settings = _read_json(self._folder / "sentence_bert_config.json")
        self._lower = bool(settings.get("do_lower_case"))
        self._padding = tokenizer.pad_token_id or 0
        self._typed = "token_type_ids" in tokenizer.model_input_names
        positions = getattr(self._config, "max_position_embeddings", None) or tokenizer.model_max_length
        if self._config.model_type in _OFFSET_POSITIONS:
            positions -= self._padding + 1
        most = min(settings.get("max_seq_length") or positions, positions, tokenizer.model_max_length)
        plain.no_padding()
        plain.no_truncation()
        cutting = deepcopy(plain)  # setting the limit of one that is in use is an error
        cutting.enable_truncation(most)
        return plain, cutting, most

    def _set_signature(self) -> None:
        padding = {"input_ids": self._padding, "attention_mask": 0, "token_type_ids": 0}
        names = _INPUTS if self._typed else _INPUTS[:2]
        lengths = [2**n for n in range(3, 20) if _SHORTEST <= 2**n < self._largest]
        self.inputs = {name: Tensor("INT64", [-1], pad=padding[name]) for name in names}  # type: ignore[misc]
        self.lengths = (*lengths, self._largest)  # type: ignore[misc]
        self.task = self._head  # type: ignore[misc]
        if self._parts is not None:
            width = self._config.hidden_size * len(self._parts.modes)
            self.outputs = {"embedding": Tensor("FP32", [width])}  # type: ignore[misc]
            self.dimensions = tuple(getattr(self._config, "matryoshka_dimensions", ()))  # type: ignore[misc]
        else:
            self.outputs = {"logits": Tensor("FP32", [self._config.num_labels])}  # type: ignore[misc]

    def load(self, device: str) -> None:
        """Load the network, by torch, or by ONNX Runtime if the folder has no weights of torch."""
        self._device = device
        if any(file for pattern in _WEIGHTS for file in self._folder.glob(pattern)):
            transformers = _import_transformers()
            kind = "AutoModel" if self._parts is not None else "AutoModelForSequenceClassification"
            net = getattr(transformers, kind).from_pretrained(self._folder, dtype=torch.float32)
            self._net = net.eval().to(device)
            self._forward = self._forward_torch
            return
        file = next((self._folder / name for name in _ONNX if (self._folder / name).is_file()), None)
        if file is None:
            raise SpecError(
                f"{self._folder} has no weights; it needs model.safetensors, pytorch_model.bin or {_ONNX[0]}"
            )
        from server.models.tensors.onnx_source import OnnxModel

        self._session = OnnxModel(str(file))
        self._session.load(device)
        self._forward = self._forward_onnx

    def run(self, **inputs: Any) -> Mapping[str, Any]:
        """Embeddings of a batch, pooled over its tokens, or logits.

        Raises:
            BadInput: a token or its type is not known, or the inputs differ in length.
        """
        ids, types = inputs["input_ids"], inputs.get("token_type_ids")
        if any(each.shape != ids.shape for each in inputs.values()):
            raise BadInput("the inputs differ in length; send as many values of each as tokens")
        kinds = getattr(self._config, "type_vocab_size", 1)
        if types is not None and (types.min() < 0 or types.max() >= kinds):
            raise BadInput(f"a token_type_id is not within 0..{kinds - 1}")
        if ids.min() < 0 or ids.max() >= self._config.vocab_size:  # which would end the context of a GPU
            raise BadInput(f"a token is not within 0..{self._config.vocab_size - 1}, the vocabulary of the model")
        with torch.inference_mode():
            found = self._forward(inputs)
            if self._parts is None:
                return {"logits": found.float().cpu().numpy()}
            mask = torch.from_numpy(inputs["attention_mask"]).to(found.device)
            return {"embedding": self._parts.pool(found.float(), mask).cpu().numpy()}

    def _forward_torch(self, inputs: Mapping[str, NDArray[Any]]) -> torch.Tensor:
        given = {name: torch.from_numpy(each).to(self._device) for name, each in inputs.items()}
        output = self._net(**given)
        found: torch.Tensor = output.logits if self._parts is None else output.last_hidden_state
        return found

    def _forward_onnx(self, inputs: Mapping[str, NDArray[Any]]) -> torch.Tensor:
        outputs = self._session.run(**{name: inputs[name] for name in self._session.inputs})
        return torch.from_numpy(outputs[next(iter(self._session.outputs))])

    def samples(self) -> Sequence[Mapping[str, Any]]:
        """One text."""
        return [self._sample(_TEXT, False)]

    def decode(self, body: bytes, content_type: str) -> Any:
        """Token ids of texts; `truncate` in the content type cuts those that are too long."""
        kind, _, options = content_type.partition(";")
        cut = "truncate" in options
        if kind.strip().lower() != "application/json":
            return self._sample(body.decode(), cut)
        value = json.loads(body)
        if not (isinstance(value, dict) and "inputs" in value):
            return self._sample(value, cut)
        cut = value.get("truncate", cut)
        given = value["inputs"]
        several = isinstance(given, list) and not all(type(each) is int for each in given)
        return [self._sample(each, cut) for each in given] if several else self._sample(given, cut)

    def render(self, outputs: Mapping[str, Any], *_: Any) -> Any:
        """The embedding, the classes by their probability, or the score of relevance."""
        if self._parts is not None:
            return outputs["embedding"].tolist()
        logits = torch.from_numpy(np.array(outputs["logits"], np.float64))
        if self._head == "rerank":
            return {"score": float(logits[0].sigmoid()), "raw_score": float(logits[0])}
        several = self._config.problem_type == "multi_label_classification"
        scores = (logits.sigmoid() if several else logits.softmax(0)).tolist()
        labels = [self._config.id2label[index] for index in range(len(scores))]
        return [
            {"label": label, "score": score}
            for score, label in sorted(zip(scores, labels, strict=True), key=lambda each: -each[0])
        ]

    def _sample(self, value: Any, cut: bool) -> dict[str, NDArray[np.int64]]:
        """Inputs for a text, a pair of texts, or token ids; `cut` those that are too long.

        Raises:
            BadInput: it is none of these, or too long.
        """
        if isinstance(value, list) and value and all(type(each) is int for each in value):
            ids, types = value, [0] * len(value)
            if cut:
                ids, types = ids[: self._largest], types[: self._largest]
        else:
            encoded = (self._cutting if cut else self._tokenizer).encode(*self._texts(value))
            ids, types = encoded.ids, encoded.type_ids
        if len(ids) > self._largest:
            raise BadInput(
                f"the text has {len(ids)} tokens, over the maximum {self._largest}; shorten it, or send "
                '"truncate": true'
            )
        arrays = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": types}
        try:
            return {name: np.array(arrays[name], np.int64) for name in self.inputs}
        except OverflowError as error:
            raise BadInput(f"a token is not within 0..{self._config.vocab_size - 1}") from error

    def _texts(self, value: Any) -> list[str]:
        if isinstance(value, dict) and value.keys() == {"query", "text"}:
            texts = [value["query"], value["text"]]
        else:
            texts = [value]
        if not all(isinstance(each, str) for each in texts):
            raise BadInput(f"the input is {str(value)[:80]!r}; send a text, a list of token ids, or a query and a text")
        texts[0] = self._prompt + texts[0]
        return [each.lower() for each in texts] if self._lower else texts


class _Pooling:
    """How embeddings are made of the outputs for each token.

    Attributes:
        modes: names of the ways, whose results are concatenated.
        normalises: whether the embedding is scaled to a length of 1.
    """

    def __init__(self, modes: Sequence[str], normalises: bool) -> None:
        self.modes = modes
        self.normalises = normalises

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Embeddings [n, d] of outputs [n, tokens, d]; `mask` [n, tokens] is 0 for padding."""
        pooled = torch.cat([_POOLS[mode](hidden, mask[:, :, None].to(hidden.dtype)) for mode in self.modes], 1)
        return torch.nn.functional.normalize(pooled, dim=1) if self.normalises else pooled


def _last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)[None, :, None] * mask
    return hidden[torch.arange(len(hidden)), positions.argmax(1)[:, 0]]


_POOLS: Mapping[str, _Pool] = {
    "cls_token": lambda hidden, _: hidden[:, 0],
    "max_tokens": lambda hidden, mask: hidden.masked_fill(mask == 0, -torch.inf).amax(1),
    "mean_tokens": lambda hidden, mask: (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9),
    "mean_sqrt_len_tokens": lambda hidden, mask: (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9).sqrt(),
    "lasttoken": _last,
}


def _pooling(folder: Path) -> _Pooling:
    """The pooling of a folder of sentence-transformers; without one the mean over tokens.

    Raises:
        SpecError: a module of it is not supported, or its file is missing.
    """
    modules = _read_json(folder / "modules.json") or []
    modes, normalises = ["mean_tokens"], False
    for module in modules:
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            config = _read_json(_require(folder, f"{module['path']}/config.json"))
            given = config.get("pooling_mode") or [
                key.removeprefix("pooling_mode_")
                for key, value in config.items()
                if key.startswith("pooling_mode_") and value is True
            ]
            names = [_NEW_NAMES.get(name, name) for name in ([given] if isinstance(given, str) else given)]
            modes = [mode for mode in _POOLS if mode in names]
            if len(modes) < len(names) or not modes or config.get("include_prompt") is False:
                raise SpecError(f"{folder}: the pooling {config} is not supported; write a FILE.py:CLASS for it")
        elif kind == "Normalize":
            normalises = True
        elif kind != "Transformer":
            raise SpecError(f"{folder}: the module {module['type']} is not supported; write a FILE.py:CLASS for it")
    return _Pooling(modes, normalises)


def _default_prompt(folder: Path) -> str:
    """What sentence-transformers puts before each text; empty in most models."""
    config = _read_json(folder / "config_sentence_transformers.json")
    return str((config.get("prompts") or {}).get(config.get("default_prompt_name"), ""))


def _check_task(task: str, config: Any, spec: EncoderSpec) -> None:
    """Check that the network has the head of a task, which would have random weights otherwise.

    Raises:
        SpecError: it has not.
    """
    found = _task_of(config)
    if task != "embed" and found != task:
        raise SpecError(f"{spec} has no network for task={task}; its task is {found}")


def _task_of(config: Any) -> str:
    """The task of a network by its architecture."""
    if not any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        return "embed"
    return "rerank" if config.num_labels == 1 else "classify"


def _import_transformers() -> Any:
    from server.models.images.torchvision_source import import_torchvision_models

    import_torchvision_models()  # which transformers imports, too; its extension may not load
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise SpecError("hf: needs transformers; install the extra text: pip install 'batchwright[text]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _folder_of(source: str) -> Path:
    """The folder of a model, downloaded if it is the id of one on the hub that is not in the cache.

    Raises:
        SpecError: there is none.
    """
    if Path(source).is_dir():
        return Path(source)
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise SpecError(f"no folder {source!r}; give hf:FOLDER, or hf:ID of a model on the hub of Hugging Face")
    snapshot_download: Any = import_module("huggingface_hub").snapshot_download  # a dependency of transformers
    with suppress(Exception):  # it is not in the cache
        cached = Path(snapshot_download(source, local_files_only=True))
        if (cached / "config.json").is_file() and _has_weights(cached):
            return cached
    folder = Path()
    for kind in _KINDS:
        try:
            found = snapshot_download(source, allow_patterns=[*_FILES, *kind], etag_timeout=_CONNECT_LIMIT)
        except Exception as error:
            raise SpecError(
                f"hf:{source} is no folder, not in the cache of Hugging Face, and cannot be downloaded: "
                f"{one_line(error)[:200]}; give hf:FOLDER with the model's files"
            ) from error
        folder = Path(found)
        if _has_weights(folder):
            break
    return folder


def _has_weights(folder: Path) -> bool:
    return any(file for pattern in (*_WEIGHTS, *_ONNX) for file in folder.glob(pattern))


def _require(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise SpecError(f"{folder} has no {name}; give the folder of a model saved by transformers")
    return folder / name


def _read_json(path: Path) -> Any:
    """The content of a JSON file; an empty dictionary if there is none."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise SpecError(f"{path} is not valid JSON: {one_line(error)}") from error
