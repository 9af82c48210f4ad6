"""A policy rule as the catalog lists it: how a spec becomes its policy, and the traits of the rule.

Each rule's file ends with its `Rule`; `policies/catalog.py` lists them. The parser, the simulator, the server, the
dashboard and the generic tests read everything about a rule from there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.profile import Profile
from policies.queue.monitor import Monitor
from policies.smdp.table import PolicyTable
from policies.spec import Spec
from policies.types import Policy

Cut = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True)
class SolvedPolicy:
    """A policy that acts by a solved table.

    Attributes:
        policy: looks the actions up.
        table: the solved table.
    """

    policy: Policy
    table: PolicyTable


@dataclass(frozen=True)
class Division:
    """Bins of requests of similar size, and the policy that decides within each bin.

    Attributes:
        bins: how many, at most.
        cut: finds the edges between the bins for the sizes that it is given, s.
        batch_size: largest batch.
        inner: spec of the policy within a bin.
    """

    bins: int
    cut: Cut
    batch_size: int
    inner: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A named policy rule.

    Attributes:
        name: as specs write it.
        build: the policy for a spec and a profile; what a rule with a table or with bins builds carries more.
        description: how it decides, in a sentence or two for the dashboard. {arg} and {KEY} are replaced by the spec's
            values, {parameters} by all of them.
        example: a spec of this rule for the generic tests, valid for any profile of at least eight batch sizes.
        keys: parameters that the spec may name, besides max_wait_ms.
        takes_arg: whether the spec may have an argument, NAME:ARG.
        defaults: values of the keys that the description names and the spec leaves open.
        needs_stages: whether it decides between stages, so that the model has to be cut into some.
        needs_lengths: whether it serves only models that generate tokens.
        per_bin: whether it can decide within a bin of multi-bin.
        monitor: makes what measures the arrival rate; None: an exponentially forgetting one, as fast as the device.
        check: checks a spec without building the policy, for rules that take long to build.
    """

    name: str
    build: Callable[[Spec, Profile], Policy | SolvedPolicy | Division]
    description: str
    example: str
    keys: frozenset[str] = frozenset()
    takes_arg: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)
    needs_stages: bool = False
    needs_lengths: bool = False
    per_bin: bool = True
    monitor: Callable[[], Monitor] | None = None
    check: Callable[[Spec], object] | None = None

    def describe(self, parameters: Mapping[str, Any]) -> str:
        """The description for a spec with these parameters."""
        named = [f", with {key} = {value}" for key, value in parameters.items() if key != "max_wait_ms"]
        return self.description.format(**{"parameters": "".join(named), **self.defaults, **parameters})
