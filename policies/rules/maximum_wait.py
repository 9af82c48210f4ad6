"""Maximum wait: launch a partial batch once the oldest request has waited this long, whatever the policy."""

from dataclasses import dataclass

from policies.types import Action, Launch, Policy, State, Wait, launch_oldest


@dataclass(frozen=True, slots=True)
class MaximumWait:
    """Turns a Wait of the inner policy, never a Launch, into a launch when the oldest request reaches `max_wait`.

    Attributes:
        inner: decides until then.
        max_batch_size: largest batch.
        max_wait: waiting time of the oldest request, s; inf leaves the inner policy's actions unchanged.
    """

    inner: Policy
    max_batch_size: int
    max_wait: float

    def decide(self, state: State, /) -> Action:
        """Apply the inner policy and bound its wait."""
        action = self.inner.decide(state)
        if not state.waiting:
            return action
        due = state.oldest.arrival + self.max_wait
        if state.now < due:
            return action if isinstance(action, Launch) else Wait(min(action.until, due))
        if isinstance(action, Launch):
            return action
        return launch_oldest(state, self.max_batch_size, self.max_batch_size, "max_wait")
