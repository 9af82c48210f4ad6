"""Tests that need a CUDA device; run by `make gpu`."""

import numpy as np
import pytest
import torch

from server.backends.executor import Batch
from server.backends.torch_device import resolve_device
from server.backends.torch_images import make_image_device
from server.models.images.codec import synthetic_images
from server.models.images.torchvision_source import load_image_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["googlenet", "resnet18", "resnet50"])
def test_outputs_on_the_gpu_are_close_to_the_cpus_and_independent_of_the_batch_size(name: str) -> None:
    place, _ = resolve_device("cuda:0")
    images = list(synthetic_images(load_image_model(name, "random")[0].codec, 8, np.random.default_rng(1)))
    on_gpu = make_image_device([load_image_model(name, "random")], place)
    batched = np.stack(on_gpu.serve(Batch(name, images)))
    single = np.stack([on_gpu.serve(Batch(name, [image]))[0] for image in images])
    exact = np.stack(
        make_image_device([load_image_model(name, "random")], torch.device("cpu")).serve(Batch(name, images))
    )
    largest = np.abs(exact).max()
    # bf16 has 8 bits of mantissa: an error of 0.4 % per rounding, over some tens of layers
    assert np.abs(batched - single).max() < 0.05 * largest
    assert np.abs(batched - exact).max() < 0.1 * largest
    assert np.abs(exact[0] - exact[1]).max() > 0.2 * largest, "different images differ by more"


def test_fp16_is_more_precise_than_bf16() -> None:
    place, _ = resolve_device("cuda:0")
    model = load_image_model("resnet18", "random")
    images = list(synthetic_images(model[0].codec, 4, np.random.default_rng(2)))
    exact = np.stack(
        make_image_device([load_image_model("resnet18", "random")], torch.device("cpu")).serve(
            Batch("resnet18", images)
        )
    )

    def error(precision: str) -> float:
        device = make_image_device([load_image_model("resnet18", "random")], place, precision)  # type: ignore[arg-type]
        return float(np.abs(np.stack(device.serve(Batch("resnet18", images))) - exact).max())

    assert error("fp16") < error("bf16")
