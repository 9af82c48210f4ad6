"""Loading of models from NAME=SPEC, and the device that runs them."""

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any

import torch

from server.backends.executor import Device
from server.backends.model_devices import ModelDevices
from server.backends.tensor_device import TensorDevice
from server.backends.torch_images import make_image_device
from server.models.images.torchvision_source import PixelNet
from server.models.model import ServedModel
from server.models.sources import LoadedModel, TensorSource, source_of


def load_models(
    specs: Mapping[str, str], weights: Mapping[str, str], max_batch_sizes: Mapping[str, int], stages: int = 1
) -> list[LoadedModel]:
    """Load models with what a device runs.

    Args:
        specs: spec by model name.
        weights: by model name, pretrained, auto, random, or the file of a torchvision model's state dict.
        max_batch_sizes: by model name.
        stages: number of stages to split a torchvision model into.

    Raises:
        SpecError: a model cannot be loaded.
    """
    return [source_of(spec).load(name, weights[name], max_batch_sizes[name], stages) for name, spec in specs.items()]


def make_device(models: Sequence[LoadedModel], device: torch.device) -> ModelDevices:
    """Put all models on one device, and set the process's threads and heap for it."""
    return ModelDevices({served.name: device_of(runnable, served, device) for served, runnable in models})


@singledispatch
def device_of(runnable: Any, served: ServedModel, device: torch.device) -> Device:
    """A Device for what was loaded: a text network."""
    from server.backends.torch_texts import TextDevice

    return TextDevice({served.name: runnable}, device)


@device_of.register
def _(net: PixelNet, served: ServedModel[Any], device: torch.device) -> Device:
    return make_image_device([(served, net)], device)


@device_of.register
def _(source: TensorSource, served: ServedModel[Any], device: torch.device) -> Device:
    return TensorDevice(served, source.make, device)
