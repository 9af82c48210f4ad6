"""Image classifiers: decoding, preprocessing and rendering of predictions. Without torch."""

import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from server.errors import BadInputError
from server.models.model import Codec, Inputs, Measure, ServedModel
from server.models.signature import RAW, Tensor, TensorSpec

Pixels = NDArray[np.uint8]

MAX_PIXELS = 50_000_000
EMULATED_CLASSES = 1000
_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CRITICAL = {b"PLTE", b"IDAT", b"IEND"}  # beside IHDR, which comes first
_MAX_CHUNKS = 2**16  # of a PNG: each takes a few microseconds, however empty it is
_MAX_SEGMENTS = 2**12  # of a JPEG; those of 64 KiB, as encoders write them, would be more than a whole body
_MAX_SCANS = 100  # of a JPEG; encoders write about 10, and each goes over the whole picture, however short it is
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # one that begins a segment, or ends the picture
_EOI, _SOS, _PIXELS = 0xD9, 0xDA, 0x00
_SCAN = b"\xff\xda"  # begins a scan; also in a thumbnail within the metadata, which is counted too
_SOF = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_ANCILLARY = {*range(0xE1, 0xEE), 0xEF, 0xFE}  # all of APPn but JFIF's and Adobe's, which tell the colours; comments
_REMEDY = "send a whole JPEG or PNG"


@dataclass(frozen=True, slots=True)
class ImageCodec(Codec):
    """Images as uint8 [height, width, 3], RGB, one a sample; logits as output.

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

    form_field: ClassVar[str | None] = "image"
    fixed_shape: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sample's shape: height, width, 3."""
        return self.height, self.width, 3

    @property
    def input(self) -> TensorSpec:
        """Pixels, or encoded pictures."""
        return TensorSpec("image", {"UINT8": self.shape, "BYTES": ()})

    def from_body(self, body: bytes) -> Inputs:
        """One encoded picture."""
        return self._encoded([body])

    def from_tensor(self, tensor: Tensor, _: Mapping[str, Tensor], __: Mapping[str, Any]) -> Inputs:
        """Pixels, encoded pictures, or a raw body that is either."""
        data = tensor.data
        if isinstance(data, np.ndarray):
            return Inputs(len(data), lambda: list(data))
        if tensor.datatype == RAW and self.holds_pixels(data[0]):
            return Inputs(1, lambda: [self.pixels(data[0])])
        return self._encoded(data)

    def _encoded(self, pictures: Sequence[bytes]) -> Inputs:
        return Inputs(len(pictures), list, memory=len(pictures) * math.prod(self.shape), encoded=pictures)

    def synthetic_samples(self, count: int, rng: np.random.Generator) -> list[Any]:
        """Pictures with the smoothness of natural ones."""
        return list(smooth_pictures(self, count, rng))

    def read(self, data: bytes) -> Pixels:
        """One sample whose encoding is not declared: H*W*3 bytes without a JPEG's or PNG's beginning are pixels.

        Raises:
            BadInputError: it is neither.
        """
        return self.pixels(data) if self.holds_pixels(data) else self.decode(data)

    def holds_pixels(self, data: bytes) -> bool:
        """Whether bytes whose encoding is not declared are one sample's pixels."""
        return len(data) == self.height * self.width * 3 and not data.startswith((_JPEG, _PNG))

    def pixels(self, data: bytes) -> Pixels:
        """Raw RGB bytes, row by row, as uint8 [height, width, 3]; a view, nothing is copied.

        Raises:
            BadInputError: there are not height * width * 3 bytes.
        """
        expected = self.height * self.width * 3
        if len(data) != expected:
            raise BadInputError(f"pixels take {self.height} x {self.width} x 3 = {expected} bytes, not {len(data)}")
        return np.frombuffer(data, np.uint8).reshape(self.shape)

    def measure(self, data: bytes) -> Measure:
        """What it takes to decode a JPEG or PNG; only its header is read, whose checksums are not compared.

        Raises:
            BadInputError: neither, cut off in its header, or over 50 megapixels.
        """
        if data.startswith(_JPEG):
            width, height, scans, decoded = self._measure_jpeg(data)
        elif data.startswith(_PNG):
            scans, (width, height, decoded) = 0, _measure_png(data)
        else:
            raise BadInputError(f"{len(data)} bytes that begin with {data[:4]!r} are no JPEG or PNG; {_REMEDY}")
        _check_size(width, height)
        # beside the decoded picture there is a copy of the encoded one, without what is not needed
        pixels = width * height
        return Measure(pixels, pixels + pixels * scans // 8, decoded + len(data))

    def decode(self, data: bytes, measure: Measure | None = None) -> Pixels:
        """A JPEG or PNG, scaled and cropped as torchvision's classification preset does; EXIF orientation is ignored.

        Args:
            data: the encoded picture.
            measure: what `measure` returned for it, so that its header is not read again.

        Raises:
            BadInputError: not a JPEG or PNG, damaged, cut off, over 50 megapixels, or made of too many parts.
        """
        try:
            return self._fit(self._open(data, (measure or self.measure(data)).pixels))
        except (BadInputError, MemoryError):
            raise
        except Exception as error:  # damaged bytes make Pillow raise nearly anything
            raise BadInputError(f"the picture cannot be decoded ({_one_line(error)}); {_REMEDY}") from error

    def _open(self, data: bytes, pixels: int) -> Image.Image:
        """The picture as RGB; a large JPEG is decoded at the smallest scale that leaves twice the resize target."""
        if data.startswith(_JPEG):
            image: Image.Image = JpegImageFile(BytesIO(_critical_segments(data)))
        else:
            image = PngImageFile(BytesIO(_critical_chunks(data)))
        if image.width * image.height != pixels:  # nothing was allocated yet
            raise BadInputError(f"the picture has two sizes, {image.width} x {image.height} is one; {_REMEDY}")
        image.draft(None, (2 * self.resize, 2 * self.resize))
        image.load()
        return _to_rgb(image)

    def _measure_jpeg(self, data: bytes) -> tuple[int, int, int, int]:
        """Width, height, the number of scans if there are several (at most), and bytes that decoding takes."""
        kind, (height, width, components), scan = _jpeg_header(data)
        scale = min(width, height) // (2 * self.resize)
        scale = next((power for power in (8, 4, 2) if scale >= power), 1)
        decoded = -(-width // scale) * -(-height // scale) * (4 if components == 3 else 8)  # and as RGB
        if kind not in _PROGRESSIVE and data[scan + 4] >= components:
            return width, height, 0, decoded
        decoded += 2 * components * width * height  # libjpeg keeps all coefficients until the last scan
        return width, height, data.count(_SCAN), decoded

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


def emulated_model(name: str, max_batch_size: int) -> ServedModel[ImageCodec]:
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


def _measure_png(data: bytes) -> tuple[int, int, int]:
    """Width, height, and bytes that decoding takes: 4 a pixel, and 4 more where the colours have to be converted."""
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise BadInputError(f"the PNG of {len(data)} bytes does not begin with a header; {_REMEDY}")
    width, height, _, colours = struct.unpack_from(">IIBB", data, 16)
    return width, height, width * height * (4 if colours == 2 else 8)


def _critical_chunks(data: bytes) -> bytes:
    """The PNG without its ancillary chunks: they hold what Pillow warns about, and text that unpacks to megabytes.

    Checksums are compared here, since Pillow skips those of the pixels.
    """
    parts, start, whole = [memoryview(_PNG)], len(_PNG), memoryview(data)
    for _ in range(_MAX_CHUNKS):
        if start + 12 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, start)
        stop = start + 12 + length
        if kind in _PNG_CRITICAL or start == len(_PNG):
            if data[stop - 4 : stop] != zlib.crc32(whole[start + 4 : stop - 4]).to_bytes(4, "big"):
                break
            parts.append(whole[start:stop])
        if kind == b"IEND":
            return b"".join(parts)
        start = stop
    raise BadInputError(f"the PNG of {len(data)} bytes is damaged or cut off at byte {start}; {_REMEDY}")


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and stop of each of the JPEG's segments; after a start of scan, those of its coded pixels.

    What libjpeg would skip between them is left out.
    """
    at = 2
    for _ in range(_MAX_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None:
            break
        start = found.start()
        marker, length = data[start + 1], int.from_bytes(data[start + 2 : start + 4], "big")
        if marker == _EOI:
            return
        at = start + 2 + length
        if length < 2 or at > len(data):
            break
        yield marker, start, at
        if marker == _SOS:
            found = _MARKER.search(data, at)
            start, at = at, found.start() if found else len(data)
            yield _PIXELS, start, at
    raise BadInputError(f"the JPEG of {len(data)} bytes is damaged or cut off at byte {at}; {_REMEDY}")


def _jpeg_header(data: bytes) -> tuple[int, tuple[int, int, int], int]:
    """The frame's marker, its (height, width, components), and where the first scan starts."""
    kind, frame = 0, (0, 0, 0)
    for marker, start, stop in _segments(data):
        if marker in _SOF and stop - start >= 10:
            kind, frame = marker, struct.unpack_from(">HHB", data, start + 5)
        if marker == _SOS and kind and stop > start + 4:
            return kind, frame, start
    raise BadInputError(f"the JPEG of {len(data)} bytes has no frame before its pixels; {_REMEDY}")


def _critical_segments(data: bytes) -> bytes:
    """The JPEG without its ancillary segments, for what Pillow does with them, and what follows its end."""
    parts, scans, whole = [memoryview(b"\xff\xd8")], 0, memoryview(data)
    for marker, start, stop in _segments(data):
        scans += marker == _SOS
        if scans > _MAX_SCANS:
            raise BadInputError(f"the JPEG has over {_MAX_SCANS} scans; save it with fewer, or not progressive")
        if marker not in _ANCILLARY:
            parts.append(whole[start:stop])
    return b"".join((*parts, b"\xff\xd9"))


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
