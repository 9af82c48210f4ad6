"""The check at start-up that rows of outputs are those of their samples, on models of every kind."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from batchwright import BadInput, Model, Tensor
from policies.types import SpecError
from server.backends.executor import ThreadExecutor
from server.backends.model_devices import ModelDevices
from server.backends.row_check import check_rows
from server.backends.tensor_device import TensorDevice
from server.models.model import ServedModel
from server.models.signature import DTYPES
from server.models.tensors.codec import TensorCodec


class Rows(Model):
    """Doubles its input."""

    inputs = {"x": Tensor("FP32", [6, 2])}
    outputs = {"y": Tensor("FP32", [-1, 2])}

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": 2 * x}


class Concatenated(Rows):
    """The rows of all samples whose first value is above 0.5, as a detector concatenates its boxes."""

    outputs = {"y": Tensor("FP32", [2])}

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": x[x[..., 0] > 0.5]}


class OneForEach(Concatenated):
    """For two typical samples one box each, so that only the sample without any tells."""

    def samples(self) -> Sequence[dict[str, Any]]:
        return [{"x": np.full((6, 2), 0.1 * n) + np.eye(6, 2)} for n in (1, 2)]


class Sorted(Rows):
    """Sorts the samples of a batch."""

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": 2 * x[np.argsort(x.sum((1, 2)))]}


class Detections(Rows):
    """The same boxes as a list with an array for each sample."""

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": [each[each[:, 0] > 0.5] for each in x]}


class Tokens(Rows):
    """Takes no zeros."""

    def run(self, x: Any) -> dict[str, Any]:
        if not x.any((1, 2)).all():
            raise BadInput("a sample is all zeros")
        return {"y": x}


class OneTypical(Concatenated):
    """Takes no zeros; its typical sample has one box."""

    def samples(self) -> Sequence[dict[str, Any]]:
        return [{"x": np.eye(6, 2) * np.array([1, 0]) + 0.1}]

    def run(self, x: Any) -> dict[str, Any]:
        if not x.any((1, 2)).all():
            raise BadInput("a sample is all zeros")
        return {"y": x[x[..., 0] > 0.5]}


class Numbered(OneTypical):
    """Its boxes begin with the number of their sample, as those of detectors do."""

    outputs = {"y": Tensor("FP32", [3])}

    def run(self, x: Any) -> dict[str, Any]:
        sample, _ = np.nonzero(x[..., 0] > 0.5)
        return {"y": np.concatenate([sample[:, None], x[x[..., 0] > 0.5]], axis=1).astype(np.float32)}


class SortedSlightly(Rows):
    """Sorts the samples of a batch; the first column is so large that they hardly differ."""

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": x[np.argsort(x.sum((1, 2)))] + np.array([1e4, 0], np.float32)}


class Seeded(Rows):
    """Adds noise by the place in the batch."""

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": x + np.random.default_rng(0).normal(size=x.shape).astype(np.float32)}


class Large(Rows):
    """Does not fit the memory with two samples."""

    def run(self, x: Any) -> dict[str, Any]:
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"y": x}


class Zeros(Rows):
    """Has a typical sample of zeros."""

    def samples(self) -> Sequence[dict[str, Any]]:
        return [{"x": np.zeros((6, 2))}]


class Random(Rows):
    """Differs between runs."""

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": np.random.default_rng().normal(size=x.shape).astype(np.float32)}


class NearlyTheSame(Rows):
    """Depends on the place in the batch by rounding errors."""

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": x * (1 + 1e-3 * np.arange(len(x), dtype=np.float32)[:, None, None])}


class Names(Model):
    """Concatenates texts."""

    inputs = {"x": Tensor("BYTES", [1])}
    outputs = {"y": Tensor("BYTES", [1])}

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": [[b" ".join(x[:, 0])]] * len(x)}


class Scalars(Model):
    """Measures texts without a dimension."""

    inputs = {"x": Tensor("BYTES")}
    outputs = {"y": Tensor("INT64")}

    def run(self, x: Any) -> dict[str, Any]:
        return {"y": np.array([len(text) for text in x])}


class Ids(Names):
    """Reads the objects of typical texts, and concatenates them."""

    def samples(self) -> Sequence[dict[str, Any]]:
        return [{"x": [b"cat"]}]

    def run(self, x: Any) -> dict[str, Any]:
        if not all(text for text in x[:, 0]):
            raise BadInput("an empty text")
        return {"y": [[each] for text in x[:, 0] for each in text.split()]}


class FailsLater(Random):
    """Is random, and fails at the third run."""

    runs = 0

    def run(self, x: Any) -> dict[str, Any]:
        FailsLater.runs += 1
        if FailsLater.runs == 3:
            raise RuntimeError("third")
        return super().run(x)


def check(model: Model, largest: int = 8) -> bool:
    dtypes = {name: DTYPES[each.datatype] for name, each in model.inputs.items()}
    samples = [{name: np.asarray(value, dtypes[name]) for name, value in each.items()} for each in model.samples()]
    served = ServedModel("m", TensorCodec(model, samples), (), "none", largest)
    device = TensorDevice(model, "cpu")
    executor = ThreadExecutor(ModelDevices({"m": device}))
    try:
        return check_rows(executor, served)
    finally:
        executor.close()


@pytest.mark.parametrize(
    "model",
    [Rows(), Detections(), Tokens(), NearlyTheSame(), Zeros(), Large(), Scalars()],
    ids=lambda each: type(each).__name__,
)
def test_models_whose_rows_follow_their_samples_pass(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert check(model)
    assert not caplog.text


@pytest.mark.parametrize(
    "model",
    [Concatenated(), OneForEach(), OneTypical(), Numbered(), Sorted(), SortedSlightly(), Names()],
    ids=lambda each: type(each).__name__,
)
def test_models_whose_rows_are_not_those_of_their_samples_are_refused(model: Model) -> None:
    with pytest.raises(SpecError, match=r"m: .*output y.*; the first dimension of each output has to be the batch"):
        check(model)


def test_with_one_sample_a_batch_no_rows_can_be_mixed_up() -> None:
    assert check(Sorted(), 1)


def test_without_two_different_samples_all_batches_have_one(caplog: pytest.LogCaptureFixture) -> None:
    assert not check(Ids())
    assert "m: no two different samples could be run" in caplog.text
    assert "let samples() return two different ones" in caplog.text


@pytest.mark.parametrize("model", [Random(), Seeded()], ids=lambda each: type(each).__name__)
def test_outputs_that_cannot_be_compared_are_logged(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert check(model)
    assert "m: output y is random or depends on the place in the batch" in caplog.text


def test_an_exception_of_a_later_run_is_one_of_the_model() -> None:
    with pytest.raises(SpecError, match=r"m: a batch of 2 failed: .*third"):
        check(FailsLater())
