"""A policy rule as the catalog lists it: its builder, and the traits that parser, simulator, server and tests use.

Each rule's file ends with its `Rule`; `policies/catalog.py` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.objectives.table import PolicyTable
from policies.profile import Profile
from policies.spec import Spec
from policies.types import Policy

EdgeFinder = Callable[[Sequence[float]], Sequence[float]]
ShareSolver = Callable[[Sequence[float]], Policy]


@dataclass(frozen=True)
class SolvedPolicy:
    """A policy and the solved table in which it looks its actions up."""

    policy: Policy
    table: PolicyTable


SizeSolver = Callable[[Sequence[float]], Policy | SolvedPolicy]


@dataclass(frozen=True)
class BinnedPolicy:
    """Bins of requests of similar size, and the policy that decides within each bin.

    Attributes:
        bins: maximum number of bins.
        find_edges: returns the edges between the bins for observed sizes, s.
        batch_size: largest batch.
        inner: spec of the policy within a bin; with `solve` until sizes are known.
        solve: returns one policy for all bins, solved for observed sizes, s; None: bins are decided one by one.
    """

    bins: int
    find_edges: EdgeFinder
    batch_size: int
    inner: str
    solve: SizeSolver | None = None


@dataclass(frozen=True)
class AdaptedPolicy:
    """A policy that is solved again once more is known of the requests.

    Attributes:
        for_sizes: returns the policy for sizes of requests, s, of which none are known at first.
        policy: in its place, until the shares of the priority levels are known.
        for_shares: returns the policy for these shares, the first level first.
    """

    for_sizes: SizeSolver | None = None
    policy: Policy | None = None
    for_shares: ShareSolver | None = None


Built = Policy | SolvedPolicy | BinnedPolicy | AdaptedPolicy


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A named policy rule.

    Attributes:
        name: as specs write it.
        build: builds the policy for a spec and a profile; with its table or its bins, if the rule has one.
        description: one or two sentences for the dashboard. {arg} and {KEY} are replaced by the spec's values,
            {parameters} by all of them.
        example: a spec of this rule for the generic tests, valid for any profile of at least eight batch sizes.
        keys: parameters that the spec may name, besides max_wait_ms.
        takes_arg: whether the spec may have an argument, NAME:ARG.
        defaults: values of the keys that the description names and the spec leaves open.
        needs_stages: whether it decides between stages, so that the model has to be split into stages.
        per_bin: whether it can decide within a bin of multi-bin.
        check: checks a spec without building the policy, if that takes long.
    """

    name: str
    build: Callable[[Spec, Profile], Built]
    description: str
    example: str
    keys: frozenset[str] = frozenset()
    takes_arg: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)
    needs_stages: bool = False
    per_bin: bool = True
    check: Callable[[Spec], object] | None = None

    def describe(self, parameters: Mapping[str, Any]) -> str:
        """The description for a spec with these parameters."""
        named = [f", with {key} = {value}" for key, value in parameters.items() if key != "max_wait_ms"]
        return self.description.format(**{"parameters": "".join(named), **self.defaults, **parameters})
