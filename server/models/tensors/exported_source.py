"""Programs saved by torch.export.save: NAME=FILE.pt2."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from batchwright.model import Model, Tensor
from policies.types import SpecError
from server.errors import BadInputError, one_line

DATATYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}
_REMEDY = (
    "export it with dynamic_shapes, such as {'x': {0: torch.export.Dim('batch', max=64)}} for each input; see "
    "docs/your-own-model.md"
)


class ExportedModel(Model):
    """An exported program, run on tensors on the device.

    Attributes:
        max_batch_size: largest size of the batch dimension that the program was exported for.
    """

    torch = True

    def __init__(self, file: str) -> None:
        """Read the program of a file and its signature.

        Raises:
            SpecError: the file cannot be read, or its program takes no batches of tensors.
        """
        path = Path(file)
        if not path.is_file():
            raise SpecError(f"no file {file!r}; give NAME=FILE.pt2, a program saved by torch.export.save")
        try:
            self._program = torch.export.load(path)
        except Exception as error:
            raise SpecError(f"{file} cannot be read ({one_line(error)}); save it with torch.export.save") from error
        user_inputs = self._program.graph_signature.user_inputs
        batch, inputs = _tensors(user_inputs, self._program, f"{file}: input")
        self.inputs = dict(zip(map(str, user_inputs), inputs, strict=True))  # type: ignore[misc]
        names = _output_names(self._program)
        found, outputs = _tensors(self._program.graph_signature.user_outputs, self._program, f"{file}: output")
        if found != batch:
            raise SpecError(f"{file}: the outputs have another batch dimension than the inputs; {_REMEDY}")
        self.outputs = dict(zip(names, outputs, strict=True))  # type: ignore[misc]
        limits = next((r for symbol, r in self._program.range_constraints.items() if str(symbol) == batch), None)
        upper = None if limits is None else str(limits.upper)
        self.max_batch_size = int(upper) if upper is not None and upper.isdigit() else None  # type: ignore[misc]

    def load(self, device: str) -> None:
        """Move the program to the device."""
        from torch.export.passes import move_to_device_pass

        self._run = move_to_device_pass(self._program, device).module()
        self._names = list(self.outputs)

    def run(self, **inputs: Any) -> Mapping[str, Any]:
        """Run the program on a batch."""
        structure = self._program.call_spec.in_spec
        assert structure is not None
        values = [inputs[name] for name in self.inputs]
        arguments, keywords = torch.utils._pytree.tree_unflatten(values, structure)
        try:
            results = torch.utils._pytree.tree_leaves(self._run(*arguments, **keywords))
        except AssertionError as error:  # a guard of the exported program
            shapes = ", ".join(f"{name} {[*value.shape[1:]]}" for name, value in inputs.items())
            raise BadInputError(
                f"the program does not take samples of these shapes: {shapes}; {one_line(error)}"
            ) from error
        return dict(zip(self._names, results, strict=True))


def _tensors(names: Any, program: ExportedProgram, where: str) -> tuple[str, list[Tensor]]:
    """The symbol of the batch dimension, and the tensors in the order of the names.

    Raises:
        SpecError: one is no tensor, has no dynamic batch dimension, or a datatype that the protocol lacks.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    found: list[Tensor] = []
    symbols: set[str] = set()
    for name in names:
        value = values.get(name)
        if not isinstance(value, torch.Tensor):
            raise SpecError(f"{where} {name} is no tensor; export a program that takes and returns tensors")
        sizes: list[Any] = list(value.shape)
        if not sizes or not isinstance(sizes[0], torch.SymInt):
            raise SpecError(f"{where} {name} has the static shape {sizes}, so it takes no batches; {_REMEDY}")
        if value.dtype not in DATATYPES:
            raise SpecError(f"{where} {name} has the datatype {value.dtype}; there is {', '.join(map(str, DATATYPES))}")
        symbols.add(str(sizes[0]))
        shape = [-1 if isinstance(size, torch.SymInt) else size for size in sizes[1:]]
        found.append(Tensor(DATATYPES[value.dtype], shape))
    if len(symbols) != 1:
        raise SpecError(f"{where}s have the batch dimensions {', '.join(sorted(symbols))}; give all the same Dim")
    return symbols.pop(), found


def _output_names(program: ExportedProgram) -> list[str]:
    """The keys of a dictionary of outputs; otherwise `output`, or `output_0`, `output_1`, ..."""
    structure = program.call_spec.out_spec
    count = len(program.graph_signature.user_outputs)
    keys = getattr(structure, "context", None)
    if isinstance(keys, list) and len(keys) == count and all(isinstance(key, str) for key in keys):
        return list(keys)
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]
