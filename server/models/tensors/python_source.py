"""Models of users: classes in Python files, NAME=FILE.py:CLASS."""

import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from inspect import iscoroutinefunction
from pathlib import Path
from types import CodeType

from batchwright.model import Model, Tensor
from batchwright.pipeline import Pipeline
from policies.types import SpecError
from server.errors import OutOfMemoryError, OutputError, one_line
from server.models.encoder_spec import TASKS

_PREFIX = "batchwright_models."  # of the names of imported files
SAMPLE_HINT = "; if the model does not take random values, give it a real sample by --sample or samples()"


def load_class(spec: str) -> type[Model]:
    """Import the class of FILE.py:CLASS.

    The file's folder is put at the end of the module search path, so that the file can import its neighbours, but these
    cannot replace other modules.

    Raises:
        SpecError: there is no such file or class, the file raises an exception, or the class is no valid model; the
            message names the line.
    """
    file, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    path = Path(file)
    if not path.is_file():
        raise SpecError(f"no file {file!r}; give NAME=FILE.py:CLASS")
    module = _import(path.resolve())
    found = vars(module).get(name)
    if not isinstance(found, type) or not issubclass(found, Model):
        known = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Model)]
        classes = ", ".join(key for key in known if vars(module)[key] not in (Model, Pipeline)) or "none"
        wrong = f"has no class {name!r} derived from batchwright.Model" if name else "is given without a class"
        raise SpecError(f"{file} {wrong}; give {file}:CLASS, its models are: {classes}")
    _check_signature(found, f"{file}: class {name}")
    return found


def make_model(model_class: type[Model], spec: str) -> Model:
    """Create the model of a class.

    Raises:
        SpecError: the constructor raised an exception, or needs arguments.
    """
    with one_line_errors(f"{spec}: creating the model"):
        return model_class()


def _import(path: Path) -> object:
    """Import a file under a name of its own; a file that is imported already is not imported again."""
    name = f"{_PREFIX}{path}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
        sys.path_hooks.insert(0, partial(_finder, folder))
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as an import does: dataclasses and pickle look their module up
    try:
        with one_line_errors(f"the import of {path}"):
            loader.exec_module(module)
    except SpecError:
        del sys.modules[name]
        raise
    return module


class _SourceLoader(SourceFileLoader):
    """Compiles a file each time: compiled code is taken for that of a file of the same size and second."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _finder(folder: str, path: str) -> FileFinder:
    """What finds modules in a folder of a model's file, or in one below it that is no package index's."""
    if not Path(path).is_relative_to(folder) or "site-packages" in path:
        raise ImportError
    return FileFinder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_SourceLoader, SOURCE_SUFFIXES))


@contextmanager
def one_line_errors(what: str, hint: str = "") -> Iterator[None]:
    """Turn an exception of a user's model into a SpecError of one line, with the line of the file; `what` failed.

    `hint` is about the model's inputs, and left out where its outputs do not fit its signature. A lack of memory is
    left to the caller.
    """
    try:
        yield
    except (SpecError, OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        remedy = "" if isinstance(error, OutputError) else hint
        raise SpecError(f"{what} failed: {_where(error)}{remedy}") from error


def _where(error: BaseException) -> str:
    """The exception in one line, with the last line of a model's file that it passed."""
    what, place = f"{type(error).__name__}: {one_line(error)}", getattr(error, "place", None) or place_of(error)
    return f"{place}: {what}" if place else what


def place_of(error: BaseException) -> str:
    """The last line of a model's file that an exception passed, such as model.py line 3; empty without one."""
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or '').name} line {error.lineno}"
    files = {name.removeprefix(_PREFIX) for name in sys.modules if name.startswith(_PREFIX)}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else ""


def _check_signature(model: type[Model], where: str) -> None:
    for direction in ("inputs", "outputs"):
        tensors = getattr(model, direction, None)
        valid = isinstance(tensors, Mapping) and tensors and all(type(key) is str and key for key in tensors)
        if not valid or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):  # type: ignore[union-attr]
            raise SpecError(f'{where} needs `{direction}`, such as {{"x": Tensor("FP32", [4])}}, not {tensors!r:.80}')
    _check_lengths(model, where)
    largest = model.max_batch_size
    if largest is not None and (type(largest) is not int or largest < 1):
        raise SpecError(f"{where}: max_batch_size is {largest!r}; give an integer of at least 1, or None")
    tokens = model.max_batch_tokens
    if tokens is not None and (type(tokens) is not int or tokens < 1 or not model.lengths):
        raise SpecError(
            f"{where}: max_batch_tokens is {tokens!r}; give an integer of at least 1, with padded inputs, or None"
        )
    task: object = model.task
    if task not in ("", *TASKS):
        raise SpecError(f"{where}: task is {task!r}; give one of {', '.join(TASKS)}, or leave it out")
    if task in ("embed", "rerank") and model.decode is Model.decode:
        raise SpecError(f"{where}: task is {task!r}, which needs `decode`; write decode(self, body, content_type)")
    _check_embedding(model, where)
    if model.torch and any(tensor.datatype == "BYTES" for tensor in model.inputs.values()):
        raise SpecError(f"{where}: torch has no tensors of BYTES; leave `torch = True` out, or take numbers")
    if issubclass(model, Pipeline):
        _check_pipeline(model, where)
    elif model.run is Model.run:
        raise SpecError(f"{where} has no method `run`; write run(self, {', '.join(model.inputs)})")


def _check_pipeline(model: type[Pipeline], where: str) -> None:
    models: object = getattr(model, "models", None)
    if not isinstance(models, list | tuple) or not models or not all(type(each) is str for each in models):
        raise SpecError(
            f'{where} needs `models`, such as ("det", "rec"), the names of what it calls, not {models!r:.80}'
        )
    steps: object = model.steps
    if not isinstance(steps, Mapping) or any(
        name not in model.models or type(number) is not int or number < 0 for name, number in steps.items()
    ):
        raise SpecError(f"{where}: steps is {steps!r:.80}; give the number of requests a call by names of `models`")
    if model.load is not Model.load:
        raise SpecError(f"{where} has a method `load`, which a pipeline does not need; load in `__init__`")
    if model.run is Pipeline.run or not iscoroutinefunction(model.run):
        raise SpecError(f"{where} has no coroutine `run`; write async def run(self, models, {', '.join(model.inputs)})")


def _check_embedding(model: type[Model], where: str) -> None:
    """Check the first output of a class whose task is embed, and the sizes to which it may be cut."""
    shape = next(iter(model.outputs.values())).shape
    if model.task == "embed" and (len(shape) != 1 or shape[0] < 1):
        raise SpecError(f"{where}: task is 'embed', and the first output has the shape {list(shape)}; give it [SIZE]")
    wrong = [each for each in model.dimensions if type(each) is not int or not 0 < each <= shape[0]]
    if wrong:
        raise SpecError(
            f"{where}: dimensions has {wrong[0]!r}; give integers from 1 to {shape[0]}, the embedding's size"
        )


def _check_lengths(model: type[Model], where: str) -> None:
    """Check that padded inputs and `lengths` are declared together."""
    lengths: object = model.lengths  # whatever the user wrote
    padded = [name for name, tensor in model.inputs.items() if tensor.pad is not None]
    for name, tensor in model.outputs.items():
        if tensor.pad is not None:
            raise SpecError(f"{where}: output {name} has pad={tensor.pad!r}, which is for inputs; leave it out")
    if not isinstance(lengths, Sequence) or any(type(n) is not int or n < 1 for n in lengths):
        raise SpecError(f"{where}: lengths is {lengths!r:.80}; give a list of integers of at least 1")
    if sorted(set(lengths)) != list(lengths):
        raise SpecError(f"{where}: lengths is {lengths!r:.80}; let it ascend")
    if padded and not lengths:
        raise SpecError(
            f"{where} pads input {padded[0]} and has no `lengths`; give the lengths to measure, such as "
            "lengths = [64, 256, 1024]"
        )
    if lengths and not padded:
        raise SpecError(
            f"{where} has `lengths` and no padded input; give an input a pad, such as "
            'Tensor("FP32", [3, 48, -1], pad=0.0), or leave `lengths` out'
        )
