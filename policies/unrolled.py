"""Unrolled dynamic graphs: profiles with stage times for models with a recurrent part (LazyBatching).

Algorithm 1 sums NodeLatency(n) over the nodes n of a graph: once if n is static, enc_timesteps times in the encoder,
dec_timesteps times in the decoder. Here each static node is a stage, and so is each time step of neighbouring encoder
or decoder nodes; the sum is then `Profile.span`. A request completes after the number of steps of its own output, which
is not known beforehand. A policy therefore assumes a number of stages (`LazyBatching.predicted`), from the
dec_timesteps of section IV-C. The server runs no such graphs; `research/lazy.py` simulates the paper's.

    symbol          name
    NodeLatency(n)  Node.times[b - 1], s
    Type(n)         Node.type
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from policies.profile import Profile


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph: its part of the model, and its time in a batch of 1, 2, ..., s."""

    type: Literal["static", "encoder", "decoder"]
    times: tuple[float, ...]


def unrolled(name: str, nodes: Sequence[Node], enc_timesteps: int, dec_timesteps: int) -> Profile:
    """Return the profile with the stage times of a graph unrolled to these time steps of encoder and decoder."""
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
