"""Files with one sample of a model of named tensors: FILE.json, FILE.npz, or the class of a model that has samples."""

import json
import runpy
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.files import read_text
from policies.types import SpecError

SAMPLE_USAGE = (
    'FILE.json with {"inputs": {NAME: nested lists}} of one sample, FILE.npz with an array for each input, or '
    "FILE.py:CLASS, the first of the samples() of a model"
)
Inputs = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]  # dtype and shape of one sample by name; -1 varies


def read_sample(path: Path, inputs: Inputs) -> dict[str, NDArray[Any]]:
    """Read one sample, without the batch dimension: arrays of the inputs' dtypes by name.

    FILE.json is {"inputs": {name: nested lists}} or {name: nested lists}; FILE.npz has an array for each name; of
    FILE.py:CLASS it is the first of the class's `samples()`.

    Args:
        path: the file.
        inputs: dtype and shape that the model takes; the dtype object is bytes.

    Raises:
        SpecError: the file cannot be read, or the sample does not fit the inputs.
    """
    values = _read(path)
    if values.keys() != inputs.keys():
        found, wanted = ", ".join(values) or "nothing", ", ".join(inputs)
        raise SpecError(f"{path} has {found:.200}; give a value by name for each input of the model: {wanted}")
    return {name: checked_array(values[name], *wanted, f"{path}: input {name}") for name, wanted in inputs.items()}


def _read(path: Path) -> Mapping[str, Any]:
    if names_class(path):
        return _read_class(path)
    if path.suffix not in (".json", ".npz"):
        raise SpecError(f"unknown type of the sample {str(path)!r}; give FILE.json, FILE.npz or FILE.py:CLASS")
    try:
        values = _read_arrays(path) if path.suffix == ".npz" else json.loads(read_text(path))
    except OSError as error:
        reason = error.strerror or error
        raise SpecError(f"cannot read the sample {str(path)!r} ({reason}); give a readable file") from error
    except (ValueError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{path} is no {path.suffix[1:]} file with one sample: {error}") from error
    if isinstance(values, dict) and isinstance(values.get("inputs"), dict) and len(values) == 1:
        values = values["inputs"]
    if not isinstance(values, dict):
        raise SpecError(f'{path} holds {type(values).__name__}; give {{"inputs": {{name: nested lists}}}}')
    return values


def names_class(path: Path) -> bool:
    """Whether it is FILE.py:CLASS."""
    return path.suffix.startswith(".py:")


def file_of(path: Path) -> Path:
    """The file of a sample, without the class."""
    return Path(str(path).rpartition(":")[0]) if names_class(path) else path


def _read_class(path: Path) -> Mapping[str, Any]:
    file, name = file_of(path), path.suffix.removeprefix(".py:")
    if not file.is_file():
        raise SpecError(f"no file {str(file)!r}; give FILE.py:CLASS")
    sys.path.append(str(file.resolve().parent))
    try:
        found = runpy.run_path(str(file))
        samples = [dict(sample) for sample in found[name]().samples()] if name in found else None
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SpecError(f"{path} gives no sample ({reason}); correct the file") from error
    finally:
        sys.path.pop()
    if samples is None:
        raise SpecError(f"{file} has no class {name}; name one that it defines")
    if not samples:
        raise SpecError(f"samples() of {name} returns none; let it return one, or give FILE.json or FILE.npz")
    return samples[0]


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    with path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it holds one array without a name")
        with loaded:
            return dict(loaded)


def checked_array(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """An input of the sample as an array.

    Raises:
        SpecError: the message names the shape or the values that do not fit.
    """
    try:
        array = np.asarray(value, object if dtype.hasobject else None)
    except ValueError as error:
        raise SpecError(f"{where} has lists of different lengths; give nested lists of shape {[*shape]}") from error
    fits = all(size > 0 and wanted in (-1, size) for size, wanted in zip(array.shape, shape, strict=False))
    if array.ndim != len(shape) or not fits:
        raise SpecError(
            f"{where} has the shape {[*array.shape]}, the model takes {[*shape]}; give one sample, without the batch "
            "dimension"
        )
    if dtype.hasobject:
        return _as_bytes(array, where)
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if not integers and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise SpecError(f"{where} has values of type {array.dtype}, the model takes {dtype}")
    converted = array.astype(dtype)
    if integers and (converted != array).any():
        bounds = np.iinfo(dtype)
        raise SpecError(f"{where} has a value outside {dtype}; give {bounds.min} to {bounds.max}")
    return converted


def _as_bytes(array: NDArray[Any], where: str) -> NDArray[Any]:
    elements = np.empty(array.shape, object)
    for index, element in np.ndenumerate(array):
        if not isinstance(element, str | bytes):
            raise SpecError(f"{where} has a value of type {type(element).__name__}, the model takes texts")
        elements[index] = element.encode() if isinstance(element, str) else element
    return elements
