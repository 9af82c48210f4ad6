"""From NAME=SPEC to what a device runs: pictures' networks by torchvision, texts' by transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from server.backends.executor import Batch, Device
from server.backends.torch_images import torch_device
from server.models import torchvision_source
from server.models.model import ServedModel
from server.models.text_sources import is_text

Loaded = tuple[ServedModel, Any]  # with its network


def load(models: Mapping[str, str], weights: str, largest: Mapping[str, int], stages: int = 1) -> list[Loaded]:
    """The models with their networks.

    Args:
        models: name -> spec.
        weights: "auto", "random", or a file of a torchvision model's state dict.
        largest: the largest batch of each.
        stages: into how many a torchvision model is cut.

    Raises:
        SpecError: one of them cannot be had.
    """
    return [_load(name, spec, weights, (largest[name], stages)) for name, spec in models.items()]


def _load(name: str, spec: str, weights: str, shape: tuple[int, int]) -> Loaded:
    if is_text(spec):
        from server.models import huggingface_source  # transformers is an extra

        return huggingface_source.load(name, spec, weights, shape[0])
    model, net = torchvision_source.load(spec, weights, *shape)
    return ServedModel(name, model.codec, model.labels, model.weights, model.max_batch_size), net


def device_of(loaded: Sequence[Loaded], place: torch.device) -> Device:
    """All of them on one device, and the process set up for it."""
    texts = {model.name: net for model, net in loaded if model.codec.backend == "texts"}
    others: list[Any] = [(model, net) for model, net in loaded if model.name not in texts]
    pictures = torch_device(others, place)
    if not texts:
        return pictures
    from server.backends.torch_texts import TextDevice

    return _Both(pictures, TextDevice(texts, place), frozenset(texts))


class _Both:
    """A Device for pictures and texts."""

    def __init__(self, pictures: Device, texts: Device, names: frozenset[str]) -> None:
        self._pictures = pictures
        self._texts = texts
        self._names = names

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        return (self._texts if batch.model in self._names else self._pictures).serve(batch)
