"""Control limit: launch all waiting requests once at least `limit` wait.

Greedy, serial, static and timeout are control limits. Source: Xu, Zhou and Niu (arXiv 2501.02181), definitions 1 and 2,
equations (15) and (16).
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from policies.rules.rule import Rule
from policies.traits import ActionTable, control_limit_table
from policies.types import Action, State, Wait, launch_oldest


@dataclass(frozen=True, slots=True)
class ControlLimit:
    """Launch when `limit` requests wait, or when the oldest has waited `timeout`; never more than the maximum.

    Attributes:
        limit: smallest number that is launched before the time-out.
        max_batch_size: largest batch.
        timeout: waiting time of the oldest request at which a partial batch is launched, s.
    """

    depends_on_rate: ClassVar[bool] = False

    limit: int
    max_batch_size: int
    timeout: float = inf

    def decide(self, state: State, /) -> Action:
        """Launch at the limit or at the time-out, else wait for the time-out."""
        due = state.oldest.arrival + self.timeout
        if len(state.waiting) < self.limit and state.now < due:
            return Wait(until=due)
        formed = None if state.now >= due else sorted(request.arrival for request in state.waiting)[self.limit - 1]
        return launch_oldest(state, self.max_batch_size, self.max_batch_size, formed=formed)

    def action_table(self, arrival_rate: float | None) -> ActionTable | None:
        """The same at every rate; None with a time-out, which depends on waiting times."""
        return control_limit_table(self.limit, self.max_batch_size) if self.timeout == inf else None


def greedy(max_batch_size: int) -> ControlLimit:
    """Launch all waiting requests as soon as the device is free (equation 16)."""
    return ControlLimit(1, max_batch_size)


def serial() -> ControlLimit:
    """One request at a time."""
    return ControlLimit(1, 1)


def static(batch_size: int) -> ControlLimit:
    """Batches of exactly this size (equation 15)."""
    return ControlLimit(batch_size, batch_size)


def timeout(max_batch_size: int, timeout: float) -> ControlLimit:
    """A full batch, or a partial one when the oldest request has waited `timeout` s, counted from its arrival."""
    return ControlLimit(max_batch_size, max_batch_size, timeout)


GREEDY = Rule(
    name="greedy",
    build=lambda _, profile: greedy(profile.max_batch_size),
    description="Launches all waiting requests as soon as the device is free.",
    example="greedy",
)
SERIAL = Rule(
    name="serial",
    build=lambda *_: serial(),
    description="Launches one request at a time, as soon as the device is free.",
    example="serial",
)
STATIC = Rule(
    name="static",
    build=lambda spec, profile: static(spec.whole("ARG", 1, profile.max_batch_size)),
    takes_arg=True,
    description="Launches batches of exactly {arg}.",
    example="static:5",
)
TIMEOUT = Rule(
    name="timeout",
    build=lambda spec, profile: timeout(profile.max_batch_size, spec.number("ARG") / 1e3),
    takes_arg=True,
    description="Launches a full batch, or a partial batch once the oldest request has waited {arg} ms. The chart "
    "shows the actions for requests that have just arrived.",
    example="timeout:20",
)
