"""Sources of models of named tensors: Python files, exported programs and ONNX files, and what is wrong with them."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchwright import BadInput, Model, Tensor
from policies.types import SpecError
from server.errors import BadInputError
from server.models.sources import TensorSource, read_again, source_of

HEAD = "from batchwright import Model, Tensor\n"
VALID = """
class Mine(Model):
    inputs = {"x": Tensor("FP32", [2])}
    outputs = {"y": Tensor("FP32", [2])}
    max_batch_size = 8
    def run(self, x):
        return {"y": x}
"""

PADDED = """
class Mine(Model):
    inputs = {"x": Tensor("FP32", [-1], pad=0.0)}
    outputs = {"y": Tensor("FP32", [-1])}
    lengths = [4, 16]
    def run(self, x):
        return {"y": x}
"""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": self.layer(x) + y, "long": torch.cat([x, y], 1).mean((1,)).long()}


EXAMPLE = (torch.zeros(2, 4), torch.zeros(2, 2))


def export(path: Path, dynamic: Any, net: torch.nn.Module | None = None, example: Any = EXAMPLE) -> str:
    program = torch.export.export((net or Net()).eval(), example, dynamic_shapes=dynamic)
    torch.export.save(program, path)
    return str(path)


def onnx_file(path: Path, dynamic: Any) -> str:
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Net().eval(), EXAMPLE, path, dynamic_shapes=dynamic, output_names=["sum", "long"], verbose=False
        )
    return str(path)


def identity_file(path: Path, kind: str, shape: list[str | int]) -> str:
    """An ONNX file whose output y is its input x, of this kind of elements."""
    onnx = pytest.importorskip("onnx")
    elements = getattr(onnx.TensorProto, kind)
    x, y = (onnx.helper.make_tensor_value_info(name, elements, shape) for name in ("x", "y"))
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), path)
    return str(path)


def python_file(folder: Path, code: str, name: str = "mine.py") -> str:
    (folder / name).write_text(HEAD + code)
    return str(folder / name)


def error_of(spec: str) -> str:
    with pytest.raises(SpecError) as caught:
        source_of(spec).check("m", "pretrained", None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_a_class_is_served_with_its_own_largest_batch(tmp_path: Path) -> None:
    source = source_of(f"{python_file(tmp_path, VALID)}:Mine")
    source.check("m", "pretrained", None)
    assert source.max_batch_size == 8
    served, _ = source.load("m", "pretrained", 32, 1)
    assert (served.max_batch_size, served.weights, served.labels) == (8, "mine.py", ())
    assert source.load("m", "pretrained", 4, 1)[0].max_batch_size == 4


def test_only_a_model_with_padded_inputs_has_lengths(tmp_path: Path) -> None:
    for name, code, expected in (("mine.py", VALID, False), ("padded.py", PADDED, True)):
        source = source_of(f"{python_file(tmp_path, code, name)}:Mine")
        source.check("m", "pretrained", None)
        assert source.has_lengths == expected


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(:\n", "line 2: SyntaxError"),
        ("\nimport no_such_module\n", "line 3: ModuleNotFoundError: No module named 'no_such_module'"),
        ("\n\n1 / 0\n", "line 4: ZeroDivisionError"),
        ("import sys\nsys.exit(3)\n", "line 3: SystemExit: 3"),
        ("class Other(Model): pass\n", ":CLASS, its models are: Other"),
        ("class Mine: pass\n", "mine.py:CLASS, its models are: none"),
        ("class Mine(Model): pass\n", "needs `inputs`"),
        ('class Mine(Model):\n    inputs = {"x": [2]}\n', "needs `inputs`"),
        ('class Mine(Model):\n    inputs = {"x": Tensor("FP32", [2])}\n    outputs = {}\n', "needs `outputs`"),
        ('Tensor("FLOAT", [1])\n', "line 2: ValueError: datatype 'FLOAT' is not one of BF16,"),
        ('Tensor("FP32", [0])\n', "line 2: ValueError: shape [0] is not"),
        (VALID.replace("= 8", "= 0"), "max_batch_size is 0"),
        (
            VALID.replace("[2]", "[2], pad=0.0", 1),
            r"line 4: ValueError: shape [2] has pad=0.0; padding needs exactly one",
        ),
        (VALID.replace("[2]", "[-1, -1], pad=0.0", 1), "padding needs exactly one dimension -1"),
        (VALID.replace("[2]", "[-1], pad='x'", 1), "pad='x' is not a value of FP32"),
        (
            PADDED.replace("    lengths = [4, 16]\n", ""),
            "pads input x and has no `lengths`; give the lengths to measure",
        ),
        (PADDED.replace("[4, 16]", "[16, 4]"), "lengths is [16, 4]; let it ascend"),
        (PADDED.replace("[4, 16]", "[0, 4]"), "lengths is [0, 4]; give a list of integers of at least 1"),
        (PADDED.replace("[4, 16]", "4"), "lengths is 4; give a list of integers"),
        (VALID.replace("= 8", "= 8\n    lengths = [4]"), "has `lengths` and no padded input; give an input a pad"),
        (
            PADDED.replace('"y": Tensor("FP32", [-1]', '"y": Tensor("FP32", [-1], pad=0.0'),
            "output y has pad=0.0, which is",
        ),
        (VALID.replace('{"x": Tensor("FP32", [2])}', '{"x": Tensor("BYTES")}', 1) + "    torch = True\n", "BYTES"),
        (VALID.replace("def run(self, x)", "def walk(self, x)"), "has no method `run`; write run(self, x)"),
        (VALID + "    def __init__(self):\n        raise KeyError('no')\n", "line 10: KeyError: 'no'"),
        (VALID + "    def __init__(self, size):\n        pass\n", "creating the model failed: TypeError"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_the_line_of_the_file(
    tmp_path: Path, code: str, message: str
) -> None:
    assert message in error_of(f"{python_file(tmp_path, code)}:Mine")


def test_samples_of_a_class_have_to_fit_its_inputs(tmp_path: Path) -> None:
    code = VALID + '    def samples(self):\n        return [{"x": [1.0, 2.0, 3.0]}]\n'
    source = source_of(f"{python_file(tmp_path, code)}:Mine")
    with pytest.raises(SpecError, match=r"samples: input x has the shape \[3\], the model takes \[2\]"):
        source.emulate("m", 8)


def test_a_file_can_import_its_neighbours_which_never_replace_our_packages(tmp_path: Path) -> None:
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 3\n")
    for name in ("server", "policies", "loadgen", "profiler"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    code = (
        "from helper_of_mine import VALUE\nimport dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int = VALUE\n"
    )
    served = source_of(f"{python_file(tmp_path, code + VALID)}:Mine").emulate("m", 8)
    assert served.weights == "emulated"
    import loadgen.cli
    import server.models.images.codec

    assert loadgen.cli.__file__
    assert server.models.images.codec.__file__


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["nowhere.py:Mine", "nowhere.pt2", "nowhere.onnx", "nowhere.py", "nowhere.py:"], ids=lambda spec: spec
)
def test_a_missing_file_is_named(spec: str) -> None:
    assert "no file" in error_of(spec)


@pytest.mark.slow
def test_an_exported_program_gives_its_signature_and_its_largest_batch(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", max=16)
    source = source_of(export(tmp_path / "net.pt2", {"x": {0: batch}, "y": {0: batch}}))
    source.check("m", "pretrained", None)
    assert source.max_batch_size == 16
    served, _ = source.load("m", "pretrained", 32, 1)
    assert str(served.signature.inputs[0]) == "`x` as FP32 [-1, 4]"
    assert [str(output) for output in served.signature.outputs] == ["`sum` as FP32 [-1, 2]", "`long` as INT64 [-1]"]
    model: Model = TensorSource(source.spec).make()
    model.load("cpu")
    for size in (1, 3, 16):
        outputs = model.run(x=torch.ones(size, 4), y=torch.zeros(size, 2))
        assert [tuple(value.shape) for value in outputs.values()] == [(size, 2), (size,)]


@pytest.mark.slow
def test_a_program_called_by_keywords_and_with_varying_shapes(tmp_path: Path) -> None:
    class Mean(torch.nn.Module):
        def forward(self, *, words: torch.Tensor) -> torch.Tensor:
            return words.float().mean(1, keepdim=True)

    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=64)
    program = torch.export.export(
        Mean(), (), {"words": torch.zeros(2, 5, dtype=torch.int32)}, dynamic_shapes={"words": {0: batch, 1: length}}
    )
    torch.export.save(program, tmp_path / "mean.pt2")
    served, _ = source_of(str(tmp_path / "mean.pt2")).load("m", "pretrained", 32, 1)
    assert str(served.signature.inputs[0]) == "`words` as INT32 [-1, -1]"
    assert [output.name for output in served.signature.outputs] == ["output"]
    assert served.codec.varies_in_shape
    model = TensorSource(str(tmp_path / "mean.pt2")).make()
    model.load("cpu")
    assert model.run(words=torch.full((3, 7), 2, dtype=torch.int32))["output"].tolist() == [[2.0]] * 3


@pytest.mark.slow
def test_a_static_batch_dimension_is_refused_with_the_remedy(tmp_path: Path) -> None:
    message = error_of(export(tmp_path / "static.pt2", None))
    assert "input x has the static shape [2, 4], so it takes no batches; export it with dynamic_shapes" in message


@pytest.mark.slow
def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    for name in ("bad.pt2", "bad.onnx"):
        (tmp_path / name).write_bytes(b"no program")
    assert "cannot be read" in error_of(str(tmp_path / "bad.pt2"))
    pytest.importorskip("onnxruntime")
    assert "cannot be loaded by ONNX Runtime" in error_of(str(tmp_path / "bad.onnx"))


@pytest.mark.slow
def test_an_onnx_file_gives_its_signature_and_the_same_outputs(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    batch = torch.export.Dim("batch", max=16)
    torch.manual_seed(0)
    source = source_of(onnx_file(tmp_path / "net.onnx", {"x": {0: batch}, "y": {0: batch}}))
    served, _ = source.load("m", "pretrained", 32, 1)
    assert str(served.signature.inputs[1]) == "`y` as FP32 [-1, 2]"
    assert [output.name for output in served.signature.outputs] == ["sum", "long"]
    model = TensorSource(source.spec).make()
    model.load("cpu")
    outputs = model.run(x=np.ones((3, 4), np.float32), y=np.ones((3, 2), np.float32))
    assert outputs["long"].tolist() == [1, 1, 1]
    message = error_of(identity_file(tmp_path / "static.onnx", "FLOAT", [2, 4]))
    assert "has the static shape [2, 4], so it takes no batches" in message


def test_onnx_runtime_reports_nothing_to_its_authors(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    file = identity_file(tmp_path / "net.onnx", "FLOAT", ["n", 2])
    code = f"from server.models.tensors.onnx_source import OnnxModel; OnnxModel({file!r}).load('cpu')"
    (home := tmp_path / "home").mkdir()
    kept = {key: value for key, value in os.environ.items() if key not in ("CI", "ORT_DISABLE_TELEMETRY")}
    environment = kept | {"HOME": str(home), "XDG_CACHE_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(home.rglob("*")) == [], "with telemetry it writes an identifier of the device there"


def test_tensor_models_have_no_stages(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="m cannot be split into stages; leave out --stages"):
        source_of(f"{python_file(tmp_path, VALID)}:Mine").check("m", "pretrained", 4)


def test_two_classes_of_a_file_have_their_own_profiles(tmp_path: Path) -> None:
    file = python_file(tmp_path, VALID + VALID.replace("Mine", "Other"))
    first, second = (source_of(f"{file}:{name}").settings("m") for name in ("Mine", "Other"))
    assert first.startswith("mine.py:Mine ")
    assert first != second


def test_each_model_has_its_own_neighbour_of_the_same_name(tmp_path: Path) -> None:
    for folder, width in (("a", 2), ("b", 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "neighbour_of_two.py").write_text(f"WIDTH = {width}\n")
        code = "from neighbour_of_two import WIDTH" + VALID.replace("[2]", "[WIDTH]")
        spec = f"{python_file(tmp_path / folder, code)}:Mine"
        assert source_of(spec).emulate("m", 8).signature.inputs[0].sample_shape == (width,)


def test_a_file_and_its_neighbours_are_read_again(tmp_path: Path) -> None:
    neighbour = tmp_path / "neighbour.py"
    neighbour.write_text("WIDTH = 2\n")
    spec = f"{python_file(tmp_path, f'from {neighbour.stem} import WIDTH' + VALID.replace('[2]', '[WIDTH]'))}:Mine"
    assert source_of(spec).emulate("m", 8).signature.inputs[0].sample_shape == (2,)
    neighbour.write_text("WIDTH = 31\n")
    assert source_of(spec).emulate("m", 8).signature.inputs[0].sample_shape == (2,)
    with read_again(spec):
        assert source_of(spec).emulate("m", 8).signature.inputs[0].sample_shape == (31,)


@pytest.mark.parametrize("spec", ["weights.pt", "m.safetensors", "model.PKL", "dec.PY:Base", "net.h5"])
def test_other_kinds_of_files_are_refused_with_what_to_do(spec: str) -> None:
    message = error_of(spec)
    assert f"{spec!r} cannot be served; write a FILE.py:CLASS that loads it, or export" in message
    with pytest.raises(SpecError):
        source_of(spec).emulate("m", 8)


def test_an_existing_file_of_an_unknown_kind_is_refused_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photo.jpg", "googlenet"):
        (tmp_path / name).touch()
    for spec in ("photo.jpg", f"{tmp_path}/photo.jpg", "./googlenet"):
        assert f"{spec!r} cannot be served; write a FILE.py:CLASS that loads it, or export" in error_of(spec)
    source_of("googlenet").check("m", "pretrained", None)  # torchvision's, although there is a file of its name


def test_a_folder_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").mkdir()
    for spec in ("./bert", "bert/config.json", "config.json", "nowhere/bert"):
        assert f"{spec!r} cannot be served; write a FILE.py:CLASS that loads it" in error_of(spec)
    assert "a folder cannot be served: write a FILE.py:CLASS that loads it" in error_of("bert")


def test_a_program_that_does_not_take_a_shape_is_bad_input(tmp_path: Path) -> None:
    class Halves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, ::2] + x[:, 1::2]

    batch, half = torch.export.Dim("batch"), torch.export.Dim("half", max=64)
    path = export(tmp_path / "halves.pt2", {"x": {0: batch, 1: 2 * half}}, Halves(), (torch.zeros(2, 6),))
    model = TensorSource(path).make()
    model.load("cpu")
    assert model.run(x=torch.ones(3, 8))["output"].tolist() == [[2.0] * 4] * 3
    with pytest.raises(BadInputError, match=r"does not take samples of these shapes: x \[7\]"):
        model.run(x=torch.ones(3, 7))


@pytest.mark.slow
def test_a_program_may_return_a_tensor_twice(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = 2 * x
            return y, y

    path = export(tmp_path / "twice.pt2", {"x": {0: torch.export.Dim("batch")}}, Twice(), (torch.zeros(2, 3),))
    served, _ = source_of(path).load("m", "pretrained", 8, 1)
    assert [output.name for output in served.signature.outputs] == ["output_0", "output_1"]
    model = TensorSource(path).make()
    model.load("cpu")
    assert [value.tolist() for value in model.run(x=torch.ones(1, 3)).values()] == [[[2.0] * 3]] * 2


def test_strings_of_an_onnx_model_are_utf8(tmp_path: Path) -> None:
    model = TensorSource(identity_file(tmp_path / "t.onnx", "STRING", ["n", 2])).make()
    model.load("cpu")
    assert model.run(x=np.array([[b"ab", "é".encode()]], object))["y"].tolist() == [["ab", "é"]]
    with pytest.raises(BadInput, match="input x has a string that is not UTF-8"):
        model.run(x=np.array([[b"\xff", b""]], object))


def graph_file(path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], *constants: Any) -> str:
    """An ONNX file of these nodes; inputs and outputs are shapes of floats by name, or descriptions of values."""
    onnx = pytest.importorskip("onnx")

    def described(values: dict[str, Any]) -> list[Any]:
        make, floats = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
        return [make(name, floats, each) if isinstance(each, list) else each for name, each in values.items()]

    graph = onnx.helper.make_graph(nodes, "g", described(inputs), described(outputs), list(constants))
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), path)
    return str(path)


def loaded_onnx(file: str) -> Any:
    model = TensorSource(file).make()
    model.load("cpu")
    return model


def test_an_output_that_a_converter_annotates_as_one_sample_is_served_as_it_is(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("ReduceSum", ["x", "axes"], ["label"], keepdims=0)
    axes = onnx.numpy_helper.from_array(np.array([1]), "axes")
    model = loaded_onnx(graph_file(tmp_path / "l.onnx", [node], {"x": ["n", 3]}, {"label": [1]}, axes))
    assert model.outputs["label"] == Tensor("FP32", [])
    assert model.run(x=np.ones((4, 3), np.float32))["label"].tolist() == [3.0] * 4
    error = error_of(graph_file(tmp_path / "s.onnx", [node], {"x": [2, 3]}, {"label": [2]}, axes))
    assert "input x has the static shape [2, 3]" in error


def test_probabilities_as_maps_name_the_converters_option(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("ZipMap", ["x"], ["p"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    kind = onnx.helper.make_map_type_proto(
        onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    )
    output = onnx.helper.make_value_info("p", onnx.helper.make_sequence_type_proto(kind))
    graph = onnx.helper.make_graph(
        [node], "g", [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 2])], [output]
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "z.onnx")
    assert "output p has the type seq(map" in error_of(str(tmp_path / "z.onnx"))
    assert "convert it with zipmap=False" in error_of(str(tmp_path / "z.onnx"))


def test_sizes_that_only_the_model_knows_are_the_clients_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Add", ["ids", "mask"], ["y"])
    shapes = {"ids": ["n", "a"], "mask": ["n", "b"]}
    model = loaded_onnx(graph_file(tmp_path / "m.onnx", [node], shapes, {"y": ["n", "c"]}))
    ids, mask = np.ones((1, 4), np.float32), np.ones((1, 3), np.float32)
    with pytest.raises(BadInput, match=r"the model does not take this sample: .*3 by 4"):
        model.run(ids=ids, mask=mask)
    assert capfd.readouterr().err == "", "nothing is printed between the lines of the log"
    assert model.run(ids=ids, mask=ids)["y"].tolist() == [[2.0] * 4]


@pytest.mark.parametrize(
    ("kind", "message", "client"),
    [
        ("InvalidArgument", "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got: 5 Expected: 4", True),
        (
            "RuntimeException",
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Add node. "
            "Name:'/Add' Status Message: /onnxruntime/core/providers/cpu/math/element_wise_ops.h:540 void f(int) "
            "Attempting to broadcast an axis by a dimension other than 1. 3 by 4",
            True,
        ),
        (
            "RuntimeException",
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Reshape node. "
            "Name:'/rank/Reshape' Status Message: Failed to allocate memory for requested buffer of size 8",
            False,
        ),
        (
            "Fail",
            "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running FusedConv node. "
            "Name:'/Reshape/Conv' Status Message: CUDNN failure 4: CUDNN_STATUS_INTERNAL_ERROR; shape=4",
            False,
        ),
        (
            "Fail",
            "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running X node. "
            "Name:'/axis/X' Status Message: not implemented",
            False,
        ),
    ],
)
def test_only_sizes_and_values_are_the_clients_fault(kind: str, message: str, client: bool, tmp_path: Path) -> None:
    model = loaded_onnx(identity_file(tmp_path / "net.onnx", "FLOAT", ["n", 2]))

    class Failing:
        def run(self, *_: Any) -> Any:
            raise type(kind, (RuntimeError,), {})(message)

    model._run = Failing()
    with pytest.raises(BadInput if client else RuntimeError) as caught:
        model.run(x=np.ones((1, 2), np.float32))
    assert isinstance(caught.value, BadInput) == client
    if "3 by 4" in message:
        reason = "void f(int) Attempting to broadcast an axis by a dimension other than 1. 3 by 4"
        assert str(caught.value) == f"the model does not take this sample: {reason}"
