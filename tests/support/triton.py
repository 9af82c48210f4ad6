"""Calls of the Open Inference Protocol by NVIDIA's client."""

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DATATYPES = {"float32": "FP32", "int64": "INT64", "uint8": "UINT8"}


def infer(url: str, model: str, **inputs: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Send arrays [n, ...] by input name as binary tensors, and return the outputs by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gevent, at import
        import tritonclient.http as triton
    tensors = []
    for name, array in inputs.items():
        tensor = triton.InferInput(name, list(array.shape), _DATATYPES[array.dtype.name])
        tensor.set_data_from_numpy(np.ascontiguousarray(array))
        tensors.append(tensor)
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        result = client.infer(model, tensors)
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}
