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
def few_calibration_images() -> Iterator[None]:
    """Calibrate random weights of image models on two images instead of eight, which take most of the loading."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("server.models.images.torchvision_source._CALIBRATION_IMAGES", 2)
        yield
