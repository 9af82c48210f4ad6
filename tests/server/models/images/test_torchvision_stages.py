"""Networks split into stages compute the same as the whole."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from policies.types import SpecError
from server.models.images.torchvision_source import Stages, load_image_model
from server.models.images.torchvision_stages import balanced_split

IMAGES = torch.randint(0, 256, (2, 96, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def repeated_numbers(weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Kaiming weights as those of nn.init, but only the first 65,536 numbers are drawn: VGG has 130 million weights."""
    numbers = torch.randn(min(weight.numel(), 2**16)) * (2.0 / weight[0].numel()) ** 0.5
    flat = weight.detach().view(-1)
    for start in range(0, len(flat), len(numbers)):
        part = flat[start : start + len(numbers)]
        part.copy_(numbers[: len(part)])
    return weight


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), [("googlenet", 4), ("resnet18", 9), ("vgg11", 3)])
@pytest.mark.usefixtures("few_calibration_images", "small_images")
@torch.inference_mode()
def test_the_stages_in_order_equal_the_whole(name: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for own in ("kaiming_uniform_", "normal_"):  # torchvision's initialisation, which Kaiming weights replace
        monkeypatch.setattr(nn.init, own, lambda weight, *_, **__: weight)
    monkeypatch.setattr(nn.init, "kaiming_normal_", repeated_numbers)
    _, whole = load_image_model(name, "random")
    _, staged = load_image_model(name, "random", stages=stages)
    assert isinstance(staged.net, Stages)
    assert len(staged.net) == stages
    expected = whole(IMAGES)
    x = staged.normalise(IMAGES)
    for stage in range(stages):
        x = staged.run_stages(x, stage, 1)
    scale = float(expected.abs().max())
    assert torch.allclose(x, expected, rtol=0, atol=1e-6 * max(1.0, scale))
    assert torch.equal(staged.run_stages(staged.normalise(IMAGES), 0, None), x)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=9), st.data())
def test_the_split_minimises_the_largest_work(work: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(work)))

    def largest(ends: tuple[int, ...]) -> float:
        return max(sum(work[start:end]) for start, end in pairwise([0, *ends]))

    ends = tuple(balanced_split(work, parts))
    assert len(ends) == parts
    assert ends[-1] == len(work)
    assert all(start < end for start, end in pairwise([0, *ends]))
    minimum = min(largest((*inner, len(work))) for inner in combinations(range(1, len(work)), parts - 1))
    assert largest(ends) == pytest.approx(minimum)


def test_too_many_stages_and_networks_that_cannot_be_split_are_rejected() -> None:
    with pytest.raises(SpecError, match="resnet18 has 9 blocks, so it cannot be split into 10 stages"):
        load_image_model("resnet18", "random", stages=10)
    with pytest.raises(SpecError, match="mobilenet_v3_small cannot be split into stages"):
        load_image_model("mobilenet_v3_small", "random", stages=2)
