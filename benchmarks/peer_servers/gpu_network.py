"""The network of the compared servers on a GPU: ours, in fp16 with channels last, as captured graphs or eager."""

import math
import os
from collections.abc import Sequence

import numpy as np
import torch

from server.backends.buckets import bucket_sizes
from server.backends.executor import Batch
from server.backends.torch_images import device_of
from server.models.images.torchvision_source import load_image_model

LARGEST = int(os.environ.get("PEER_LARGEST", "128"))


class Network:
    """A model of torchvision with random weights on PEER_DEVICE; batches of up to PEER_LARGEST images."""

    def __init__(self) -> None:
        """Load it, and run a batch of each size that is captured."""
        name, optimise = os.environ["PEER_MODEL"], os.environ["PEER_OPTIMISE"]
        model, net = load_image_model(name, "random", LARGEST)
        self._name, self._shape = name, model.codec.shape
        self._device = device_of(net, model, os.environ["PEER_DEVICE"], optimise)  # type: ignore[arg-type]
        if optimise == "none":  # batches of all sizes come, and cuDNN would search at each
            torch.backends.cudnn.benchmark = False
        for size in reversed(bucket_sizes(LARGEST)):
            self.run([bytes(math.prod(self._shape))] * size)

    def run(self, images: Sequence[bytes]) -> list[dict[str, int]]:
        """The class of each image, given as its pixels, and the size of its batch."""
        batch = Batch(self._name, [np.frombuffer(image, np.uint8).reshape(self._shape) for image in images])
        return [{"class": int(logits.argmax()), "batch_size": len(images)} for logits in self._device.serve(batch)]
