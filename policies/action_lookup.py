"""A chosen policy as a table of actions by queue length, where it is one."""

from math import inf

from policies.catalog import Chosen
from policies.queue.counting import CountTable
from policies.queue.monitor import NoMonitor
from policies.rules.control_limit import ControlLimit
from policies.rules.lookup import Lookup
from policies.rules.rate_matching import RateMatching
from policies.types import Mix


def action_table(chosen: Chosen, arrival_rate: float) -> tuple[tuple[int, ...], Mix | None] | None:
    """The policy's action for queue length 0, 1, 2, ... at this rate (1/s), the last repeats; and its mix, if any.

    None where the policy is no function of the queue length: it looks at a clock, or at sizes.
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


def count_table(chosen: Chosen) -> CountTable | None:
    """The policy as actions by queue length, drawn ones included; None where it looks at a clock, a rate or sizes."""
    largest = chosen.profile.max_batch_size
    if chosen.bins is not None:
        return None
    match chosen.policy:
        case ControlLimit(limit, most, wait, _) if wait == inf and most <= largest:
            return CountTable(_limit_table(limit, most), most)
        case Lookup(rows, _, most, seed) if isinstance(chosen.monitor, NoMonitor) and most <= largest:
            return CountTable(rows[0].batch_size, most, rows[0].mix, seed)
        case _:
            return None


def _limit_table(limit: int, largest: int) -> tuple[int, ...]:
    return tuple(0 if n < limit else min(n, largest) for n in range(max(limit, largest) + 1))
