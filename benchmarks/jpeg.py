"""CPU time of decoding, scaling and cropping a JPEG by Pillow, and by simplejpeg (extra fast-jpeg) in turns."""

import io
import json
import time
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import numpy as np
from PIL import Image

from benchmarks.support.harness import argument_parser, save_record
from server.models.images import codec
from server.models.images.codec import ImageCodec, Pixels, synthetic_images
from server.models.model import DecodeCost

SIZES = ((375, 500), (1200, 1600), (2000, 3000))
_REPEATS = 40


def _milliseconds(decode: Callable[[], object]) -> float:
    began = time.thread_time()
    decode()
    return 1e3 * (time.thread_time() - began)


def main() -> None:
    """Print and record the medians for photographs of several sizes."""
    argument_parser(__doc__).parse_args()
    try:
        from simplejpeg import decode_jpeg as fast
    except ImportError:
        print('skipped: simplejpeg is not installed (pip install ".[fast-jpeg]")')
        return
    preset, record = ImageCodec(), {}
    for height, width in SIZES:
        buffer = io.BytesIO()
        scene = synthetic_images(ImageCodec(height, width), 1, np.random.default_rng(7))[0]
        Image.fromarray(scene).save(buffer, "JPEG", quality=90)
        data = buffer.getvalue()
        cost = preset.decode_cost(data)

        def decode(by: object, data: bytes = data, cost: DecodeCost = cost) -> Pixels:
            with patch.object(codec, "decode_jpeg", by):
                return preset.decode(data, cost)

        pairs = [(_milliseconds(lambda: decode(None)), _milliseconds(lambda: decode(fast))) for _ in range(_REPEATS)]
        difference = np.abs(decode(None).astype(int) - decode(fast)).max()
        record[f"{width} x {height}"] = {
            "bytes": len(data),
            "pillow_ms": round(median(pair[0] for pair in pairs), 2),
            "simplejpeg_ms": round(median(pair[1] for pair in pairs), 2),
            "ratio": round(median(pair[0] / pair[1] for pair in pairs), 2),
            "largest_difference": int(difference),
        }
    save_record("jpeg", record)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
