"""Comparison of a network's outputs by precision, and networks on which a coarse precision can be compared."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from server.backends.executor import Batch
from server.backends.real_device import Precision
from server.backends.torch_images import make_image_device
from server.models.images.torchvision_source import load_image_model

# Largest relative L2 error of the logits from float32 ones: twice what the CPU gives for GoogLeNet and ResNet-50.
# On CUDA, convolutions in fp32 use TF32, which has the mantissa of fp16.
BOUNDS: dict[Precision, float] = {"fp32": 0.04, "fp16": 0.04, "bf16": 0.2}


def relative_l2(found: NDArray[Any], exact: NDArray[Any]) -> float:
    """The norm of the difference over the norm of `exact`; infinite if a value is not finite."""
    error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    return error if np.isfinite(error) else float("inf")


def logits(name: str, images: Sequence[Any], place: torch.device, precision: Precision, split: bool = False) -> Any:
    """Logits of a network with random weights whose classifier is not centred, [images, classes].

    Centring removes most of the logits' magnitude but none of their rounding errors, which then look larger than on
    trained weights. `split` runs each image alone.
    """
    model, net = load_image_model(name, "random", len(images))
    for classifier in [module for module in net.modules() if isinstance(module, nn.Linear)][-1:]:
        with torch.no_grad():
            classifier.bias.zero_()
    device = make_image_device(model, net, place, precision)
    batches = [[image] for image in images] if split else [list(images)]
    return np.concatenate([np.stack(device.serve(Batch(name, batch))) for batch in batches])
