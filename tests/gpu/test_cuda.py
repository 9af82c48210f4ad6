"""What only a CUDA device shows; run by `make gpu`."""

import numpy as np
import pytest
import torch

from server.backends.executor import Batch
from server.backends.torch_images import resolve_device, torch_device
from server.models.images import smooth_pictures
from server.models.torchvision_source import load

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["googlenet", "resnet18", "resnet50"])
def test_the_gpu_agrees_with_the_cpu_and_a_batch_with_its_members(name: str) -> None:
    place, _ = resolve_device("cuda:0")
    pictures = list(smooth_pictures(load(name, "random")[0].codec, 8, np.random.default_rng(1)))
    on_gpu = torch_device([load(name, "random")], place)
    together = np.stack(on_gpu.serve(Batch(name, pictures)))
    alone = np.stack([on_gpu.serve(Batch(name, [picture]))[0] for picture in pictures])
    exact = np.stack(torch_device([load(name, "random")], torch.device("cpu")).serve(Batch(name, pictures)))
    largest = np.abs(exact).max()
    # bf16 has 8 bits of mantissa: 0.4 per cent a rounding, some tens of them in a row
    assert np.abs(together - alone).max() < 0.05 * largest
    assert np.abs(together - exact).max() < 0.1 * largest
    assert np.abs(exact[0] - exact[1]).max() > 0.2 * largest, "different pictures differ by more"


def test_half_precision_is_closer_than_bfloat() -> None:
    place, _ = resolve_device("cuda:0")
    model = load("resnet18", "random")
    pictures = list(smooth_pictures(model[0].codec, 4, np.random.default_rng(2)))
    exact = np.stack(torch_device([load("resnet18", "random")], torch.device("cpu")).serve(Batch("resnet18", pictures)))

    def error(precision: str) -> float:
        device = torch_device([load("resnet18", "random")], place, precision)  # type: ignore[arg-type]
        return float(np.abs(np.stack(device.serve(Batch("resnet18", pictures))) - exact).max())

    assert error("fp16") < error("bf16")
