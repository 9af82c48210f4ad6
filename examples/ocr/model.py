"""Recognition of text lines: the trained network of the package rapidocr-onnxruntime, for lines of any width."""

import io
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from batchwright import Model, Tensor
from policies.cpus import available_cpus

HEIGHT = 48  # pixels, that of the images in training
MAX_PIXELS = 2**24  # of an image as it is sent; each takes several bytes while it is decoded
STEP = 8  # pixels; the network gives one character, or none, for each step


def weights_file():
    """The network's file in the package, of which no code is imported."""
    package = find_spec("rapidocr_onnxruntime")
    if package is None or package.origin is None:
        raise ImportError("the weights are missing: pip install rapidocr-onnxruntime")
    return Path(package.origin).parent / "models" / "ch_PP-OCRv4_rec_infer.onnx"


class Recogniser(Model):
    """Text of an image of one line."""

    inputs = {"image": Tensor("FP32", [3, HEIGHT, -1], pad=0.0)}  # BGR, from -1 to 1; 0 is grey
    outputs = {"text": Tensor("BYTES"), "score": Tensor("FP32")}
    lengths = [64, 160, 320, 640, 960, 1280, 1600]  # widths, pixels
    threads = max(1, available_cpus() - 1)  # one is left for the server

    def load(self, device):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3
        kind, _, index = device.partition(":")
        gpu = [("CUDAExecutionProvider", {"device_id": index or "0"})] if kind == "cuda" else []
        self.session = onnxruntime.InferenceSession(weights_file(), options, [*gpu, "CPUExecutionProvider"])
        known = self.session.get_modelmeta().custom_metadata_map["character"]
        self.characters = np.array(["", *known.splitlines(), " "])  # class 0 is the blank of CTC

    def run(self, image):
        (probabilities,) = self.session.run(None, {"x": image})  # [n, width / STEP, classes]
        classes = probabilities.argmax(2)
        best = np.take_along_axis(probabilities, classes[:, :, None], 2)[:, :, 0]
        begins = np.diff(classes, axis=1, prepend=0) != 0
        kept = begins & (classes != 0)  # CTC: a character is given once however many steps it takes
        texts = ["".join(self.characters[row[chosen]]) for row, chosen in zip(classes, kept, strict=True)]
        score = (best * kept).sum(1) / np.maximum(kept.sum(1), 1)
        return {"text": np.array([text.encode() for text in texts], object), "score": score.astype(np.float32)}

    def decode(self, body, content_type):
        """The line in a JPEG or PNG, as high as the network takes it, and as wide as it is then.

        The width is rounded up to whole steps, which the network computes anyway, with grey at the end.
        """
        try:
            picture = Image.open(io.BytesIO(body), formats=["JPEG", "PNG"])
            if picture.width * picture.height > MAX_PIXELS:
                raise ValueError(f"the image has {picture.width} x {picture.height} pixels, over {MAX_PIXELS}")
            width = -(-HEIGHT * picture.width // picture.height)
            if width > self.lengths[-1]:
                raise ValueError(f"the line is {width} pixels wide at a height of {HEIGHT}, over {self.lengths[-1]}")
            pixels = np.asarray(picture.convert("RGB").resize((width, HEIGHT), Image.Resampling.BILINEAR))
        except Image.DecompressionBombError as error:
            raise ValueError(f"the image has more than {MAX_PIXELS} pixels") from error
        except (OSError, SyntaxError) as error:
            raise ValueError("the body is no JPEG or PNG") from error
        image = np.zeros((3, HEIGHT, -(-width // STEP) * STEP), np.float32)
        image[:, :, :width] = pixels[:, :, ::-1].transpose(2, 0, 1) / np.float32(127.5) - 1
        return {"image": image}

    def render(self, outputs):
        return {"text": outputs["text"].item().decode(), "score": round(float(outputs["score"]), 4)}
