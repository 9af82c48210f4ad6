"""Continuous batching: requests join and leave the batch between decode steps.

Orca (Yu et al. 2022) calls it iteration-level scheduling; Multi-Bin Batching leaves it aside (its footnote 1). A stage
is a decode step, and the model takes requests at different steps in one batch. Within a bin, only requests of that bin
join. Where batches of several bins are under way, PerKind runs the one whose oldest request arrived first until it is
complete; the rows of the other batches stay on the device meanwhile.
"""

from dataclasses import dataclass

from policies.profile import Profile
from policies.rules.rule import Rule
from policies.rules.traits import StepPolicy
from policies.spec import Spec
from policies.types import Action, Launch, SpecError, State
from policies.unrolled import check_decode_steps


@dataclass(frozen=True, slots=True)
class ContinuousBatching(StepPolicy):
    """Launch one decode step of all running requests and of as many waiting ones as fit; never waits.

    Attributes:
        max_batch_size: largest batch.
    """

    max_batch_size: int

    def decide(self, state: State, /) -> Action:
        """Running requests in order of arrival, then the oldest waiting ones."""
        batch = [*state.suspended, *state.waiting[: self.max_batch_size]][: self.max_batch_size]
        return Launch(batch, 1, "full" if len(batch) >= self.max_batch_size else "policy")


def _build(spec: Spec, profile: Profile) -> ContinuousBatching:
    check_decode_steps(spec, profile)
    if not profile.varies_by_length:
        raise SpecError(
            f"policy {spec.text!r} is for models that generate tokens; profile {profile.name!r} has no lengths, or the "
            "simulated requests have none: name another policy, or add --sizes to a simulation"
        )
    return ContinuousBatching(
        profile.max_batch_size if spec.arg is None else spec.whole("ARG", 1, profile.max_batch_size)
    )


CONTINUOUS_BATCHING = Rule(
    name="joining",
    build=_build,
    takes_arg=True,
    needs_lengths=True,
    description="Experimental. Continuous batching: between two decode steps finished requests leave the batch and "
    "waiting ones join it. It is faster if a decode step takes longer than its launch; with a very small network only "
    "up to about half load.",
    example="joining",
)
