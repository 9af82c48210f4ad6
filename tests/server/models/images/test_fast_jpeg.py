"""JPEGs decoded by simplejpeg, or by Pillow where that cannot: the same samples within the preset's tolerance."""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from server.errors import BadInputError
from server.models.images import codec
from server.models.images.codec import ImageCodec, Pixels, synthetic_images

CODEC = ImageCodec()


class StandIn:
    """simplejpeg's interface, by Pillow."""

    def __init__(self) -> None:
        self.decoded = 0
        self.error: Exception | None = None
        self.cut = 0

    def __call__(self, data: bytes, colorspace: str, *, min_height: int, min_width: int) -> NDArray[np.uint8]:
        if self.error is not None:
            raise self.error
        image = Image.open(BytesIO(data))
        image.draft(None, (min_width, min_height))
        assert colorspace == "RGB"
        self.decoded += 1
        return np.asarray(image)[self.cut :]


@pytest.fixture(params=["stand-in", "simplejpeg"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    counting = StandIn()
    if request.param == "simplejpeg":
        real = pytest.importorskip("simplejpeg", reason="the extra fast-jpeg is not installed")

        def decode(*arguments: Any, **options: Any) -> Any:
            if counting.error is not None:
                raise counting.error
            decoded = real.decode_jpeg(*arguments, **options)
            counting.decoded += 1
            return decoded[counting.cut :]

        monkeypatch.setattr(codec, "decode_jpeg", decode)
    else:
        monkeypatch.setattr(codec, "decode_jpeg", counting)
    return counting


def encoded(height: int, width: int, mode: str = "RGB", **options: Any) -> bytes:
    scene = synthetic_images(ImageCodec(height, width), 1, np.random.default_rng(7))[0]
    file = BytesIO()
    Image.fromarray(scene).convert(mode).save(file, "JPEG", **{"quality": 90} | options)
    return file.getvalue()


def decode(data: bytes) -> Pixels:
    return CODEC.decode(data, CODEC.decode_cost(data))


def by_pillow(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Pixels:
    with monkeypatch.context() as patch:
        patch.setattr(codec, "decode_jpeg", None)
        return decode(data)


@pytest.mark.parametrize(
    ("height", "width", "options"),
    [
        (375, 500, {}),
        (375, 500, {"subsampling": 0}),
        (375, 500, {"subsampling": 1, "quality": 30}),
        (257, 999, {}),
        (1201, 1601, {}),
        (2400, 3203, {"quality": 70}),
        (300, 300, {"keep_rgb": True}),
    ],
)
def test_the_sample_is_that_of_pillow(
    height: int, width: int, options: dict[str, Any], decoder: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(height, width, **options)
    fast = decode(data)
    assert decoder.decoded == 1
    assert np.abs(fast.astype(int) - by_pillow(data, monkeypatch)).max() <= 1


@pytest.mark.parametrize("make", [lambda: encoded(300, 400, "L"), lambda: encoded(300, 400, "CMYK")])
def test_pictures_in_other_colours_are_decoded_by_pillow(
    make: Callable[[], bytes], decoder: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make()
    assert np.array_equal(decode(data), by_pillow(data, monkeypatch))
    assert decoder.decoded == 0


def test_progressive_pictures_are_decoded_by_pillow(decoder: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(300, 400, progressive=True)
    assert np.array_equal(decode(data), by_pillow(data, monkeypatch))
    assert decoder.decoded == 0


def test_what_it_refuses_or_decodes_to_another_size_is_decoded_by_pillow(
    decoder: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(300, 400)
    expected = by_pillow(data, monkeypatch)
    decoder.error = ValueError("Corrupt JPEG data: 3 extraneous bytes before marker 0xd9")
    assert np.array_equal(decode(data), expected)
    decoder.error, decoder.cut = None, 1
    assert np.array_equal(decode(data), expected)


def test_a_picture_that_is_cut_off_is_refused(decoder: StandIn) -> None:
    data = encoded(300, 400)
    with pytest.raises(BadInputError):
        decode(data[: len(data) // 2])
