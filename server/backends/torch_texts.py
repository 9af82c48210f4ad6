"""Text models on a torch device, which runs one batch at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from server.backends.executor import Batch
from server.backends.torch_device import allow_tf32, translated_errors
from server.models.texts.networks import TextNet, place, serve


class TextDevice:
    """A Device for one or several text models; not thread-safe."""

    def __init__(self, nets: Mapping[str, TextNet], device: torch.device) -> None:
        """Move the networks, by model name, to the device; they compute in float32, on CUDA with TF32."""
        self._nets, self._device = nets, device
        allow_tf32(device)
        for net in nets.values():
            place(net, device)

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """For each sample its logits, float32 [labels], or its generated tokens.

        A generator's stage is a decode step; an unfinished sample gives the `DecodeState` to continue with.
        """
        net = self._nets[batch.model]
        with torch.inference_mode(), translated_errors(self._device):
            return serve(net, batch.inputs, batch.stages)
