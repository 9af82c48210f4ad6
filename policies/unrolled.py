"""Dynamic graphs, unrolled: how long a model takes whose recurrent part runs as often as the input asks (LazyBatching).

Algorithm 1 sums NodeLatency(n) over the nodes n of a graph: once where n is static, enc_timesteps times in the encoder,
dec_timesteps times in the decoder. Here a static node is a stage, and so is each time step of neighbouring encoder or
decoder nodes; the sum is then `Profile.span`. A request leaves after as many steps as its own output has. That is known
only when it happens, so a policy plans with `timesteps`, which cover a share of the lengths seen before (section IV-C).
Live a time step is an iteration that gives each text a token.

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
from policies.spec import Spec
from policies.types import SpecError

_MOST_STEPS = 4096  # that a text is taken to have


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


def by_iterations(profile: Profile, longest: int) -> Profile:
    """The same device's profile by stage where a stage is an iteration that gives each text a token.

    The first one passes the prompts too: a static node. The others are a decoder's time steps.

    Args:
        profile: of a model that generates, with lengths.
        longest: iterations that a text has at most.
    """
    sizes = range(1, profile.max_batch_size + 1)
    prompt = Node("static", tuple(profile.iteration_time(b, b) for b in sizes))
    token = Node("decoder", tuple(profile.iteration_time(b) for b in sizes))
    return unrolled(profile.name, [prompt, token], 0, longest - 1)


def planned(spec: Spec, profile: Profile) -> tuple[Profile, int | None]:
    """What a policy by stages plans with: the profile by stage, and how many a request is taken to have; None: all.

    Raises:
        SpecError: the spec's `timesteps` cannot be, or it names no SLO.
    """
    spec.number("slo_ms")
    if profile.lengths is None or not profile.generates:
        refuse_classifier(spec, profile)
        if "timesteps" in spec.parameters:
            raise SpecError(f"policy {spec.text!r}: timesteps are of models that generate tokens; leave them out")
        return profile, None
    longest = min(profile.lengths[-1], _MOST_STEPS)
    steps = spec.whole("timesteps", 1, _MOST_STEPS) if "timesteps" in spec.parameters else longest
    return by_iterations(profile, max(longest, steps)), steps


def refuse_classifier(spec: Spec, profile: Profile) -> None:
    """Complain of a policy between iterations for texts that are only read.

    Raises:
        SpecError: the model has lengths, but generates nothing.
    """
    if profile.lengths is not None and not profile.generates:
        raise SpecError(
            f"policy {spec.text!r} decides between iterations, and {profile.name!r} is of a model that reads a text in "
            "one; name greedy, or multi-bin"
        )


def timesteps(lengths: Sequence[int], coverage: float) -> int:
    """The least number of time steps that covers this share (above 0, up to 1) of the lengths."""
    return sorted(lengths)[ceil(coverage * len(lengths)) - 1]
