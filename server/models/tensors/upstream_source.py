"""Models of other servers that speak the Open Inference Protocol, such as Triton: NAME=oip:http://HOST:PORT/MODEL."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from numpy.typing import NDArray

from batchwright.model import DATATYPES, Model, Tensor
from policies.types import SpecError
from server.errors import BadInputError, DeviceUnavailableError, ModelError, one_line
from server.models.signature import DTYPES
from server.models.tensors.codec import Sample
from server.models.tensors.data import as_array, from_binary, from_json, to_binary
from server.models.tensors.upstream_connection import Part, Response, UpstreamConnection
from server.models.upstream_spec import Upstream

_START_TIMEOUT = 10.0  # s, for metadata and configuration at the start
_HEADER_LENGTH = "inference-header-content-length"
_READY_TIMEOUT = 2.0  # s, after an error
_NO_CONFIG = (400, 404, 405, 501)  # statuses of servers without the model configuration extension
_UNAVAILABLE = (401, 403, 404, 429, 502, 503, 504)  # not caused by the samples: access, rate limits, gateways
_KEY_REMEDY = "no key is sent, so let that server take calls without one"
_READY_REMEDY = "name a model that is ready there"
_BINARY = "binary_tensor_data"  # the extension in which batches are sent
_BATCH_REMEDY = "set max_batch_size, or a dynamic first dimension, on that server"


@dataclass(frozen=True, slots=True)
class Description:
    """A model as its server describes it.

    Attributes:
        inputs: by name.
        outputs: by name.
        max_batch_size: largest batch; None where the server names none.
        about: platform and versions, for a profile.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    max_batch_size: int | None
    about: str

    def difference(self, other: "Description") -> str | None:
        """The first input or output that differs, in words; None if the signatures are the same."""
        for kind in ("input", "output"):
            own, others = getattr(self, f"{kind}s"), getattr(other, f"{kind}s")
            for name in {**own, **others}:
                if own.get(name) != others.get(name):
                    return f"{kind} {name} is {_in_words(own.get(name))} and {_in_words(others.get(name))}"
        return None


class UpstreamModel(Model):
    """A model of another server; each batch is one call in the protocol's binary tensor extension.

    Attributes:
        upstream: server and name of the model.
        description: as the server described it at first.
    """

    def __init__(self, upstream: Upstream) -> None:
        """Read the signature and the largest batch from the server.

        Raises:
            SpecError: the server does not answer, has no such model, or the model takes no batches.
        """
        self.upstream = upstream
        self._where = upstream.spec
        self._path = f"/v2/models/{quote(upstream.model, safe='')}"
        self._connection = UpstreamConnection(upstream)
        try:
            self.description = self._describe(_START_TIMEOUT)
            extensions = self._get("/v2", _START_TIMEOUT, _NO_CONFIG).get("extensions")
        except (DeviceUnavailableError, ModelError) as error:
            raise SpecError(f"{self._where}: {error}; start that server first, or fix the URL") from error
        finally:
            self._connection.close()
        lacks = isinstance(extensions, list) and _BINARY not in extensions
        self._hint = f"; its server does not list the extension {_BINARY}, in which batches are sent" if lacks else ""
        self.inputs = self.description.inputs  # type: ignore[misc]
        self.outputs = self.description.outputs  # type: ignore[misc]
        self.max_batch_size = self.description.max_batch_size  # type: ignore[misc]

    def check_ready(self, timeout: float) -> None:
        """Ask the server whether the model is ready; it has to answer within `timeout`, s.

        Raises:
            DeviceUnavailableError: it is not, or the server does not answer.
        """
        response = self._connection.call("GET", f"{self._path}/ready", timeout=timeout)
        if response.status != 200:
            raise DeviceUnavailableError(f"{self._where} answers {response.status}: the model is not ready")

    def check_signature(self, timeout: float) -> None:
        """Compare the model with what it was, since its server may have been started again with another one.

        Args:
            timeout: time in which each answer has to come, s.

        Raises:
            DeviceUnavailableError: the signature differs, the largest batch is smaller, or the server does not answer.
        """
        try:
            now = self._describe(timeout)
        except (SpecError, ModelError) as error:
            raise DeviceUnavailableError(str(error)) from error
        before, size = self.description, now.max_batch_size
        difference = before.difference(now)
        if difference is None and size is not None and size < (before.max_batch_size or math.inf):
            difference = f"the largest batch is {before.max_batch_size or 'not limited'} and {size}"
        if difference is not None:
            raise DeviceUnavailableError(
                f"{self._where} has changed, before and now: {difference}; load the model again to use it"
            )

    def infer(self, samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
        """Send a batch and return its outputs, arrays [n, ...] by name.

        Args:
            samples: of one shape.

        Raises:
            BadInputError: the server answers 4xx that the samples may have caused.
            ModelError: it answers another error, or what is no response of the protocol.
            DeviceUnavailableError: it does not answer, answers a status of `_UNAVAILABLE`, or refuses a single sample
                while the model is not ready.
        """
        entries, data = [], list[Part]()
        for name, tensor in self.inputs.items():
            parts = [_binary(sample[name], tensor.datatype) for sample in samples]
            size, shape = sum(map(len, parts)), [len(samples), *samples[0][name].shape]
            data += parts
            given = {"name": name, "datatype": tensor.datatype, "shape": shape}
            entries.append({**given, "parameters": {"binary_data_size": size}})
        outputs = [{"name": name, "parameters": {"binary_data": True}} for name in self.outputs]
        document = orjson.dumps({"inputs": entries, "outputs": outputs})
        headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(document))}
        response = self._connection.call("POST", f"{self._path}/infer", [document, *data], headers)
        if response.status == 200:
            self._hint = ""
            return self._outputs(response)
        answered = f"{self.upstream.model} answered {response.status}: {_error_of(response.body)}{self._hint}"
        if response.status in _UNAVAILABLE:
            raise DeviceUnavailableError(answered)
        if len(samples) == 1:
            self.check_ready(_READY_TIMEOUT)  # servers answer 400 and 500 for a model that was unloaded
        raise BadInputError(answered) if 400 <= response.status < 500 else ModelError(answered)

    def abort(self) -> None:
        """Let the call that another thread is making fail."""
        self._connection.abort()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _outputs(self, response: Response) -> dict[str, NDArray[Any]]:
        body = response.body
        try:
            start = int(response.headers.get(_HEADER_LENGTH, len(body)))
            found = {}
            for entry in orjson.loads(memoryview(body)[:start])["outputs"]:
                name, datatype, shape = entry["name"], entry["datatype"], tuple(entry["shape"])
                size = (entry.get("parameters") or {}).get("binary_data_size")
                if not all(type(each) is int and each >= 0 for each in (*shape, start, size or 0)):
                    raise ValueError(f"output {name} has the shape {entry['shape']} and {size} bytes")
                if size is None:
                    data = from_json(entry["data"], datatype, shape)
                else:
                    stop = start + size
                    data, start = from_binary(memoryview(body)[start:stop], 0, datatype, shape, math.inf), stop
                found[name] = as_array(data, shape)
            if start != len(body):
                raise ValueError(f"{len(body)} bytes, of which {start} are described")
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise ModelError(f"the response of {self.upstream.model} is not valid: {reason}") from error
        return found

    def _describe(self, timeout: float) -> Description:
        """Ask the server for metadata and configuration.

        Raises:
            SpecError: it has no such model, or the model takes no batches.
            DeviceUnavailableError: it does not answer.
            ModelError: it does not answer in HTTP.
        """
        metadata = self._get(self._path, timeout)
        config = self._get(f"{self._path}/config", timeout, _NO_CONFIG)
        inputs = self._tensors(metadata.get("inputs"), "input")
        outputs = self._tensors(metadata.get("outputs"), "output")
        largest = config.get("max_batch_size")
        if config and (type(largest) is not int or largest < 1):
            raise SpecError(f"{self._where} has the max_batch_size {largest}, so it takes no batches; {_BATCH_REMEDY}")
        versions = metadata.get("versions")
        named = " ".join(map(str, versions)) if isinstance(versions, list) else ""
        about = f"{metadata.get('platform') or 'unknown platform'}, version {named or 'unknown'}"
        return Description(inputs, outputs, largest, about)

    def _get(self, path: str, timeout: float, absent: Sequence[int] = ()) -> dict[str, Any]:
        """The JSON object at a path; an empty one if the status is one of `absent`."""
        response = self._connection.call("GET", path, timeout=timeout)
        if response.status in absent:
            return {}
        if response.status != 200:
            answer = f"{response.status} to GET {path} ({_error_of(response.body)})"
            remedy = _KEY_REMEDY if response.status in (401, 403) else _READY_REMEDY
            raise SpecError(f"{self._where}: the server answers {answer}; {remedy}")
        try:
            document = orjson.loads(response.body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise SpecError(f"{self._where}: the answer to GET {path} is no JSON object; is it an inference server?")
        return document

    def _tensors(self, described: Any, kind: str) -> dict[str, Tensor]:
        """The tensors of the metadata, without the batch dimension."""
        found = {}
        try:
            for entry in described:
                name, datatype, shape = str(entry["name"]), entry["datatype"], entry["shape"]
                if datatype not in DATATYPES:
                    raise SpecError(f"{self._where}: {kind} {name} has the datatype {datatype!r}, which is not served")
                if not shape or shape[0] != -1:
                    raise SpecError(
                        f"{self._where}: {kind} {name} has the shape {shape}, so it takes no batches; {_BATCH_REMEDY}"
                    )
                found[name] = Tensor(datatype, shape[1:])
        except SpecError:
            raise
        except (TypeError, KeyError, ValueError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise SpecError(f"{self._where}: the metadata of its {kind}s are malformed ({reason})") from error
        if not found:
            raise SpecError(f"{self._where}: the metadata have no {kind}s; is it a model of the protocol?")
        return found


def _in_words(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.datatype} {[-1, *tensor.shape]}"


def _binary(array: NDArray[Any], datatype: str) -> Part:
    """One sample as the protocol's binary data, without copying an array that is contiguous."""
    if datatype in ("BF16", "BYTES"):
        return to_binary(array, datatype)
    return np.ascontiguousarray(array, DTYPES[datatype]).reshape(-1).view(np.uint8).data


def _error_of(body: bytes) -> str:
    """The error in a response, in one short line."""
    try:
        text = orjson.loads(body)["error"] or ""
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode(errors="replace")
    return " ".join(str(text).split())[:160] or "no message"
