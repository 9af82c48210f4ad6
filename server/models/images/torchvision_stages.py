"""Splitting torchvision networks into stages: consecutive parts of about equal work."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from policies.types import SpecError


def split_into_stages(name: str, net: nn.Module, stages: int, shape: tuple[int, int, int]) -> list[nn.Module]:
    """Split a network whose batch normalisation is not folded yet into stages of about equal work.

    Work is the number of multiply-adds for one sample. Unlike times it is the same at every start, so that the stages
    of a profile are always the same parts.

    Args:
        name: the model's name, for messages.
        net: in eval mode, on the CPU.
        stages: number of stages, at least 1.
        shape: of one sample, (height, width, channels).

    Raises:
        SpecError: the network cannot be split, or has fewer blocks than stages.
    """
    if stages == 1:
        return [net]
    blocks = _blocks(name, net)
    if stages > len(blocks):
        raise SpecError(f"{name} has {len(blocks)} blocks, so it cannot be split into {stages} stages; give fewer")
    height, width, channels = shape
    ends = balanced_split(_work(blocks, torch.zeros(1, channels, height, width)), stages)
    return [nn.Sequential(*blocks[start:end]) for start, end in pairwise([0, *ends])]


def balanced_split(work: Sequence[float], parts: int) -> list[int]:
    """The ends of consecutive, non-empty parts that minimise the largest part's work, by dynamic programming."""
    upto = [0.0, *accumulate(work)]
    n = len(work)
    # best[k][j]: the minimal largest work of k + 1 parts of the first j, and the start of the last of them
    best = [[(upto[j], 0) for j in range(n + 1)]]
    for k in range(1, parts):
        before = best[-1]
        best.append(
            [
                min(((max(before[i][0], upto[j] - upto[i]), i) for i in range(k, j)), default=(float("inf"), 0))
                for j in range(n + 1)
            ]
        )
    ends = [n]
    for row in reversed(best[1:]):
        ends.append(row[ends[-1]][1])
    return ends[::-1]


def _blocks(name: str, net: Any) -> list[nn.Module]:
    """The smallest parts whose only connection to what follows is one tensor."""
    families: dict[str, Callable[[Any], list[nn.Module]]] = {"GoogLeNet": _googlenet, "ResNet": _resnet, "VGG": _vgg}
    family = families.get(type(net).__name__)
    if family is None:
        raise SpecError(f"{name} cannot be split into stages; give a GoogLeNet, ResNet or VGG, or leave out --stages")
    return family(net)


def _googlenet(net: Any) -> list[nn.Module]:
    third, fourth, fifth = (
        [module for key, module in net.named_children() if key.startswith(f"inception{n}")] for n in "345"
    )
    return [
        nn.Sequential(net.conv1, net.maxpool1),
        nn.Sequential(net.conv2, net.conv3, net.maxpool2),
        *_with_last(third, net.maxpool3),
        *_with_last(fourth, net.maxpool4),
        *_with_last(fifth, nn.Sequential(net.avgpool, nn.Flatten(1), net.fc)),
    ]


def _resnet(net: Any) -> list[nn.Module]:
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    return [
        nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool),
        *_with_last(blocks, nn.Sequential(net.avgpool, nn.Flatten(1), net.fc)),
    ]


def _vgg(net: Any) -> list[nn.Module]:
    """One block per convolution."""
    layers = list(net.features)
    starts = [index for index, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    convolutions = [nn.Sequential(*layers[start:end]) for start, end in pairwise([*starts, len(layers)])]
    return [*convolutions, nn.Sequential(net.avgpool, nn.Flatten(1), net.classifier)]


def _with_last(blocks: list[nn.Module], last: nn.Module) -> list[nn.Module]:
    """The blocks, with `last` appended to the last of them."""
    return [*blocks[:-1], nn.Sequential(blocks[-1], last)]


@torch.no_grad()
def _work(blocks: Sequence[nn.Module], x: Tensor) -> list[float]:
    """Multiply-adds of each block for one sample x."""
    counted = [0.0]

    def count(module: nn.Module, _: Any, output: Tensor) -> None:
        weight: Any = module.weight
        counted[-1] += weight[0].numel() * output.numel()

    work = []
    for block in blocks:
        layers = [m for m in block.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        hooks = [layer.register_forward_hook(count) for layer in layers]
        counted[-1] = 0.0
        x = block(x)
        work.append(counted[-1])
        for hook in hooks:
            hook.remove()
    return work
