"""The model that requests are sent to: its name and signature, read from the server before the load starts."""

from typing import Any
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from loadgen.report import OK
from policies.types import SpecError

KEY_ERRORS = {401: "requires an API key that it knows", 403: "rejects this API key"}
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


class TensorMetadata(BaseModel):
    """An input or output; the first dimension of `shape` is the number of samples, -1 varies."""

    name: str
    datatype: str
    shape: list[int] = Field(min_length=1)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.shape[1:])

    def __str__(self) -> str:
        return f"{self.name} as {self.datatype} {self.shape}"


class ModelMetadata(BaseModel):
    """The metadata of a model; `parameters` are the server's own."""

    name: str
    inputs: list[TensorMetadata] = Field(min_length=1)
    outputs: list[TensorMetadata] = Field(min_length=1)
    parameters: Any = None

    @property
    def infer_path(self) -> str:
        """The path of inference calls by the Open Inference Protocol."""
        return f"/v2/models/{quote(self.name, safe='')}/infer"

    def input_names(self) -> str:
        """The inputs in words, for error messages."""
        return ", ".join(map(str, self.inputs))


def predict_path(model: str | None) -> str:
    """The path of POST /predict; None is the only model of a server."""
    return "/predict" if model is None else f"/predict/{quote(model, safe='')}"


class _Listed(BaseModel):
    name: str
    state: str = "READY"


async def find_model(session: aiohttp.ClientSession, url: str, model: str | None) -> str | None:
    """Find the model to send requests to; None if the server does not list its models (it may still serve one).

    Raises:
        SpecError: no server, no such model, several to choose from, or an API key that is missing or wrong.
    """
    status, body = await _fetch(session, "POST", url, "/v2/repository/index")
    if status in KEY_ERRORS:
        raise SpecError(f"{url} {KEY_ERRORS[status]}; give --api-key KEY, or set BATCHWRIGHT_API_KEY")
    try:
        listed = TypeAdapter(list[_Listed]).validate_json(body) if status == OK else None
    except ValidationError:
        listed = None
    if listed is None or (not listed and model is not None):  # pytriton's Triton has an empty index
        return model
    ready = [entry.name for entry in listed if entry.state == "READY"]
    if model in ready or (model is None and len(ready) == 1):
        return model or ready[0]
    names = ", ".join(ready) or "none"
    problem = "is ready with several or no models" if model is None else f"has no model {model!r} that is ready"
    raise SpecError(f"{url} {problem} (ready: {names}); choose one with --model, or wait for it")


async def read_metadata(session: aiohttp.ClientSession, url: str, model: str) -> ModelMetadata | None:
    """Read the metadata of a model; None if the server has none.

    Raises:
        SpecError: no server, or its response is no model metadata.
    """
    path = f"/v2/models/{quote(model, safe='')}"
    status, body = await _fetch(session, "GET", url, path)
    if status != OK:
        return None
    try:
        return ModelMetadata.model_validate_json(body)
    except ValidationError as error:
        raise SpecError(f"{url}{path} is no model metadata ({error.errors()[0]['msg']}); check the URL") from None


async def _fetch(session: aiohttp.ClientSession, method: str, url: str, path: str) -> tuple[int, bytes]:
    """Send one request to the server at `url`; return status and body.

    Raises:
        SpecError: no server responds.
    """
    try:
        async with session.request(method, f"{url}{path}", timeout=_TIMEOUT) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SpecError(f"no server responds at {url} ({reason}); start one with serve-model, or fix the URL") from None
