"""Loading of models from NAME=SPEC, and the device that runs them."""

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any

import torch

from server.backends.executor import Batch, Device, LoadedDevice
from server.backends.tensor_device import TensorDevice
from server.backends.torch_images import make_image_device
from server.errors import DeviceLostError
from server.models.images.torchvision_source import PixelNet
from server.models.model import ServedModel
from server.models.sources import LoadedModel, TensorSource, source_of
from server.models.tensors.python_source import one_line_errors


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


def make_device(models: Sequence[LoadedModel], device: torch.device) -> "ModelDevices":
    """Put all models on one device, and set the process's threads and heap for it."""
    return ModelDevices({served.name: _device_of(runnable, served, device) for served, runnable in models})


@singledispatch
def _device_of(runnable: Any, served: ServedModel, device: torch.device) -> Device:
    """A Device for what was loaded: a text network."""
    from server.backends.torch_texts import TextDevice

    return TextDevice({served.name: runnable}, device)


@_device_of.register
def _(net: PixelNet, served: ServedModel[Any], device: torch.device) -> Device:
    return make_image_device([(served, net)], device)


@_device_of.register
def _(source: TensorSource, served: ServedModel[Any], device: torch.device) -> Device:
    return TensorDevice(served, source.make, device)


class ModelDevices:
    """A Device for several models, each with a Device of its own on the same hardware."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        """`devices` are by model name."""
        self._devices = devices

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Run the batch on its model's device."""
        return self._devices[batch.model].serve(batch)

    def load(self) -> None:
        """Load the models that are loaded on the executor's thread.

        Raises:
            SpecError: a model raised an exception.
        """
        for name, device in self._devices.items():
            if isinstance(device, LoadedDevice):
                with one_line_errors(f"loading {name}"):
                    device.load()

    def restart(self, model: str) -> None:
        """Load all users' models again, on a new thread, after a batch of `model` exceeded the batch timeout.

        Raises:
            DeviceLostError: it is no model of a user.
        """
        if not isinstance(self._devices[model], LoadedDevice):
            raise DeviceLostError(f"{model} cannot be loaded again")
        for device in self._devices.values():
            if isinstance(device, LoadedDevice):
                device.restart()
