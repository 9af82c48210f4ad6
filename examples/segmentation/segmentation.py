"""A segmentation network: a class for each pixel, from a fully convolutional network in torch."""

import base64
import io

import numpy as np
import torch
from PIL import Image
from torch import nn

from batchwright import Model, Tensor

SIZE = 128  # pixels
CLASSES = ("background", "road", "building", "tree")
COLOURS = np.array([[0, 0, 0], [128, 64, 128], [192, 0, 0], [0, 128, 0]], np.uint8)


def network():
    """A network from float32 [n, 3, SIZE, SIZE] to scores [n, classes, SIZE, SIZE]."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, len(CLASSES), 1),
        nn.Upsample(size=SIZE, mode="bilinear"),
    )


class Segmentation(Model):
    """Class of each pixel of an image."""

    inputs = {"image": Tensor("UINT8", [SIZE, SIZE, 3])}
    outputs = {"classes": Tensor("UINT8", [SIZE, SIZE])}
    torch = True  # run takes and returns tensors on the device

    def load(self, device):
        torch.manual_seed(0)  # random weights; a trained model calls load_state_dict here
        self.network = network().eval().to(device)

    def run(self, image):
        pixels = image.permute(0, 3, 1, 2).float() / 255
        return {"classes": self.network(pixels).argmax(dim=1).to(torch.uint8)}

    def decode(self, body, content_type):
        """The image in a JPEG or PNG; what Pillow raises is a ValueError for the client."""
        try:
            picture = Image.open(io.BytesIO(body), formats=["JPEG", "PNG"])
            return {"image": np.asarray(picture.convert("RGB").resize((SIZE, SIZE)))}
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError("the body is no JPEG or PNG") from error

    def render(self, outputs):
        """The share of each class, and the class map as a PNG in base64."""
        classes = outputs["classes"]
        shares = np.bincount(classes.ravel(), minlength=len(CLASSES)) / classes.size
        png = io.BytesIO()
        Image.fromarray(COLOURS[classes]).save(png, "PNG")
        return {"shares": dict(zip(CLASSES, shares, strict=True)), "png": base64.b64encode(png.getvalue()).decode()}
