"""The image codec: preprocessing as in torchvision's preset, rejected images, and costs of decoding."""

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image

from server.errors import BadInputError
from server.models.images.codec import ImageCodec, Pixels, emulated_model, synthetic_images
from server.models.model import Inputs
from server.models.signature import RAW, Tensor

CODEC = ImageCodec()
SCENE = synthetic_images(ImageCodec(300, 400), 1, np.random.default_rng(7))[0]


def decode(data: bytes, codec: ImageCodec = CODEC) -> Pixels:
    return codec.decode(data, codec.decode_cost(data))


def encoded(pixels: Any, format_: str, mode: str = "", **options: Any) -> bytes:
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, format_, **options)
    return file.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_with(extra: bytes) -> bytes:
    """A valid PNG with further chunks right after its header."""
    whole = encoded(SCENE, "PNG")
    return whole[:33] + extra + whole[33:]


def reference(image: Image.Image, codec: ImageCodec) -> Pixels:
    """Resize the shorter side, then crop, as the preset does in two steps."""
    scale = codec.resize / min(image.size)
    size = int(image.width * scale), int(image.height * scale)
    scaled = image.resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - codec.width) / 2), round((size[1] - codec.height) / 2)
    return np.asarray(scaled.crop((left, top, left + codec.width, top + codec.height)))


@pytest.mark.parametrize("format_", ["JPEG", "PNG"])
def test_an_image_is_scaled_and_cropped_as_in_the_preset(format_: str) -> None:
    data = encoded(SCENE, format_)
    sample = decode(data)
    assert sample.shape == (224, 224, 3)
    assert sample.dtype == np.uint8
    expected = reference(Image.open(io.BytesIO(data)), CODEC).astype(int)
    assert np.abs(sample - expected).max() <= 1  # one step rounds once, two steps round twice


def test_a_large_jpeg_decoded_at_a_smaller_scale_gives_the_same_sample() -> None:
    scene = synthetic_images(ImageCodec(2400, 3200), 1, np.random.default_rng(8))[0]
    data = encoded(scene, "JPEG")
    expected = reference(Image.fromarray(scene), CODEC).astype(int)
    assert np.abs(decode(data) - expected).mean() < 3.0  # JPEG's own loss is about 2


@pytest.mark.parametrize(
    ("format_", "mode"), [("JPEG", "L"), ("JPEG", "CMYK"), *(("PNG", mode) for mode in ("L", "LA", "RGBA", "P", "1"))]
)
def test_every_colour_mode_becomes_rgb(format_: str, mode: str) -> None:
    sample = decode(encoded(SCENE, format_, mode))
    assert sample.shape == (224, 224, 3)
    assert (
        abs(float(sample.mean()) - float(SCENE.mean())) < 12.0
    )  # the crop and the weights of colours in grey change the mean


def test_sixteen_bit_grey_keeps_its_shades() -> None:
    grey = (np.asarray(Image.fromarray(SCENE).convert("L")).astype(np.uint16) << 8) + 77
    expected = decode(encoded((grey >> 8).astype(np.uint8), "PNG"))
    assert np.array_equal(decode(encoded(grey, "PNG")), expected)


def test_the_orientation_tag_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert np.array_equal(decode(encoded(SCENE, "JPEG", exif=exif)), decode(encoded(SCENE, "JPEG")))


def test_damaged_exif_gives_no_warning() -> None:
    broken = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + 40 * b"\xfe"
    assert decode(encoded(SCENE, "JPEG", exif=broken)).shape == (224, 224, 3)


def test_damaged_ancillary_png_chunks_give_no_warning() -> None:
    animation = chunk(b"acTL", struct.pack(">II", 0, 0))
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(4_000_000)))
    assert np.array_equal(decode(png_with(animation + bomb)), decode(encoded(SCENE, "PNG")))


@pytest.mark.parametrize("format_", ["JPEG", "PNG"])
@pytest.mark.parametrize("missing", [1, 2, 12, 100, 0.1, 0.5, 0.99])
def test_a_truncated_image_is_rejected(format_: str, missing: float) -> None:
    data = encoded(SCENE, format_)
    stop = -int(missing if missing >= 1 else len(data) * missing)
    with pytest.raises(BadInputError, match="send a complete JPEG or PNG"):
        decode(data[:stop])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an image",
        b"\xff\xd8\xff" + bytes(100),
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bytes(13)) + chunk(b"IEND", b""),
        encoded(SCENE, "GIF"),
        encoded(SCENE, "BMP"),
        encoded(SCENE, "TIFF"),
        encoded(SCENE, "WEBP"),
        encoded(SCENE, "PNG")[:-40] + bytes(28) + chunk(b"IEND", b""),
    ],
)
def test_other_formats_and_damaged_images_are_bad_input_with_a_message_of_one_line(data: bytes) -> None:
    with pytest.raises(BadInputError) as caught:
        decode(data)
    assert "\n" not in str(caught.value)


def test_random_damage_gives_bad_input_or_a_sample() -> None:
    rng = np.random.default_rng(3)
    for data in (encoded(SCENE, "JPEG"), encoded(SCENE, "PNG")):
        assert decode(data).shape == (224, 224, 3), "else a decoder that rejects everything would pass"
        for _ in range(60):
            damaged = bytearray(data)
            for position in rng.integers(0, min(len(data), 2000), 3):
                damaged[position] = rng.integers(256)
            with suppress(BadInputError):
                assert CODEC.decode_cost(bytes(damaged)).pixels <= 50_000_000
            with suppress(BadInputError):
                assert decode(bytes(damaged)).shape == (224, 224, 3)


def test_more_than_fifty_megapixels_are_rejected_by_the_header() -> None:
    header = struct.pack(">IIBBBBB", 10_000, 5_001, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"never read") + chunk(b"IEND", b"")
    with pytest.raises(BadInputError, match=r"10000 x 5001 = 50\.0 megapixels, over the maximum of 50"):
        decode(data)


def with_scans(more: int) -> bytes:
    """A progressive JPEG whose last scan is repeated `more` times, which leaves the image unchanged."""
    whole = encoded(np.full((300, 300), 128, np.uint8), "JPEG", progressive=True, quality=50)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * more + b"\xff\xd9"


def test_a_jpeg_of_many_scans_is_rejected_before_it_is_decoded() -> None:
    for more in (101, 2000):
        with pytest.raises(BadInputError, match=r"over 100 scans; save it with fewer, or not progressive"):
            decode(with_scans(more))
    assert np.array_equal(decode(with_scans(80)), decode(with_scans(0)))


def test_only_scans_that_the_decoder_reads_are_counted() -> None:
    plain = encoded(SCENE, "JPEG")
    scans = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" * 300
    comment = b"\xff\xe1" + (len(scans) + 2).to_bytes(2, "big") + scans
    assert np.array_equal(decode(plain[:2] + comment + plain[2:] + scans), decode(plain))
    for length in (0, 1):  # libjpeg would read such a segment differently
        broken = b"\xff\xe1" + length.to_bytes(2, "big")
        with pytest.raises(BadInputError, match="damaged or cut off"):
            decode(plain[:2] + broken + plain[2:])


def test_application_segments_of_a_jpeg_change_nothing() -> None:
    for mode in ("RGB", "L", "CMYK"):
        plain = encoded(SCENE, "JPEG", mode)
        noted = encoded(SCENE, "JPEG", mode, comment=b"a note", icc_profile=bytes(100_000), xmp=b"<x/>", dpi=(72, 72))
        assert np.array_equal(decode(noted), decode(plain))


@pytest.mark.parametrize(
    "data",
    [
        encoded(SCENE, "JPEG")[:2] + b"\xff\xfe\x00\x02" * 70_000 + encoded(SCENE, "JPEG")[2:],
        png_with(chunk(b"tEXt", b"") * 70_000),
    ],
)
def test_an_image_with_too_many_segments_or_chunks_is_rejected(data: bytes) -> None:
    with pytest.raises(BadInputError, match="damaged or cut off at byte"):
        decode(data)


@pytest.mark.parametrize(
    ("format_", "mode", "options", "per_pixel"),
    [
        ("PNG", "RGB", {}, 4),
        ("PNG", "RGBA", {}, 8),
        ("JPEG", "RGB", {}, 4),
        ("JPEG", "RGB", {"progressive": True}, 10),
        ("JPEG", "L", {}, 8),
        ("JPEG", "CMYK", {"progressive": True}, 16),
    ],
)
def test_the_header_gives_the_memory_that_decoding_takes(
    format_: str, mode: str, options: dict[str, Any], per_pixel: int
) -> None:
    data = encoded(SCENE, format_, mode, **options)
    cost = CODEC.decode_cost(data)
    assert cost.pixels == 300 * 400
    assert cost.memory == per_pixel * 300 * 400 + len(data)


def test_a_large_jpeg_takes_the_memory_of_its_smaller_scale() -> None:
    data = encoded(np.zeros((4096, 4096, 3), np.uint8), "JPEG")
    assert CODEC.decode_cost(data).memory == 4 * 512 * 512 + len(data)


def test_an_image_with_two_sizes_is_rejected() -> None:
    second = chunk(b"IHDR", struct.pack(">IIBBBBB", 7000, 7000, 8, 2, 0, 0, 0))
    assert np.array_equal(decode(png_with(second)), decode(encoded(SCENE, "PNG")))
    plain = encoded(SCENE, "JPEG")
    at = plain.index(b"\xff\xc0")
    frame = bytearray(plain[at : at + 19])
    frame[5:9] = struct.pack(">HH", 7000, 7000)
    data = plain[:at] + frame + plain[at:]
    assert CODEC.decode_cost(data).pixels == 300 * 400, "the size that Pillow takes"
    with pytest.raises(BadInputError):
        decode(data)
    hidden = plain[:at] + frame + b"\xff\xda\x00\x02" + plain[at:]  # Pillow reads the header up to this scan
    with pytest.raises(BadInputError, match="two sizes, one is 7000 x 7000"):
        decode(hidden)


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 20_000, 3), (20_000, 2, 3), (224, 224, 3)])
def test_any_aspect_ratio_is_scaled_without_a_large_intermediate_image(shape: tuple[int, ...]) -> None:
    assert decode(encoded(np.full(shape, 90, np.uint8), "PNG")).mean() == 90.0


def test_pixels_are_read_unchanged() -> None:
    raw = SCENE[:224, :224].tobytes()
    assert np.array_equal(CODEC.read_pixels(raw), SCENE[:224, :224])
    with pytest.raises(BadInputError, match=r"224 x 224 x 3 = 150528 bytes, not 3"):
        CODEC.read_pixels(b"abc")


def test_a_raw_body_is_pixels_only_at_the_right_length_and_without_a_magic_number() -> None:
    def read(data: bytes) -> Inputs:
        return CODEC.from_tensors({"image": Tensor("image", RAW, (1,), data)})

    raw = SCENE[:224, :224].tobytes()
    (pixels,) = read(raw).read()
    assert np.array_equal(pixels, CODEC.read_pixels(raw))
    assert not read(raw).encoded
    jpeg = encoded(SCENE, "JPEG")
    assert read(jpeg).encoded == [jpeg]
    for magic in (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"):
        (image,) = read(magic + raw[len(magic) :]).encoded
        with pytest.raises(BadInputError):
            decode(image)


def test_a_codec_is_thread_safe() -> None:
    scenes = [encoded(s, "JPEG") for s in synthetic_images(ImageCodec(300, 300), 8, np.random.default_rng(1))]
    alone = [decode(data) for data in scenes]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(decode, scenes * 4))
    assert all(np.array_equal(a, b) for a, b in zip(alone * 4, together, strict=True))


def test_synthetic_images_are_reproducible_and_differ() -> None:
    first, again = (synthetic_images(CODEC, 2, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(first, again)
    assert np.abs(first[0].astype(int) - first[1]).mean() > 20


def test_an_emulated_model_has_a_thousand_classes() -> None:
    model = emulated_model("anything", 8)
    assert (model.labels[0], model.labels[-1], len(model.labels)) == ("class 0", "class 999", 1000)
    assert (model.weights, model.max_batch_size, model.codec.shape) == ("emulated", 8, (224, 224, 3))


def test_each_scan_of_a_progressive_jpeg_counts_as_work() -> None:
    few, many = CODEC.decode_cost(with_scans(0)), CODEC.decode_cost(with_scans(80))
    assert few.pixels == many.pixels == 300 * 300
    assert many.work - few.work == 80 * few.pixels // 8
    baseline = CODEC.decode_cost(encoded(SCENE, "JPEG"))
    assert baseline.work == baseline.pixels
    assert CODEC.decode_cost(encoded(SCENE, "PNG")).work == baseline.pixels
