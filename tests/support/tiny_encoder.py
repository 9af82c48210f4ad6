"""Folders of small encoders with random weights, as transformers and sentence-transformers save them."""

import json
from pathlib import Path
from typing import Any

from server.models.tensors.encoder_source import _import_transformers

WORDS = "the a cat dog sat on mat ran fast bread bake how is it red blue sky over".split()  # noqa: SIM905
MOST = 32  # tokens


def write_encoder(folder: Path, labels: int = 0, normalises: bool = True) -> Path:
    """Write an encoder; with `labels` a classifier of texts, of one label a reranker."""
    import torch

    transformers = _import_transformers()

    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=MOST)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), max_position_embeddings=MOST, num_labels=labels or 2, **sizes
    )
    kind = transformers.BertForSequenceClassification if labels else transformers.BertModel
    kind(config).eval().save_pretrained(folder)
    if not labels:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        modules = ["Transformer", "Pooling"] + ["Normalize"] * normalises
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        content = [{"path": paths[each], "type": f"sentence_transformers.models.{each}"} for each in modules]
        (folder / "modules.json").write_text(json.dumps(content))
    return folder


def embedding_of(folder: Path, text: str) -> Any:
    """The embedding of a text, computed by transformers alone."""
    import torch

    transformers = _import_transformers()

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    net = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = net(**tokenizer(text, return_tensors="pt")).last_hidden_state
        return torch.nn.functional.normalize(hidden.mean(1), dim=1)[0].numpy()
