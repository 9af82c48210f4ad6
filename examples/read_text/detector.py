"""Detection of text lines: the trained network of the package rapidocr-onnxruntime."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from scipy import ndimage

from batchwright import Model, Tensor
from policies.cpus import available_cpus

HEIGHT, WIDTH = 480, 640  # pixels, multiples of 32
TEXT, LINE = 0.3, 0.5  # probabilities from which a pixel, and the mean of a line, is text
GROWTH = 1.6  # the network marks the middle of a line: it grows by this share of area over circumference
LEAST = 3  # pixels, height of a line


def weights_file():
    """The network's file in the package, of which no code is imported."""
    package = find_spec("rapidocr_onnxruntime")
    if package is None or package.origin is None:
        raise ImportError("the weights are missing: pip install rapidocr-onnxruntime")
    return Path(package.origin).parent / "models" / "ch_PP-OCRv4_det_infer.onnx"


class Detector(Model):
    """Boxes of the text lines on a page, from top to bottom: left, top, right, bottom, in pixels."""

    inputs = {"image": Tensor("FP32", [3, HEIGHT, WIDTH])}  # BGR, from -1 to 1
    outputs = {"boxes": Tensor("INT32", [-1, 4])}
    max_batch_size = 8
    threads = max(1, available_cpus() - 1)  # one is left for the server

    def load(self, device):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3
        kind, _, index = device.partition(":")
        gpu = [("CUDAExecutionProvider", {"device_id": index or "0"})] if kind == "cuda" else []
        self.session = onnxruntime.InferenceSession(weights_file(), options, [*gpu, "CPUExecutionProvider"])

    def run(self, image):
        (probabilities,) = self.session.run(None, {"x": image})  # [n, 1, HEIGHT, WIDTH]
        return {"boxes": [self.boxes(page[0]) for page in probabilities]}

    def boxes(self, probability):
        """The boxes of one page, INT32 [n, 4]."""
        labels, _ = ndimage.label(probability > TEXT)
        found = []
        for rows, columns in ndimage.find_objects(labels):
            height, width = rows.stop - rows.start, columns.stop - columns.start
            if height < LEAST or probability[rows, columns].mean() < LINE:
                continue
            grow = round(GROWTH * height * width / (2 * (height + width)))
            left, right = max(0, columns.start - grow), min(WIDTH, columns.stop + grow)
            found.append((left, max(0, rows.start - grow), right, min(HEIGHT, rows.stop + grow)))
        found.sort(key=lambda box: (box[1], box[0]))
        return np.array(found, np.int32).reshape(-1, 4)
