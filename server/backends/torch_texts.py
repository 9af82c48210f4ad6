"""A device that runs text models with torch, one batch at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from server.backends.executor import Batch
from server.backends.torch_images import named_faults
from server.models.text_networks import Generator, TextNet, classify, generate


class TextDevice:
    """A Device for one or several text models; leave it to one thread."""

    def __init__(self, nets: Mapping[str, TextNet], device: torch.device) -> None:
        """`nets` by model name; they are moved to the device, and compute in float32."""
        self._nets, self._device = nets, device
        for net in nets.values():
            (net.net if isinstance(net, Generator) else net).to(device)

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """For each text its logits, float32 [labels], or what was generated.

        A generator's stage is an iteration: who is not done after those that are asked for gives `Unfinished`.
        """
        net = self._nets[batch.model]
        with torch.inference_mode(), named_faults(self._device):
            return (
                generate(net, batch.inputs, batch.stages) if isinstance(net, Generator) else classify(net, batch.inputs)
            )
