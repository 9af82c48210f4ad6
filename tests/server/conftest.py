"""Fixtures of the tests with connections."""

import logging
from collections.abc import Iterator

import pytest

from tests.support.inference_server import LOOPS


@pytest.fixture
def quiet() -> Iterator[None]:
    """Log nothing."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> str:
    """Each kind of event loop in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def small_images_in_the_module() -> Iterator[None]:
    """Load image models for images of 96 x 96 pixels instead of 224 x 224, which take a fifth of the arithmetic."""
    with pytest.MonkeyPatch.context() as patched:
        _reduce_images(patched)
        yield


@pytest.fixture
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `small_images_in_the_module`, in one test."""
    _reduce_images(monkeypatch)


def _reduce_images(patch: pytest.MonkeyPatch) -> None:
    from server.models.images import torchvision_source
    from server.models.images.codec import ImageCodec

    patch.setattr(torchvision_source, "ImageCodec", lambda _, __, ___, filter_: ImageCodec(96, 96, 96, filter_))


@pytest.fixture(scope="module")
def few_calibration_images() -> Iterator[None]:
    """Calibrate random weights of image models on two images instead of eight, which take most of the loading."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("server.models.images.torchvision_source._CALIBRATION_IMAGES", 2)
        yield
