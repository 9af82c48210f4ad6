"""Tests that need a CUDA device; run by `pytest -m gpu tests/gpu`."""

import numpy as np
import pytest
import torch

from server.backends.real_device import Precision
from server.backends.torch_device import resolve_device
from server.models.images.codec import ImageCodec, Pixels, synthetic_images
from tests.support.closeness import BOUNDS, logits, relative_l2

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")


def images(count: int) -> list[Pixels]:
    return list(synthetic_images(ImageCodec(), count, np.random.default_rng(1)))


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", ["googlenet", "resnet18", "resnet50"])
def test_outputs_are_the_cpus_within_the_precision_and_independent_of_the_batch_size(
    name: str, precision: Precision
) -> None:
    place = torch.device(resolve_device("cuda:0").place)
    exact = logits(name, images(8), CPU, "fp32")
    batched = logits(name, images(8), place, precision)
    assert relative_l2(batched, exact) < BOUNDS[precision]
    assert relative_l2(logits(name, images(8), place, precision, split=True), batched) < BOUNDS[precision]
    assert relative_l2(exact[:1], exact[1:2]) > BOUNDS[precision], "different images differ by more"


def test_automatic_precision_has_the_error_of_fp16() -> None:
    place = torch.device(resolve_device("cuda:0").place)
    exact = logits("resnet18", images(4), CPU, "fp32")
    automatic, fp16, bf16 = (
        relative_l2(logits("resnet18", images(4), place, precision), exact) for precision in ("auto", "fp16", "bf16")
    )
    assert automatic == pytest.approx(fp16, rel=0.2)
    assert automatic < 0.5 * bf16
