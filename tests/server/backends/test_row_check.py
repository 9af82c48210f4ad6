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


def check(model: Model, largest: int = 8) -> None:
    samples = [{name: np.asarray(value, np.float32) for name, value in each.items()} for each in model.samples()]
    served = ServedModel("m", TensorCodec(model, samples), (), "none", largest)
    device = TensorDevice(served, type(model), torch.device("cpu"))
    executor = ThreadExecutor(ModelDevices({"m": device}))
    try:
        check_rows(executor, served)
    finally:
        executor.close()


@pytest.mark.parametrize(
    "model", [Rows(), Detections(), Tokens(), NearlyTheSame()], ids=lambda each: type(each).__name__
)
def test_models_whose_rows_follow_their_samples_pass(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(model)
    assert not caplog.text


@pytest.mark.parametrize(
    "model", [Concatenated(), OneForEach(), Sorted(), Names()], ids=lambda each: type(each).__name__
)
def test_models_whose_rows_are_not_those_of_their_samples_are_refused(model: Model) -> None:
    with pytest.raises(SpecError, match=r"m: .*output y.*; the first dimension of each output has to be the batch"):
        check(model)


def test_with_one_sample_a_batch_no_rows_can_be_mixed_up() -> None:
    check(Sorted(), 1)


def test_outputs_that_differ_between_runs_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(Random())
    assert "m: output y differs between two runs of the same batch" in caplog.text
