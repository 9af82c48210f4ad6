"""The text of a page: its lines are detected, cut out, and recognised, each a request of its own."""

import asyncio
import io

import numpy as np
from PIL import Image

from batchwright import Pipeline, Tensor

PAGE = 640, 480  # width and height that the detector takes, pixels
MAX_PIXELS = 2**24  # of a page; each takes several bytes while it is decoded
LINE, STEP, WIDEST = 48, 8, 1600  # height of a line for the recogniser, unit and maximum of its width, pixels


def read_page(body):
    """The picture in a JPEG or PNG."""
    try:
        picture = Image.open(io.BytesIO(body), formats=["JPEG", "PNG"])
        if picture.width * picture.height > MAX_PIXELS:
            raise ValueError(f"the page has {picture.width} x {picture.height} pixels, over {MAX_PIXELS}")
        return picture.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError("the body is no JPEG or PNG") from error


def scaled(picture):
    """A picture as the networks take it: [3, height, width] of BGR, from -1 to 1."""
    return np.asarray(picture)[:, :, ::-1].transpose(2, 0, 1) / np.float32(127.5) - 1


def fitted(page):
    """The page for the detector, in the upper left of its size, and by how much it is enlarged."""
    ratio = min(PAGE[0] / page.width, PAGE[1] / page.height)
    whole = Image.new("RGB", PAGE, "white")
    size = max(1, round(ratio * page.width)), max(1, round(ratio * page.height))
    whole.paste(page.resize(size, Image.Resampling.BILINEAR))
    return scaled(whole), ratio


def boxes_on(page, found, ratio):
    """Boxes of the detector in pixels of the page, INT32 [n, 4]."""
    edges = np.array([page.width, page.height] * 2)
    return np.minimum(np.rint(found / ratio), edges).astype(np.int32).reshape(-1, 4)


def cut_line(page, box):
    """A line of the page as the recogniser takes it, with grey at its end."""
    left, top, right, bottom = map(int, box)
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    width = min(WIDEST, max(1, round(LINE * (right - left) / (bottom - top))))
    image = np.zeros((3, LINE, -(-width // STEP) * STEP), np.float32)
    image[:, :, :width] = scaled(page.resize((width, LINE), Image.Resampling.BILINEAR, (left, top, right, bottom)))
    return image


class ReadText(Pipeline):
    """Lines of text on a page, from top to bottom, with their boxes and scores."""

    inputs = {"image": Tensor("UINT8", [-1, -1, 3])}  # RGB
    outputs = {"lines": Tensor("BYTES", [-1]), "scores": Tensor("FP32", [-1]), "boxes": Tensor("INT32", [-1, 4])}
    models = ("det", "rec")
    steps = {"det": 1, "rec": 6}

    async def run(self, models, image):
        page = Image.fromarray(image)
        whole, ratio = fitted(page)
        boxes = boxes_on(page, (await models.det(image=whole))["boxes"], ratio)
        lines = await asyncio.gather(*(models.rec(image=cut_line(page, box)) for box in boxes))
        return {
            "lines": [line["text"].item() for line in lines],
            "scores": np.array([line["score"] for line in lines], np.float32),
            "boxes": boxes,
        }

    def decode(self, body, content_type):
        return {"image": np.asarray(read_page(body))}

    def render(self, outputs):
        return [
            {"text": line.decode(), "score": round(float(score), 4), "box": box.tolist()}
            for line, score, box in zip(outputs["lines"], outputs["scores"], outputs["boxes"], strict=True)
        ]
