"""The codec of image classifiers: decoding and preprocessing of JPEG, PNG and pixels. Without torch."""

import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from server.errors import BadInputError, one_line
from server.models.form import Form, FormField
from server.models.model import Codec, DecodeCost, Inputs, ServedModel
from server.models.signature import Signature, Tensor, TensorSpec

Pixels = NDArray[np.uint8]

MAX_PIXELS = 50_000_000
EMULATED_CLASSES = 1000
_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CRITICAL = {b"PLTE", b"IDAT", b"IEND"}  # and IHDR, which is the first chunk
_MAX_CHUNKS = 2**16  # of a PNG; each takes a few microseconds, even if it is empty
_MAX_SEGMENTS = 2**12  # of a JPEG; this many of 64 KiB, as encoders write them, exceed the maximum body
_MAX_SCANS = 100  # of a JPEG; encoders write about 10, and decoding takes time for all pixels in each, even if empty
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # starts a segment, or ends the image
_EOI, _SOS, _PIXELS = 0xD9, 0xDA, 0x00
_SCAN = b"\xff\xda"  # marker of a scan; those of a thumbnail in the metadata are counted too
_SOF = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_ANCILLARY = {*range(0xE1, 0xEE), 0xEF, 0xFE}  # comments and APPn, except JFIF's and Adobe's, which define the colours
_REMEDY = "send a complete JPEG or PNG"


@dataclass(frozen=True, slots=True)
class ImageCodec(Codec):
    """Images as uint8 [height, width, 3], RGB, one per sample; logits as output.

    Attributes:
        height: of a sample, pixels.
        width: of a sample, pixels.
        resize: length to which the image's shorter side is scaled before the centre crop, pixels; at least height and
            width.
        interpolation: the filter of that scaling, with antialiasing.
    """

    height: int = 224
    width: int = 224
    resize: int = 256
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    form_field: ClassVar[str | None] = "image"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a sample: height, width, 3."""
        return self.height, self.width, 3

    def signature(self, labels: int) -> Signature:
        """Pixels, or encoded images; logits."""
        image = TensorSpec("image", {"UINT8": self.shape, "BYTES": ()})
        return Signature((image,), (TensorSpec("logits", {"FP32": (labels,)}),))

    def metadata_parameters(self) -> dict[str, Any]:
        """That the orientation in a photo's EXIF data is ignored, as torchvision's loaders do."""
        return {"exif_orientation": "ignored"}

    def from_body(self, body: bytes, _: str) -> Inputs:
        """One encoded image."""
        return self._encoded([body])

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> Inputs:
        """Pixels, encoded images, or a raw body that is either.

        A raw body is pixels if it has height * width * 3 bytes and does not start like a JPEG or PNG.
        """
        tensor = tensors["image"]
        data = tensor.data
        if isinstance(data, np.ndarray):
            return Inputs(len(data), lambda: list(data))
        if isinstance(data, list):
            return self._encoded(data)
        if len(data) == math.prod(self.shape) and not bytes(data[: len(_PNG)]).startswith((_JPEG, _PNG)):
            return Inputs(1, lambda: [self.read_pixels(data)])
        return self._encoded([bytes(data)])

    def _encoded(self, images: Sequence[bytes]) -> Inputs:
        return Inputs(len(images), list, memory=len(images) * math.prod(self.shape), encoded=images)

    def emulate(self, sample: Any) -> NDArray[np.float32]:
        """Return logits: noise, rotated and scaled by a checksum of every 509th byte, which nearly always differs.

        Only some bytes are read because an emulated device shares the interpreter with the event loop.
        """
        checksum = zlib.crc32(sample.reshape(-1)[::509].tobytes())
        offset, scale = checksum % EMULATED_CLASSES, 1.0 + checksum // EMULATED_CLASSES % 997 / 997
        return _noise()[offset : offset + EMULATED_CLASSES] * np.float32(scale)

    def synthetic_samples(self, count: int, rng: np.random.Generator, _: int | None = None) -> list[Any]:
        """Make images as smooth as natural ones."""
        return list(synthetic_images(self, count, rng))

    def read_pixels(self, data: bytes | memoryview) -> Pixels:
        """Raw RGB bytes, row by row, as uint8 [height, width, 3]; a view without a copy.

        Raises:
            BadInputError: there are not height * width * 3 bytes.
        """
        expected = math.prod(self.shape)
        if len(data) != expected:
            raise BadInputError(f"pixels take {self.height} x {self.width} x 3 = {expected} bytes, not {len(data)}")
        return np.frombuffer(data, np.uint8).reshape(self.shape)

    def decode_cost(self, data: bytes, /) -> DecodeCost:
        """Read the cost of decoding a JPEG or PNG from its header and, if it is progressive, from its scan markers.

        Raises:
            BadInputError: the image is neither JPEG nor PNG, is cut off in its header, or is over 50 megapixels.
        """
        if data.startswith(_JPEG):
            width, height, scans, decoded = self._measure_jpeg(data)
        elif data.startswith(_PNG):
            scans, (width, height, decoded) = 0, _measure_png(data)
        else:
            raise BadInputError(f"{len(data)} bytes that start with {data[:4]!r} are not a JPEG or PNG; {_REMEDY}")
        _check_size(width, height)
        pixels = width * height
        # the second term is the copy of the encoded image that `decode` makes without ancillary parts
        return DecodeCost(pixels, pixels + pixels * scans // 8, decoded + len(data))

    def decode(self, data: bytes, cost: DecodeCost, /) -> Pixels:
        """Decode a JPEG or PNG, scaled and cropped as in torchvision's classification preset, without EXIF orientation.

        Raises:
            BadInputError: the image is damaged, cut off, or has too many parts.
        """
        try:
            return self._fit(self._open(data, cost.pixels))
        except (BadInputError, MemoryError):
            raise
        except Exception as error:  # Pillow may raise anything on damaged bytes
            raise BadInputError(f"the image cannot be decoded ({one_line(error)}); {_REMEDY}") from error

    def _open(self, data: bytes, pixels: int) -> Image.Image:
        """The image as RGB; a large JPEG is decoded at the smallest scale that is at least twice `resize`."""
        if data.startswith(_JPEG):
            data = _critical_segments(data)
            image: Image.Image = JpegImageFile(BytesIO(data))
        else:
            image = PngImageFile(BytesIO(_critical_chunks(data)))
        if image.width * image.height != pixels:  # nothing is allocated yet
            raise BadInputError(f"the image has two sizes, one is {image.width} x {image.height}; {_REMEDY}")
        image.draft(None, (2 * self.resize, 2 * self.resize))
        image.load()
        return _to_rgb(image)

    def _measure_jpeg(self, data: bytes) -> tuple[int, int, int, int]:
        """Width, height, an upper bound of the number of scans (0 for one), and bytes that decoding takes."""
        kind, (height, width, components), scan = _jpeg_header(data)
        spare = min(width, height) // (2 * self.resize)
        scale = next((power for power in (8, 4, 2) if spare >= power), 1)  # as Pillow's draft mode chooses it
        decoded = -(-width // scale) * -(-height // scale) * (4 if components == 3 else 8)  # and converted to RGB
        if kind not in _PROGRESSIVE and data[scan + 4] >= components:
            return width, height, 0, decoded
        decoded += 2 * components * width * height  # libjpeg keeps all coefficients until the last scan
        return width, height, data.count(_SCAN), decoded

    def _fit(self, image: Image.Image) -> Pixels:
        """Scale and crop in one step, which computes only the crop, whatever the aspect ratio."""
        width, height = image.size
        short = min(width, height)
        scaled_width, scaled_height = self.resize * width // short, self.resize * height // short
        left, top = round((scaled_width - self.width) / 2), round((scaled_height - self.height) / 2)
        x, y = width / scaled_width, height / scaled_height
        box = (left * x, top * y, (left + self.width) * x, (top + self.height) * y)
        filter_ = Image.Resampling.BICUBIC if self.interpolation == "bicubic" else Image.Resampling.BILINEAR
        return np.asarray(image.resize((self.width, self.height), filter_, box))

    def form(self) -> Form:
        """An encoded image."""
        return Form((FormField("image", "file", "JPEG or PNG", "photo.jpg", accept="image/jpeg,image/png"),))


def emulated_model(name: str, max_batch_size: int) -> ServedModel[ImageCodec]:
    """The model of an emulated device, without a network: 224 x 224 pixels in, 1000 classes out."""
    labels = tuple(f"class {index}" for index in range(EMULATED_CLASSES))
    return ServedModel(name, ImageCodec(), labels, "emulated", max_batch_size, "emulated")


@cache
def _noise() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(0.0, 2.0, 2 * EMULATED_CLASSES).astype(np.float32)


def synthetic_images(codec: ImageCodec, count: int, rng: np.random.Generator) -> Pixels:
    """Random images as smooth as natural ones, uint8 [count, height, width, 3].

    Unlike with noise, a network's activations, and so a device's power, are like those of a client's images.
    """
    images = np.empty((count, *codec.shape), np.uint8)
    for image in images:
        coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
        fine = rng.integers(-24, 25, codec.shape, np.int16)
        smooth = Image.fromarray(coarse).resize((codec.width, codec.height), Image.Resampling.BICUBIC)
        image[:] = np.clip(np.asarray(smooth) + fine, 0, 255)
    return images


def _measure_png(data: bytes) -> tuple[int, int, int]:
    """Width, height, and bytes that decoding takes: 4 per pixel, and 4 more if colours are converted."""
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise BadInputError(f"the PNG of {len(data)} bytes does not start with a header; {_REMEDY}")
    width, height, _, colours = struct.unpack_from(">IIBB", data, 16)
    return width, height, width * height * (4 if colours == 2 else 8)


def _critical_chunks(data: bytes) -> bytes:
    """The PNG without its ancillary chunks, on which Pillow emits warnings, or unpacks megabytes of text.

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
    """Marker, start and stop of each segment of the JPEG; after a start of scan, those of its entropy-coded data.

    Bytes between segments, which libjpeg skips, are left out.
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
    """The frame's marker, its (height, width, components), and the offset of the first scan."""
    kind, frame = 0, (0, 0, 0)
    for marker, start, stop in _segments(data):
        if marker in _SOF and stop - start >= 10:
            kind, frame = marker, struct.unpack_from(">HHB", data, start + 5)
        if marker == _SOS and kind and stop > start + 4:
            return kind, frame, start
    raise BadInputError(f"the JPEG of {len(data)} bytes has no frame before its first scan; {_REMEDY}")


def _critical_segments(data: bytes) -> bytes:
    """The JPEG without ancillary segments, on which Pillow emits warnings, and without bytes after its end."""
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
        raise BadInputError(f"the image has {size}, over the maximum of {bound}; scale it down")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow's conversion clips at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")
