import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.queue.batcher import Batcher
from policies.queue.monitor import ForgettingMonitor, NoMonitor
from policies.rules.control_limit import greedy
from policies.types import Action, BatchKey, Launch, Policy, PolicyError, Request, State, Wait

M = BatchKey("m")


@dataclass(frozen=True)
class Constant:
    """Returns always the same action."""

    action: Action

    def decide(self, state: State, /) -> Action:
        return self.action


@dataclass(frozen=True)
class LaunchAll:
    """Launches all waiting requests, as the sequence of the state."""

    def decide(self, state: State, /) -> Action:
        return Launch(state.waiting)


@dataclass(frozen=True)
class LaunchIndices:
    """Launches the requests at these indices of the queue."""

    indices: Sequence[int]
    stages: int | None = None

    def decide(self, state: State, /) -> Action:
        queue = [*state.waiting, *state.suspended]
        return Launch([queue[i] for i in self.indices], self.stages)


def batcher(policy: Policy, *requests: Request, largest: int = 4) -> Batcher:
    queue = Batcher(policy, {"m": largest, "n": largest}, NoMonitor())
    for request in requests:
        queue.arrive(request)
    return queue


def three() -> list[Request]:
    return [Request(i, 0.1 * i, M, stages=2) for i in range(3)]


UNKNOWN = Request(99, 0.0, M)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Constant(Launch([])), "at least one"),
        (Constant(Launch([UNKNOWN])), "of this queue"),
        (LaunchIndices([0, 0]), "distinct"),
        (LaunchIndices([0, 1, 2]), "above the maximum"),
        (LaunchIndices([0], stages=0), "at least one stage"),
        (Constant(Wait(1.0)), "which is not after the decision"),
        (Constant(Wait(float("nan"))), "which is not after the decision"),
    ],
)
def test_an_invalid_action_raises_and_loses_no_request(policy: Policy, rule: str) -> None:
    queue = batcher(policy, *three(), largest=2)
    with pytest.raises(PolicyError, match=rule):
        queue.decide(1.0)
    assert queue.queue_length == 3


def test_a_batch_must_be_of_one_kind() -> None:
    queue = batcher(LaunchIndices([0, 1]), Request(0, 0.0, M), Request(1, 0.0, BatchKey("n")))
    with pytest.raises(PolicyError, match="one kind"):
        queue.decide(1.0)


def test_a_batch_must_be_at_one_stage() -> None:
    queue = batcher(LaunchIndices([0], stages=1), *three())
    launch = queue.decide(1.0)
    assert isinstance(launch, Launch)
    assert queue.complete(launch) == []
    queue.policy = LaunchIndices([0, 2])
    with pytest.raises(PolicyError, match="one stage"):
        queue.decide(2.0)


def test_one_batch_at_a_time() -> None:
    queue = batcher(LaunchIndices([0]), *three())
    queue.decide(1.0)
    with pytest.raises(PolicyError, match="busy"):
        queue.decide(1.0)


def test_a_request_for_an_unknown_model_is_rejected() -> None:
    with pytest.raises(PolicyError, match="'x' is not served"):
        batcher(greedy(4), Request(0, 0.0, BatchKey("x")))


def test_an_empty_queue_waits_without_a_decision() -> None:
    assert batcher(Constant(Launch([]))).decide(1.0) == Wait(inf)


def test_requests_complete_after_their_last_stage() -> None:
    requests = three()
    queue = batcher(LaunchIndices([0, 1, 2], stages=1), *requests)
    first = queue.decide(1.0)
    assert isinstance(first, Launch)
    assert queue.complete(first) == []
    assert [r.stage for r in requests] == [1, 1, 1]
    second = queue.decide(2.0)
    assert isinstance(second, Launch)
    assert queue.complete(second) == requests
    assert [r.started for r in requests] == [1.0, 1.0, 1.0], "the instant of the first launch"
    assert len(queue) == 0


def test_cancellation_while_waiting_in_service_and_suspended() -> None:
    requests = three()
    queue = batcher(LaunchIndices([0, 1], stages=1), *requests)
    launch = queue.decide(1.0)
    assert isinstance(launch, Launch)
    assert queue.cancel(requests[2]), "waiting"
    assert queue.cancel(requests[0]), "in service"
    assert queue.complete(launch) == []
    assert len(queue) == 1
    assert queue.cancel(requests[1]), "suspended"
    assert not queue.cancel(requests[1]), "gone"
    assert len(queue) == 0


def test_a_request_cancelled_in_service_is_not_completed() -> None:
    requests = three()
    queue = batcher(LaunchIndices([0, 1, 2]), *requests)
    launch = queue.decide(1.0)
    assert isinstance(launch, Launch)
    queue.cancel(requests[1])
    assert queue.complete(launch) == [requests[0], requests[2]]


def test_a_failed_batch_leaves_and_the_device_becomes_idle() -> None:
    requests = three()
    queue = batcher(LaunchIndices([0]), *requests)
    launch = queue.decide(1.0)
    assert isinstance(launch, Launch)
    assert queue.fail(launch) == [requests[0]]
    assert isinstance(queue.decide(2.0), Launch)


def test_requests_expire_at_their_instant_and_not_before() -> None:
    early, late, unbounded = Request(0, 0.0, M, expires=2.0), Request(1, 0.0, M, expires=1.0), Request(2, 0.0, M)
    queue = batcher(greedy(4), early, late, unbounded)
    assert queue.next_expiry() == 1.0
    assert queue.expire(0.999) == []
    assert queue.expire(1.0) == [late]
    assert queue.next_expiry() == 2.0
    assert queue.expire(5.0) == [early]
    assert queue.next_expiry() == inf
    assert queue.queue_length == 1


def test_a_late_request_is_queued_by_its_arrival_and_counted_when_it_comes() -> None:
    queue = batcher(greedy(4))
    queue.monitor = monitor = ForgettingMonitor(10.0)
    young, old, same = Request(0, 5.0, M), Request(1, 1.0, M), Request(2, 5.0, M)
    queue.arrive(young)
    queue.arrive(old, 6.0)
    queue.arrive(same, 7.0)
    assert [request.id for request in queue.state(7.0).waiting] == [1, 0, 2]
    expected = ForgettingMonitor(10.0)
    for at in (5.0, 6.0, 7.0):
        expected.arrive(M, at)
    assert monitor.rates(7.0) == expected.rates(7.0)


def test_a_completed_request_is_freed_before_its_time_out() -> None:
    queue = batcher(greedy(1), largest=1)
    kept = []
    for n in range(500):
        request = Request(n, float(n), M, expires=1e9)
        kept.append(weakref.ref(request))
        queue.arrive(request)
        launch = queue.decide(float(n))
        assert isinstance(launch, Launch)
        queue.complete(launch)
        del request, launch
    assert queue.next_expiry() == inf
    assert sum(ref() is not None for ref in kept) == 0


def test_a_policy_may_launch_the_sequence_of_the_state() -> None:
    queue = batcher(LaunchAll(), *three())
    launch = queue.decide(1.0)
    assert isinstance(launch, Launch)
    assert [r.id for r in launch.requests] == [0, 1, 2]
    assert queue.queue_length == 0


def test_a_cancelled_request_does_not_expire() -> None:
    request = Request(0, 0.0, M, expires=1.0)
    queue = batcher(greedy(4), request)
    queue.cancel(request)
    assert queue.expire(2.0) == []


@given(st.lists(st.tuples(st.sampled_from("acxdf"), st.integers(0, 7)), max_size=60))
def test_every_request_leaves_exactly_once(events: list[tuple[str, int]]) -> None:
    queue = batcher(greedy(3), largest=3)
    here: list[Request] = []
    left: list[int] = []
    launch: Launch | None = None
    for now, (event, n) in enumerate(events):
        if event == "a":
            here.append(Request(len(here), float(now), M, expires=now + n + 0.5))
            queue.arrive(here[-1])
        elif event == "c" and here and queue.cancel(here[n % len(here)]):
            left.append(here[n % len(here)].id)
        elif event == "x":
            left += [r.id for r in queue.expire(float(now))]
        elif event == "d" and launch is None:
            action = queue.decide(float(now))
            launch = action if isinstance(action, Launch) else None
        elif event == "f" and launch is not None:
            left += [r.id for r in (queue.complete(launch) if n % 2 else queue.fail(launch))]
            launch = None
    if launch is not None:
        left += [r.id for r in queue.complete(launch)]
    left += [r.id for r in queue.state(1e3).waiting]
    assert sorted(left) == sorted(r.id for r in here)


def test_a_request_completes_after_its_own_last_stage() -> None:
    a, b = Request(0, 0.0, M, stages=3), Request(1, 0.0, M, stages=1)
    queue = Batcher(LaunchIndices([0, 1], 1), {"m": 4}, NoMonitor())
    queue.arrive(a)
    queue.arrive(b)
    both = queue.decide(1.0)
    assert isinstance(both, Launch)
    assert queue.complete(both) == [b]
    assert (a.stage, a.started, b.started, list(queue.suspended)) == (1, 1.0, 1.0, [a])


def test_every_request_can_be_assigned_a_new_kind() -> None:
    queue = batcher(LaunchIndices([0], 1), *three())
    running = queue.decide(1.0)
    queue.set_kinds(lambda r: BatchKey("m", r.id))
    assert isinstance(running, Launch)
    queue.complete(running)
    assert [r.kind.bin for r in (*queue.state(2.0).waiting, *queue.suspended)] == [1, 2, 0]


@given(st.data())
def test_waiting_requests_are_counted_by_model(data: st.DataObject) -> None:
    @dataclass(frozen=True)
    class LaunchAny:
        """Launches any requests of one kind and stage."""

        def decide(self, state: State, /) -> Action:
            here = [*state.waiting, *state.suspended]
            first = data.draw(st.sampled_from(here))
            alike = [r for r in here if (r.kind, r.stage) == (first.kind, first.stage)]
            picked = data.draw(st.lists(st.sampled_from(alike), min_size=1, max_size=4, unique_by=lambda r: r.id))
            return Launch(picked, 1)

    queue = Batcher(LaunchAny(), {"m": 4, "n": 4}, NoMonitor())
    arrived: list[Request] = []
    launch: Launch | None = None
    for now in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["arrive", "arrive", "decide", "complete", "cancel", "fail"])):
            case "arrive":
                request = Request(now, now, BatchKey(data.draw(st.sampled_from("mn"))), stages=2)
                arrived.append(request)
                queue.arrive(request)
            case "decide" if launch is None and len(queue):
                action = queue.decide(float(now))
                launch = action if isinstance(action, Launch) else None
            case "complete" if launch is not None:
                queue.complete(launch)
                launch = None
            case "fail" if launch is not None:
                queue.fail(launch)
                launch = None
            case "cancel" if arrived:
                queue.cancel(data.draw(st.sampled_from(arrived)))
            case _:
                pass
        waiting = [r.kind.model for r in queue.state(float(now)).waiting]
        assert queue.waiting_by_model() == {model: waiting.count(model) for model in "mn"}
        assert queue.waiting_of("m") + queue.waiting_of("n") == queue.queue_length


def levelled(*levels: int, urgent_from: float = inf) -> Batcher:
    queue = Batcher(LaunchIndices([0, 1]), {"m": 4}, NoMonitor(), levels={"m": 3})
    for i, level in enumerate(levels):
        queue.arrive(Request(i, 0.1 * i, M, level=level, urgent_from=urgent_from if level == 3 else inf))
    return queue


def test_requests_wait_by_level_and_then_by_arrival() -> None:
    state = levelled(2, 3, 1, 2, 1).state(1.0)
    assert [request.id for request in state.waiting] == [2, 4, 0, 3, 1]
    assert state.by_level
    assert state.oldest.id == 0
    assert [request.id for request in state.by_kind()[M].waiting] == [2, 4, 0, 3, 1]
    assert state.by_kind()[M].oldest.id == 0


def test_requests_of_one_level_wait_in_order_of_arrival() -> None:
    state = levelled(2, 2, 2).state(1.0)
    assert not state.by_level
    assert state.oldest is state.waiting[0]


def test_an_urgent_request_precedes_all_levels() -> None:
    queue = levelled(2, 3, 1, urgent_from=5.0)
    assert [request.id for request in queue.state(4.9).waiting] == [2, 0, 1]
    assert [request.id for request in queue.state(5.0).waiting] == [1, 2, 0]


def test_a_batch_is_taken_by_level() -> None:
    queue = levelled(2, 3, 1, 2)
    launch = queue.decide(1.0)
    assert isinstance(launch, Launch)
    assert [request.id for request in launch.requests] == [2, 0]
    queue.complete(launch)
    assert [request.id for request in queue.state(1.0).waiting] == [3, 1]
    assert queue.waiting_of("m") == 2


def test_the_shares_of_levels_are_measured() -> None:
    queue = levelled(*([1, 2, 2, 2] * 300))
    shares = queue.level_shares("m")
    assert shares is not None
    assert shares.shares == pytest.approx((0.25, 0.75, 0.0), abs=0.01)
    assert queue.state(1.0).level_shares == {"m": shares.shares}
    assert batcher(LaunchAll()).level_shares("m") is None
