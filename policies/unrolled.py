"""Dynamic graphs, unrolled: how long a model takes whose recurrent part runs as often as the input asks (LazyBatching).

Algorithm 1 sums NodeLatency(n) over the nodes n of a graph: once where n is static, enc_timesteps times in the encoder,
dec_timesteps times in the decoder. Here a static node is a stage, and so is each time step of neighbouring encoder or
decoder nodes; the sum is then `Profile.span`. A request leaves after as many steps as its own output has. That is known
only when it happens, so a policy plans with `timesteps`, which cover a share of the lengths seen before (section IV-C).

    symbol          name
    NodeLatency(n)  Node.times[b - 1], s
    Type(n)         Node.type
    dec_timesteps   timesteps(lengths, coverage)
    N               coverage
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import Literal

from policies.profile import Profile


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph: where it stands, and its time in a batch of 1, 2, ..., s."""

    type: Literal["static", "encoder", "decoder"]
    times: tuple[float, ...]


def unrolled(name: str, nodes: Sequence[Node], enc_timesteps: int, dec_timesteps: int) -> Profile:
    """The profile, by stage, of a graph whose encoder and decoder take so many time steps."""
    repeated = {"encoder": enc_timesteps, "decoder": dec_timesteps}
    stages: list[tuple[float, ...]] = []
    for kind, group in groupby(nodes, key=lambda node: node.type):
        parts = [node.times for node in group]
        if kind == "static":
            stages += parts
        else:
            stages += [tuple(map(sum, zip(*parts, strict=True)))] * repeated[kind]
    rows = tuple(zip(*stages, strict=True))
    return Profile(name, tuple(map(sum, rows)), stage_service_times=rows)


def timesteps(lengths: Sequence[int], coverage: float) -> int:
    """The least number of time steps that covers this share (above 0, up to 1) of the lengths."""
    return sorted(lengths)[ceil(coverage * len(lengths)) - 1]
