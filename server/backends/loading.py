"""The device that runs a loaded network, in the process that runs it."""

from typing import Any

import torch

from server.backends.executor import Device
from server.backends.real_device import Optimise
from server.backends.torch_images import make_graph_device, make_image_device
from server.models.images.torchvision_source import PixelNet
from server.models.model import ServedModel


def device_of(net: Any, served: ServedModel[Any], place: str, optimise: Optimise = "auto") -> Device:
    """Put a network on a device, by torch's name of it, and set the process's threads and heap for it."""
    device = torch.device(place)
    if not isinstance(net, PixelNet):
        from server.backends.torch_texts import TextDevice

        return TextDevice({served.name: net}, device)
    if device.type == "cuda" and net.stages == 1 and optimise != "none":
        return make_graph_device(served, net, device, optimise)
    return make_image_device(served, net, device)
