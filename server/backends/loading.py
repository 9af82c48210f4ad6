"""The device that runs a loaded model."""

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import torch

from server.backends.executor import Device
from server.backends.model_devices import ModelDevices
from server.backends.torch_device import Optimise
from server.backends.torch_images import make_graph_device, make_image_device
from server.backends.worker_device import WorkerDevice
from server.models.images.torchvision_source import PixelNet
from server.models.model import ServedModel
from server.models.sources import LoadedModel, TensorSource


def make_device(models: Sequence[LoadedModel], device: torch.device, optimise: Optimise = "auto") -> ModelDevices:
    """Put all models on one device, and set the process's threads and heap for it."""
    return ModelDevices({served.name: device_of(runnable, served, device, optimise) for served, runnable in models})


@singledispatch
def device_of(runnable: Any, served: ServedModel, device: torch.device, _: Optimise = "auto") -> Device:
    """A Device for what was loaded: a text network."""
    from server.backends.torch_texts import TextDevice

    return TextDevice({served.name: runnable}, device)


@device_of.register
def _(net: PixelNet, served: ServedModel[Any], device: torch.device, optimise: Optimise = "auto") -> Device:
    if device.type == "cuda" and net.stages == 1 and optimise != "none":
        return make_graph_device(served, net, device, optimise)
    return make_image_device([(served, net)], device)


@device_of.register
def _(_: TensorSource, served: ServedModel[Any], device: torch.device, __: Optimise = "auto") -> Device:
    return WorkerDevice(served, str(device))
