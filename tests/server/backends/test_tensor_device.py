"""The device of models of named tensors: what a model returns is checked, and a hung model is replaced."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from batchwright import BadInput, Model, Tensor
from server.backends.executor import Batch, ThreadExecutor
from server.backends.model_devices import ModelDevices
from server.backends.tensor_device import TensorDevice
from server.errors import BadInputError, DeviceLostError, ModelError
from server.models.signature import DTYPES
from server.models.signature import Tensor as TensorData
from server.models.tensors.codec import TensorCodec
from server.models.tensors.data import to_binary

Array = torch.Tensor


class Echo(Model):
    inputs = {"x": Tensor("FP32", [2])}
    outputs = {"y": Tensor("FP32", [2]), "n": Tensor("INT64", [])}

    def run(self, x: Any) -> Mapping[str, Any]:
        return {"y": 2 * x, "n": np.full(len(x), len(x))}


class OnDevice(Model):
    inputs = {"x": Tensor("BF16", [2]), "k": Tensor("INT32", [])}
    outputs = {"y": Tensor("BF16", [2]), "z": Tensor("FP32", [2])}
    torch = True

    def run(self, x: "Array", k: "Array") -> Mapping[str, Any]:
        assert x.dtype is torch.bfloat16
        assert torch.is_inference_mode_enabled()
        return {"y": x * k[:, None], "z": x.float()}


def device_of(model: type[Model]) -> TensorDevice:
    device = TensorDevice(model(), "cpu")
    device.load()
    return device


def returning(outputs: Any) -> TensorDevice:
    class Returning(Echo):
        def run(self, x: Any) -> Any:
            return outputs(x) if callable(outputs) else outputs

    return device_of(Returning)


def batch(*values: float) -> Batch:
    return Batch("m", [{"x": np.full(2, value, np.float32)} for value in values])


def test_each_sample_gets_its_row_of_every_output() -> None:
    outputs = device_of(Echo).serve(batch(1, 2, 3))
    assert [output["y"].tolist() for output in outputs] == [[2, 2], [4, 4], [6, 6]]
    assert [int(output["n"]) for output in outputs] == [3, 3, 3]


@pytest.mark.parametrize(("datatype", "pad"), [("FP32", 0.5), ("INT64", -1), ("BYTES", b"pad")])
def test_samples_of_different_lengths_are_padded_at_the_end_to_the_longest(datatype: str, pad: Any) -> None:
    class Padded(Model):
        inputs = {"x": Tensor(datatype, [-1, 2], pad=pad), "k": Tensor("INT32")}
        outputs = {"x": Tensor(datatype, [-1, 2])}
        lengths = [2, 8]

        def run(self, x: Any, k: Any) -> Mapping[str, Any]:
            assert k.tolist() == [3, 1]
            return {"x": x}

    longer, shorter = np.full((3, 2), 7, dtype=DTYPES[datatype]), np.full((1, 2), 8, dtype=DTYPES[datatype])
    samples = [{"x": longer, "k": np.int32(3)}, {"x": shorter, "k": np.int32(1)}]
    if datatype == "BYTES":
        longer[:], shorter[:] = b"7", b"8"
    first, second = device_of(Padded).serve(Batch("m", samples))
    np.testing.assert_array_equal(first["x"], longer)
    assert second["x"].tolist() == [*shorter.tolist(), [pad, pad], [pad, pad]]
    assert shorter.shape == (1, 2), "the sample itself is unchanged"


def test_texts_without_dimensions_are_arrays_of_bytes() -> None:
    class Texts(Model):
        inputs = {"x": Tensor("BYTES")}
        outputs = {"x": Tensor("BYTES")}

        def run(self, x: Any) -> Mapping[str, Any]:
            return {"x": x}

    codec = TensorCodec(Texts())
    rows = [b"a", b"bcd\0", b""]
    samples = codec.from_tensors({"x": TensorData("x", "BYTES", (3,), rows)}).read()
    outputs = device_of(Texts).serve(Batch("m", samples))
    assert [codec.render(output, ()) for output in outputs] == [{"outputs": {"x": row.decode()}} for row in rows]
    assert not codec.renders_slowly(outputs[0])
    assert codec.stack(outputs)["x"].tolist() == rows
    assert codec.stack(outputs[:1])["x"].tolist() == rows[:1]


def test_tensors_are_on_the_device_and_come_back_as_arrays() -> None:
    samples = [{"x": np.full(2, 1.5, np.float32), "k": np.array(k, np.int32)} for k in (2, 3)]
    outputs = device_of(OnDevice).serve(Batch("m", samples))
    assert [output["y"].tolist() for output in outputs] == [[3.0, 3.0], [4.5, 4.5]]
    assert outputs[0]["y"].dtype == np.float32


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (None, "returned NoneType; it has to return arrays by output name"),
        (lambda x: {"y": x}, "returned no output n"),
        (lambda x: {"y": x, "n": np.zeros(2, np.int64), "z": x}, "returned an output 'z'"),
        (lambda x: {"y": x[:1], "n": np.zeros(2, np.int64)}, r"output y of shape \[1, 2\]; the batch takes \[2, 2\]"),
        (lambda x: {"y": x[:, :1], "n": np.zeros(2, np.int64)}, r"output y of shape \[2, 1\]"),
        (lambda x: {"y": x, "n": 7}, r"output n of shape \[\]"),
        (
            lambda x: {"y": x.astype(np.float64), "n": np.zeros(2, np.int64)},
            "output y as float64; its datatype is FP32",
        ),
        (lambda x: {"y": x, "n": np.zeros(2)}, "output n as float64; its datatype is INT64"),
        (lambda x: {"y": x * np.nan, "n": np.zeros(2, np.int64)}, "NaN in output y"),
    ],
)
def test_outputs_that_do_not_fit_the_signature_are_named(outputs: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        returning(outputs).serve(batch(1, 2))


def test_nan_in_and_nan_out_of_a_single_sample_is_bad_input() -> None:
    device = returning(lambda x: {"y": x, "n": np.zeros(len(x), np.int64)})
    with pytest.raises(BadInputError, match="fails on input x, which has NaN or infinity: ModelError"):
        device.serve(batch(np.nan))
    with pytest.raises(ModelError, match="NaN in output y"):  # halved until the sample is alone
        device.serve(batch(np.nan, 1))
    assert device.serve(batch(np.inf))[0]["y"].tolist() == [np.inf, np.inf]


def test_a_model_may_use_its_buffer_again() -> None:
    class Reusing(Echo):
        buffer = np.zeros((8, 2), np.float32)

        def run(self, x: Any) -> Mapping[str, Any]:
            np.multiply(x, 2, out=self.buffer[: len(x)])
            return {"y": self.buffer[: len(x)], "n": np.zeros(len(x), np.int64)}

    device = device_of(Reusing)
    first = device.serve(batch(1, 2))
    device.serve(batch(7, 8))
    assert [output["y"].tolist() for output in first] == [[2, 2], [4, 4]]


def test_elements_of_bytes_outputs_are_bytes_or_str() -> None:
    class Numbers(Model):
        inputs = {"x": Tensor("FP32", [2])}
        outputs = {"y": Tensor("BYTES")}

        def run(self, x: Any) -> Mapping[str, Any]:
            return {"y": np.array([7] * len(x), object)}

    with pytest.raises(ModelError, match="output y with elements that are neither bytes nor str"):
        device_of(Numbers).serve(batch(1))


@pytest.mark.parametrize(
    "returned",
    [
        list,
        tuple,
        lambda each: np.array(each, object),
        lambda each: [text.decode() for text in each],
        lambda each: np.array([text.decode() for text in each], object),
    ],
    ids=["list", "tuple", "objects", "str", "objects of str"],
)
@pytest.mark.parametrize("shape", [(), (1,), (-1,)])
def test_texts_arrive_byte_by_byte_whatever_they_are_returned_in(shape: tuple[int, ...], returned: Any) -> None:
    texts = [b"a\0", b"\0b\0\0", b"", b"caf\xc3\xa9"]

    class Texts(Model):
        inputs = {"x": Tensor("FP32", [2])}
        outputs = {"y": Tensor("BYTES", shape)}

        def run(self, x: Any) -> Mapping[str, Any]:
            found = returned(texts)
            return {"y": [returned([text]) for text in texts] if shape else found}

    rows = device_of(Texts).serve(batch(1, 2, 3, 4))
    assert [to_binary(row["y"], "BYTES")[4:] for row in rows] == texts
    assert {row["y"].shape for row in rows} == {tuple(abs(size) for size in shape)}


class Boxes(Model):
    """As many boxes as the first value says."""

    inputs = {"x": Tensor("FP32", [2])}
    outputs = {"boxes": Tensor("FP32", [-1, 4]), "names": Tensor("BYTES", [-1])}

    def run(self, x: Any) -> Mapping[str, Any]:
        counts = [int(row[0]) for row in x]
        return {
            "boxes": [np.full((count, 4), count, np.float32) for count in counts],
            "names": [[b"box"] * count for count in counts],
        }


@pytest.mark.parametrize("torch_too", [False, True])
def test_outputs_of_varying_size_may_be_empty_alone_and_beside_others(torch_too: bool) -> None:
    class OfTorch(Boxes):
        torch = torch_too

        def run(self, x: Any) -> Mapping[str, Any]:
            found = super().run(x)
            return {**found, "boxes": [torch.from_numpy(each) for each in found["boxes"]]} if torch_too else found

    device = device_of(OfTorch)
    for counts in ([0], [2], [0, 3, 1], [0, 0]):
        rows = device.serve(batch(*counts))
        assert [row["boxes"].shape for row in rows] == [(count, 4) for count in counts]
        assert [row["names"].tolist() for row in rows] == [[b"box"] * count for count in counts]
        assert all((row["boxes"] == count).all() for row, count in zip(rows, counts, strict=True))
    codec = TensorCodec(Boxes())
    assert codec.render(device.serve(batch(0))[0], ()) == {"outputs": {"boxes": [], "names": []}}
    assert codec.stack(device.serve(batch(0, 0)))["boxes"].shape == (2, 0, 4)


@pytest.mark.parametrize("nothing", [[], (), np.array([]), np.array([], np.float32)], ids=repr)
def test_an_empty_list_is_no_box(nothing: Any) -> None:
    class Empty(Boxes):
        def run(self, x: Any) -> Mapping[str, Any]:
            found = super().run(x)
            return {**found, "boxes": [each if len(each) else nothing for each in found["boxes"]]}

    rows = device_of(Empty).serve(batch(0, 2))
    assert [row["boxes"].shape for row in rows] == [(0, 4), (2, 4)]
    assert {row["boxes"].dtype for row in rows} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([np.zeros((1, 4), np.float32)], "output boxes of 1 samples; the batch has 2"),
        ([np.zeros((1, 3), np.float32)] * 2, r"output boxes of shape \[1, 1, 3\]"),
        (np.zeros((2, 0, 3), np.float32), r"output boxes of shape \[2, 0, 3\]"),
        ([np.zeros((1, 4))] * 2, "output boxes as float64"),
    ],
)
def test_lists_of_arrays_that_do_not_fit_are_named(outputs: Any, message: str) -> None:
    class Wrong(Boxes):
        def run(self, x: Any) -> Mapping[str, Any]:
            return {"boxes": outputs, "names": [[]] * len(x)}

    with pytest.raises(ModelError, match=message):
        device_of(Wrong).serve(batch(1, 2))


def test_samples_of_different_shapes_need_a_dimension_that_varies() -> None:
    ragged = [np.zeros(2, np.float32), np.zeros(1, np.float32)]
    with pytest.raises(ModelError, match="let the dimension be -1 and return a list with an array for each sample"):
        returning(lambda x: {"y": ragged, "n": np.zeros(len(x), np.int64)}).serve(batch(1, 2))


def test_what_a_model_says_of_an_input_is_the_clients_error_and_nothing_else_is() -> None:
    def refuse(x: Any) -> Any:
        raise BadInput("a mask has 3 values for 4 ids")

    with pytest.raises(BadInputError, match=r"^a mask has 3 values for 4 ids$"):
        returning(refuse).serve(batch(1, 2))

    def fail(x: Any) -> Any:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        returning(fail).serve(batch(1))


async def _run(executor: ThreadExecutor, work: Batch) -> Any:
    return await executor.run(work)


@pytest.mark.parametrize("raised", [StopIteration(3), KeyboardInterrupt(), SystemExit(2), GeneratorExit()])
def test_whatever_a_model_raises_is_the_result_of_the_batch(raised: BaseException) -> None:
    class Device:
        def serve(self, _: Batch, /) -> list[Any]:
            raise raised

    executor = ThreadExecutor(Device(), "cpu")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"the model raised {type(raised).__name__}"):
            asyncio.run(_run(executor, batch(1)))
        with pytest.raises(RuntimeError, match=f"the model raised {type(raised).__name__}"):
            executor.call(partial(Device().serve, batch(1))).result()
    executor.close()


def test_other_models_are_not_replaced() -> None:
    class Device:
        def serve(self, _: Batch, /) -> list[Any]:
            return []

    with pytest.raises(DeviceLostError):
        ModelDevices({"m": Device()}).restart("m", True)
