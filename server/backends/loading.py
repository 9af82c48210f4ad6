"""Loading of models from NAME=SPEC, and the device that runs them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from server.backends.executor import Batch, Device
from server.backends.torch_images import make_image_device
from server.models.model import ServedModel
from server.models.text_model_spec import is_text
from server.models.torchvision_source import PixelNet, load_image_model

LoadedModel = tuple[ServedModel, Any]  # with its network: a PixelNet, or a text network


def load_models(
    specs: Mapping[str, str], weights: str, max_batch_sizes: Mapping[str, int], stages: int = 1
) -> list[LoadedModel]:
    """Load models with their networks.

    Args:
        specs: spec by model name.
        weights: "auto", "random", or the file of a torchvision model's state dict.
        max_batch_sizes: by model name.
        stages: number of stages to split a torchvision model into.

    Raises:
        SpecError: a model cannot be loaded.
    """
    return [_load_model(name, spec, weights, max_batch_sizes[name], stages) for name, spec in specs.items()]


def _load_model(name: str, spec: str, weights: str, max_batch_size: int, stages: int) -> LoadedModel:
    if is_text(spec):
        from server.models.huggingface_source import load_text_model  # transformers is an extra

        return load_text_model(name, spec, weights, max_batch_size)
    model, net = load_image_model(spec, weights, max_batch_size, stages)
    return replace(model, name=name), net


def make_device(models: Sequence[LoadedModel], device: torch.device) -> Device:
    """Put all models on one device, and set the process's threads and heap for it."""
    images: list[Any] = [(model, net) for model, net in models if isinstance(net, PixelNet)]
    texts = {model.name: net for model, net in models if not isinstance(net, PixelNet)}
    image_device = make_image_device(images, device)
    if not texts:
        return image_device
    from server.backends.torch_texts import TextDevice

    return _MixedDevice(image_device, TextDevice(texts, device), frozenset(texts))


class _MixedDevice:
    """A Device for image and text models."""

    def __init__(self, images: Device, texts: Device, text_models: frozenset[str]) -> None:
        self._images = images
        self._texts = texts
        self._text_models = text_models

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        return (self._texts if batch.model in self._text_models else self._images).serve(batch)
