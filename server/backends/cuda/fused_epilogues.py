"""Fusion of ReLU, and of the addition before it, into convolutions, which cuDNN then computes in one kernel each."""

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

_RELUS = (functional.relu, torch.relu, "relu", "relu_")
_IMAGE_CHANNELS = 4  # at most; a convolution of so few channels is the stem of a network of images
_ADDS = (operator.add, operator.iadd, torch.add, "add", "add_")


class FusedConv(nn.Module):
    """relu(conv(x) + other): one kernel on CUDA, and the reference operators elsewhere."""

    def __init__(self, conv: nn.Conv2d) -> None:
        """Use the weights of `conv`."""
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Compute; `other` has the shape of the output."""
        conv = self.conv
        if not x.is_cuda:
            y = conv(x)
            return functional.relu(y if other is None else y + other)
        assert not isinstance(conv.padding, str)
        settings = conv.stride, conv.padding, conv.dilation, conv.groups
        if other is None:
            return torch.cudnn_convolution_relu(x, conv.weight, conv.bias, *settings)
        return torch.cudnn_convolution_add_relu(x, conv.weight, other, 1.0, conv.bias, *settings)


def fuse_epilogues(net: fx.GraphModule, stem: bool = True) -> fx.GraphModule | None:
    """The network with all such convolutions fused, of the same weights; None if it has none.

    Args:
        net: the network.
        stem: whether convolutions of an image's channels are fused, too.
    """
    fused = fx.GraphModule(net, copy.deepcopy(net.graph))
    count = 0
    for node in [*fused.graph.nodes]:
        found = _operands(fused, node)
        if found is None:
            continue
        conv, other = found
        module = fused.get_submodule(str(conv.target))
        assert isinstance(module, nn.Conv2d)
        if not stem and module.in_channels <= _IMAGE_CHANNELS:
            continue
        fused.add_module(f"fused_{count}", FusedConv(module))
        with fused.graph.inserting_before(node):
            made = fused.graph.call_module(f"fused_{count}", (conv.args[0], *([] if other is None else [other])))
        node.replace_all_uses_with(made)
        for replaced in (node, node.args[0], conv):
            if not replaced.users and not replaced._erased:
                fused.graph.erase_node(replaced)
        count += 1
    if not count:
        return None
    fused.delete_all_unused_submodules()
    fused.recompile()
    return fused


def _operands(net: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """The convolution, and the other summand, of a ReLU that can be fused with them; None of any other node."""
    before = node.args[0] if node.args else None
    if not _is(net, node, _RELUS, nn.ReLU) or not isinstance(before, fx.Node) or len(before.users) > 1:
        return None
    if _is_conv(net, before):
        return before, None
    if not _is(net, before, _ADDS, None) or before.kwargs or len(before.args) != 2:
        return None
    for conv, other in (before.args, before.args[::-1]):
        if isinstance(conv, fx.Node) and isinstance(other, fx.Node) and conv is not other and _is_conv(net, conv):
            return conv, other
    return None


def _is_conv(net: fx.GraphModule, node: fx.Node) -> bool:
    module = net.get_submodule(str(node.target)) if node.op == "call_module" else None
    return (
        isinstance(module, nn.Conv2d)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and len(node.users) == 1
    )


def _is(net: fx.GraphModule, node: fx.Node, targets: tuple[Any, ...], kind: type[nn.Module] | None) -> bool:
    if node.op == "call_module":
        return kind is not None and isinstance(net.get_submodule(str(node.target)), kind)
    return node.op in ("call_function", "call_method") and node.target in targets
