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


def write_onnx_encoder(folder: Path) -> Any:
    """Write an encoder whose weights are ONNX; return its table: a token's state is its row plus 1."""
    import numpy as np
    import onnx

    write_encoder(folder)
    (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    table = np.random.default_rng(0).normal(size=(5 + len(WORDS), 16)).astype(np.float32)
    make, ints = onnx.helper.make_tensor_value_info, onnx.TensorProto.INT64
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [make(name, ints, ["batch", "tokens"]) for name in names]
    outputs = [make("last_hidden_state", onnx.TensorProto.FLOAT, ["batch", "tokens", 16])]
    constants = [onnx.numpy_helper.from_array(table, "table"), onnx.numpy_helper.from_array(np.array([2]), "last")]
    steps = [("Gather", ["table", "input_ids"], "rows"), ("Add", ["attention_mask", "token_type_ids"], "known")]
    steps += [("Unsqueeze", ["known", "last"], "wide"), ("Cast", ["wide"], "ones")]
    nodes = [onnx.helper.make_node(kind, given, [name]) for kind, given, name in steps]
    nodes[-1].attribute.append(onnx.helper.make_attribute("to", onnx.TensorProto.FLOAT))
    nodes.append(onnx.helper.make_node("Add", ["rows", "ones"], ["last_hidden_state"]))
    graph = onnx.helper.make_graph(nodes, "encoder", inputs, outputs, constants)
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), folder / "onnx" / "model.onnx")
    return table


def embedding_of(folder: Path, text: str) -> Any:
    """The embedding of a text, computed by transformers alone."""
    import torch

    transformers = _import_transformers()

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    net = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = net(**tokenizer(text, return_tensors="pt")).last_hidden_state
        return torch.nn.functional.normalize(hidden.mean(1), dim=1)[0].numpy()
