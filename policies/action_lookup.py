"""A chosen policy as a table of actions by queue length, where its actions depend on nothing else."""

from policies.catalog import Chosen
from policies.queue.monitor import NoMonitor
from policies.queue.table_simulator import QueueLengthTable
from policies.rules.traits import QueueLengthPolicy
from policies.types import Mix


def action_table(chosen: Chosen, arrival_rate: float) -> tuple[tuple[int, ...], Mix | None] | None:
    """Return the actions for queue length 0, 1, 2, ... (the last repeats) at this rate (1/s), and the mix, if any.

    None where the action also depends on waiting times, deadlines or sizes.
    """
    if chosen.bins is not None or not isinstance(chosen.policy, QueueLengthPolicy):
        return None
    table = chosen.policy.action_table(arrival_rate)
    return None if table is None else (tuple(table.batch_size), table.mix)


def queue_length_table(chosen: Chosen) -> QueueLengthTable | None:
    """The policy as actions by queue length, random ones included; None where they depend on anything else."""
    policy = chosen.policy
    if chosen.bins is not None or not isinstance(policy, QueueLengthPolicy):
        return None
    if policy.depends_on_rate and not isinstance(chosen.monitor, NoMonitor):
        return None
    table = policy.action_table(None)
    if table is None or table.max_batch_size > chosen.profile.max_batch_size:
        return None
    return QueueLengthTable(table.batch_size, table.max_batch_size, table.mix, table.seed)
