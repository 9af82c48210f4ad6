"""Decoding of images for the compared servers, with the work that ours does for one; needs Pillow only."""

from io import BytesIO

from PIL import Image

_SHORT, _SIDE = 256, 224  # pixels of the shorter side before the centre crop, and after it


def decode(data: bytes) -> bytes:
    """Decode a JPEG or PNG, scale and crop it in one step, and return 224 x 224 RGB pixels."""
    image = Image.open(BytesIO(data))
    image.draft(None, (2 * _SHORT, 2 * _SHORT))
    width, height = image.size
    crop = min(width, height) * _SIDE / _SHORT
    left, top = (width - crop) / 2, (height - crop) / 2
    box = (left, top, left + crop, top + crop)
    return image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, box).tobytes()
