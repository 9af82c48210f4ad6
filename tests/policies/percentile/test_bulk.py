"""The percentile of the first level beside bulk that always waits."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from policies.percentile.bulk import BulkBatches, bulk_batches, largest_bulk_batch
from policies.profile import Profile

PROFILE = Profile("p", tuple(0.010 + 0.002 * b for b in range(1, 17)))


def simulated(rate: float, bulk: int, response_time: float, cv: float, batches: int) -> tuple[float, float]:
    """Share of the first level within the bound, and throughput of bulk, by drawing one batch after another."""
    rng = np.random.default_rng(5)
    waiting: list[float] = []
    now, served, late, arrived = 0.0, 0, 0, 0
    for _ in range(batches):
        size = max(min(len(waiting), 16), bulk)
        taken, waiting = waiting[:16], waiting[16:]
        mean = PROFILE.service_time(size)
        time = mean if not cv else float(rng.gamma(1 / cv**2, mean * cv**2))
        late += sum(now + time - at > response_time for at in taken)
        arrived += len(taken)
        served += size - len(taken)
        waiting += sorted((now + time * rng.random(rng.poisson(rate * time))).tolist())
        now += time
    return 1.0 - late / arrived, served / now


@pytest.mark.parametrize("cv", [0.0, 0.3])
@pytest.mark.parametrize(("rate", "bulk"), [(20.0, 4), (20.0, 16), (100.0, 8), (150.0, 2)])
def test_share_and_throughput_are_those_of_a_simulation(rate: float, bulk: int, cv: float) -> None:
    found = next(each for each in bulk_batches(replace(PROFILE, cvs=(cv,) * 16), rate, 0.05) if each.size == bulk)
    share, throughput = simulated(rate, bulk, 0.05, cv, 60_000)
    assert found.share == pytest.approx(share, abs=0.012)
    assert found.throughput == pytest.approx(throughput, rel=0.02)


def test_all_small_batches_are_tried_and_some_large_ones() -> None:
    profile = Profile("large", tuple(0.010 + 0.001 * b for b in range(1, 129)))
    sizes = [each.size for each in bulk_batches(profile, 20.0, 0.1)]
    assert sizes[:16] == list(range(1, 17))
    assert sizes[-1] == 128
    assert all(one < two <= max(one + 1, 1.125 * one) for one, two in pairwise(sizes))
    assert len(sizes) < 40


def test_a_larger_bound_allows_larger_batches() -> None:
    chosen = [largest_bulk_batch(bulk_batches(PROFILE, 20.0, bound), 0.95) for bound in (0.04, 0.06, 0.09)]
    assert [each.size for each in chosen] == sorted({each.size for each in chosen})
    assert all(each.share >= 0.95 for each in chosen)
    assert [each.throughput for each in chosen] == sorted(each.throughput for each in chosen)


def test_a_bound_that_cannot_be_kept_gets_the_highest_share() -> None:
    found = bulk_batches(PROFILE, 20.0, 0.015)
    chosen = largest_bulk_batch(found, 0.95)
    assert chosen.share < 0.95
    assert chosen.size == 1
    assert chosen.share == max(each.share for each in found)


def test_of_equal_throughputs_the_smaller_batch_is_taken() -> None:
    found = [BulkBatches(1, 0.99, 5.0), BulkBatches(2, 0.97, 8.0), BulkBatches(4, 0.96, 8.0), BulkBatches(8, 0.9, 9.0)]
    assert largest_bulk_batch(found, 0.95).size == 2
