"""Networks cut into stages: stage by stage is the whole."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.types import SpecError
from server.models.torchvision_source import Stages, load
from server.models.torchvision_stages import even_cuts

PICTURES = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "stages"), [("googlenet", 4), ("resnet18", 9), ("vgg11", 3)])
@torch.inference_mode()
def test_stage_by_stage_equals_the_whole(name: str, stages: int) -> None:
    _, whole = load(name, "random")
    _, staged = load(name, "random", stages=stages)
    assert isinstance(staged.net, Stages)
    assert len(staged.net) == stages
    expected = whole(PICTURES)
    x = staged.normalised(PICTURES)
    for stage in range(stages):
        x = staged.part(x, stage, 1)
    scale = float(expected.abs().max())
    assert torch.allclose(x, expected, rtol=0, atol=1e-6 * max(1.0, scale))
    assert torch.equal(staged.part(staged.normalised(PICTURES), 0, None), x)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=9), st.data())
def test_the_heaviest_stage_is_as_light_as_can_be(work: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(work)))

    def heaviest(ends: tuple[int, ...]) -> float:
        return max(sum(work[start:end]) for start, end in pairwise([0, *ends]))

    ends = tuple(even_cuts(work, parts))
    assert len(ends) == parts
    assert ends[-1] == len(work)
    assert all(start < end for start, end in pairwise([0, *ends]))
    least = min(heaviest((*inner, len(work))) for inner in combinations(range(1, len(work)), parts - 1))
    assert heaviest(ends) == pytest.approx(least)


def test_too_many_stages_and_networks_that_cannot_be_cut_are_named() -> None:
    with pytest.raises(SpecError, match="resnet18 has 9 blocks, so it cannot be cut into 10 stages"):
        load("resnet18", "random", stages=10)
    with pytest.raises(SpecError, match="mobilenet_v3_small cannot be cut into stages"):
        load("mobilenet_v3_small", "random", stages=2)
