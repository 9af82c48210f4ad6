"""A model as the gateway knows it: its codec (bytes -> pixels), its labels, where its weights came from. No torch."""

import struct
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from server.errors import BadInputError

Pixels = NDArray[np.uint8]

MAX_PIXELS = 50_000_000
EMULATED_CLASSES = 1000
_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CRITICAL = {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
_REMEDY = "send a whole JPEG or PNG"


@dataclass(frozen=True, slots=True)
class ImageCodec:
    """Turns what a client sends into one sample: uint8 [height, width, 3], RGB. Thread-safe: it holds no state.

    Attributes:
        height: of the sample, pixels.
        width: of the sample, pixels.
        resize: to what the picture's shorter side is scaled before the centre crop, pixels; not under height and width.
        interpolation: the filter of that scaling, antialiased either way.
    """

    height: int = 224
    width: int = 224
    resize: int = 256
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sample's shape: height, width, 3."""
        return self.height, self.width, 3

    def read(self, data: bytes) -> Pixels:
        """One sample whose encoding is not declared: H*W*3 bytes without a JPEG's or PNG's beginning are pixels.

        Raises:
            BadInputError: it is neither.
        """
        if len(data) == self.height * self.width * 3 and not data.startswith((_JPEG, _PNG)):
            return self.pixels(data)
        return self.decode(data)

    def pixels(self, data: bytes) -> Pixels:
        """Raw RGB bytes, row by row, as uint8 [height, width, 3]; a view, nothing is copied.

        Raises:
            BadInputError: there are not height * width * 3 bytes.
        """
        expected = self.height * self.width * 3
        if len(data) != expected:
            raise BadInputError(f"pixels take {self.height} x {self.width} x 3 = {expected} bytes, not {len(data)}")
        return np.frombuffer(data, np.uint8).reshape(self.shape)

    def decode(self, data: bytes) -> Pixels:
        """A JPEG or PNG, scaled and cropped as torchvision's classification preset does; EXIF orientation is ignored.

        Raises:
            BadInputError: not a JPEG or PNG, damaged, cut off, or over 50 megapixels (known from the header alone).
        """
        try:
            return self._fit(self._open(data))
        except (BadInputError, MemoryError):
            raise
        except Exception as error:  # damaged bytes make Pillow raise nearly anything
            raise BadInputError(f"the picture cannot be decoded ({_one_line(error)}); {_REMEDY}") from error

    def _open(self, data: bytes) -> Image.Image:
        """The picture as RGB; a large JPEG is decoded at the smallest scale that leaves twice the resize target."""
        if data.startswith(_JPEG):
            image: Image.Image = _Jpeg(BytesIO(data))
        elif data.startswith(_PNG):
            image = PngImageFile(BytesIO(_critical_chunks(data)))
        else:
            raise BadInputError(f"{len(data)} bytes that begin with {data[:4]!r} are no JPEG or PNG; {_REMEDY}")
        _check_size(*image.size)
        image.draft(None, (2 * self.resize, 2 * self.resize))
        image.load()
        return _to_rgb(image)

    def _fit(self, image: Image.Image) -> Pixels:
        """Scale and crop in one step: only the crop is ever computed, whatever the picture's proportions."""
        width, height = image.size
        short = min(width, height)
        scaled_width, scaled_height = self.resize * width // short, self.resize * height // short
        left, top = round((scaled_width - self.width) / 2), round((scaled_height - self.height) / 2)
        x, y = width / scaled_width, height / scaled_height
        box = (left * x, top * y, (left + self.width) * x, (top + self.height) * y)
        filter_ = Image.Resampling.BICUBIC if self.interpolation == "bicubic" else Image.Resampling.BILINEAR
        return np.asarray(image.resize((self.width, self.height), filter_, box))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the gateway and the dispatcher know it.

    Attributes:
        name: as in URLs.
        codec: how its input is read.
        labels: one for each class, in the order of the logits.
        weights: "pretrained", "random", "emulated", or the name of the file they came from.
        max_batch_size: the largest batch its device takes.
    """

    name: str
    codec: ImageCodec
    labels: tuple[str, ...]
    weights: str
    max_batch_size: int


def emulated_model(name: str, max_batch_size: int) -> ServedModel:
    """A model without a network, for an emulated device: 224 x 224 pixels in, 1000 classes out."""
    labels = tuple(f"class {index}" for index in range(EMULATED_CLASSES))
    return ServedModel(name, ImageCodec(), labels, "emulated", max_batch_size)


def smooth_pictures(codec: ImageCodec, count: int, rng: np.random.Generator) -> Pixels:
    """Synthetic pictures with the smoothness of natural ones, uint8 [count, height, width, 3].

    Plain noise would drive a network, and a device's power, unlike anything a client sends.
    """
    pictures = np.empty((count, *codec.shape), np.uint8)
    for picture in pictures:
        coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
        fine = rng.integers(-24, 25, codec.shape, np.int16)
        smooth = Image.fromarray(coarse).resize((codec.width, codec.height), Image.Resampling.BICUBIC)
        picture[:] = np.clip(np.asarray(smooth) + fine, 0, 255)
    return pictures


class _Jpeg(JpegImageFile):
    """Pillow's JPEG without its look into the EXIF block, the only place where it warns about damaged ones."""

    def _read_dpi_from_exif(self) -> None:
        return


def _critical_chunks(data: bytes) -> bytes:
    """The PNG without its ancillary chunks: they hold what Pillow warns about, and text that unpacks to megabytes.

    Checksums are compared here, since Pillow skips those of the pixels.
    """
    parts, start = [_PNG], len(_PNG)
    while start + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, start)
        stop = start + 12 + length
        if kind in _PNG_CRITICAL:
            if data[stop - 4 : stop] != zlib.crc32(data[start + 4 : stop - 4]).to_bytes(4, "big"):
                break
            parts.append(data[start:stop])
        if kind == b"IEND":
            return b"".join(parts)
        start = stop
    raise BadInputError(f"the PNG of {len(data)} bytes is damaged or cut off at byte {start}; {_REMEDY}")


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        size, bound = f"{width} x {height} = {width * height / 1e6:.1f} megapixels", MAX_PIXELS // 1_000_000
        raise BadInputError(f"the picture has {size}, over the bound of {bound}; send it scaled down")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
