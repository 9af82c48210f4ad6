"""The action table of a policy that depends on the queue length only."""

from math import inf

from policies.catalog import Chosen
from policies.queue.monitor import NoMonitor
from policies.queue.table_simulator import QueueLengthTable
from policies.rules.control_limit import ControlLimit
from policies.rules.lookup import Lookup
from policies.rules.rate_matching import RateMatching
from policies.types import Mix


def action_table(chosen: Chosen, arrival_rate: float) -> tuple[tuple[int, ...], Mix | None] | None:
    """Return the actions for queue length 0, 1, 2, ... (the last repeats) at this rate (1/s), and the mix, if any.

    None if the policy is not a function of the queue length, because it uses times or sizes.
    """
    largest = chosen.profile.max_batch_size
    if chosen.bins is not None:
        return None
    match chosen.policy:
        case ControlLimit(limit, most, wait, _) if wait == inf:
            return _limit_table(limit, most), None
        case RateMatching() as matching:
            return _limit_table(matching.limit(arrival_rate), largest), None
        case Lookup() as table:
            row = table.row(arrival_rate)
            return (_limit_table(1, largest), None) if row is None else (tuple(row.batch_size), row.mix)
        case _:
            return None


def queue_length_table(chosen: Chosen) -> QueueLengthTable | None:
    """Return the policy as a table by queue length, randomised ones included; None if it uses times, rates or sizes."""
    largest = chosen.profile.max_batch_size
    if chosen.bins is not None:
        return None
    match chosen.policy:
        case ControlLimit(limit, most, wait, _) if wait == inf and most <= largest:
            return QueueLengthTable(_limit_table(limit, most), most)
        case Lookup(rows, _, most, seed) if isinstance(chosen.monitor, NoMonitor) and most <= largest:
            return QueueLengthTable(rows[0].batch_size, most, rows[0].mix, seed)
        case _:
            return None


def _limit_table(limit: int, largest: int) -> tuple[int, ...]:
    return tuple(0 if n < limit else min(n, largest) for n in range(max(limit, largest) + 1))
