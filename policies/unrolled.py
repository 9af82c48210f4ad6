"""Unrolled dynamic graphs: profiles with stage times for models with a recurrent part (LazyBatching).

Algorithm 1 sums NodeLatency(n) over the nodes n of a graph: once if n is static, enc_timesteps times in the encoder,
dec_timesteps times in the decoder. Here each static node is a stage, and so is each time step of neighbouring encoder
or decoder nodes; the sum is then `Profile.span`. A request completes after the number of steps of its own output, which
is not known beforehand. A policy therefore assumes the number `timesteps` of its spec, the dec_timesteps of section
IV-C. In the server a time step is a decode step.

    symbol          name
    NodeLatency(n)  Node.times[b - 1], s
    Type(n)         Node.type
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from policies.profile import Profile
from policies.spec import Spec
from policies.types import SpecError

_MAX_STEPS = 4096  # decode steps of a request


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


def with_decode_steps(profile: Profile, max_steps: int) -> Profile:
    """Return the profile with stage times in which each stage is one decode step.

    The first stage includes the prefill and is a static node. The others are time steps of a decoder.

    Args:
        profile: profile with lengths, of a model that generates tokens.
        max_steps: maximum number of decode steps of a request.
    """
    sizes = range(1, profile.max_batch_size + 1)
    prompt = Node("static", tuple(profile.decode_step_time(b, b) for b in sizes))
    token = Node("decoder", tuple(profile.decode_step_time(b) for b in sizes))
    return unrolled(profile.name, [prompt, token], 0, max_steps - 1)


def staged_profile(spec: Spec, profile: Profile) -> tuple[Profile, int | None]:
    """Return the profile with stage times for LazyBatching, and the number of stages assumed for a request (None: all).

    Raises:
        SpecError: the spec's `timesteps` are invalid, or it has no `slo_ms`.
    """
    spec.number("slo_ms")  # required: it sets the deadlines
    if not profile.has_decode_steps:
        check_decode_steps(spec, profile)
        if "timesteps" in spec.parameters:
            raise SpecError(f"policy {spec.text!r}: timesteps are for models that generate tokens; leave them out")
        return profile, None
    longest = min(profile.max_length, _MAX_STEPS)
    steps = spec.whole("timesteps", 1, _MAX_STEPS) if "timesteps" in spec.parameters else longest
    return with_decode_steps(profile, max(longest, steps)), steps


def check_decode_steps(spec: Spec, profile: Profile) -> None:
    """Check that a policy that decides between decode steps is not used with a model that generates no tokens.

    Raises:
        SpecError: the profile has lengths, but the model generates no tokens.
    """
    if profile.varies_by_length and not profile.has_decode_steps:
        raise SpecError(
            f"policy {spec.text!r} decides between decode steps, but {profile.name!r} generates no tokens; "
            "use greedy or multi-bin"
        )
