import pytest

from policies.catalog import choose
from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.queue.routing import backlog, least_delay
from policies.types import BatchKey, Launch, Request

FAST = Profile("fast", (1.0, 1.5, 2.0, 2.5))
SLOW = Profile("slow", (2.0, 3.0, 4.0, 5.0))


def _batcher(profile: Profile, waiting: int) -> Batcher:
    chosen = choose("greedy", profile)
    batcher = Batcher(chosen.policy, {"m": profile.max_batch_size}, chosen.monitor)
    for i in range(waiting):
        batcher.arrive(Request(i, 0.0, BatchKey("m")))
    return batcher


@pytest.mark.parametrize(
    ("waiting", "left", "expected"),
    [(0, 0.0, 1.0), (0, 0.5, 1.5), (1, 0.0, 1.5), (3, 0.0, 2.5), (4, 0.25, 0.25 + 2.5 + 1.0)],
)
def test_the_delay_includes_the_batch_in_service_and_the_waiting_requests(
    waiting: int, left: float, expected: float
) -> None:
    assert backlog(_batcher(FAST, waiting), {"m": FAST}, left, {"m": 1}) == pytest.approx(expected)


def test_suspended_requests_count_with_their_remaining_stages() -> None:
    profile = FAST.in_stages(4)
    chosen = choose("lazy:slo_ms=100000", profile)
    batcher = Batcher(chosen.policy, {"m": profile.max_batch_size}, chosen.monitor)
    batcher.arrive(Request(0, 0.0, BatchKey("m"), stages=4))
    launch = batcher.decide(0.0)
    assert isinstance(launch, Launch)
    assert batcher.complete(launch) == []
    assert backlog(batcher, {"m": profile}, 0.0, {}) == pytest.approx(0.75)
    assert backlog(batcher, {"m": profile}, 0.0, {"m": 1}) == pytest.approx(1.75)


def test_the_slower_device_is_chosen_while_the_faster_one_is_busy() -> None:
    def expected(left: float) -> list[float]:
        return [
            backlog(_batcher(FAST, 0), {"m": FAST}, left, {"m": 1}),
            backlog(_batcher(SLOW, 0), {"m": SLOW}, 0, {"m": 1}),
        ]

    assert least_delay(expected(0.9)) == 0
    assert least_delay(expected(1.0)) == 0  # equal: the first
    assert least_delay(expected(1.1)) == 1
