"""Calls: the loss of a device counts only while it serves them."""

from itertools import count

import pytest

from policies.rules.control_limit import greedy
from server.scheduling.calls import InferenceCall, Sample
from tests.support.fakes import chosen
from tests.support.virtual_clock import virtual_loop


@pytest.mark.parametrize(
    ("started", "answered", "losses"),
    [
        ((False, False), (False, False), 0),
        ((True, False), (False, False), 1),
        ((True, True), (False, False), 1),
        ((True, False), (True, False), 0),
        ((True, True), (True, False), 1),
    ],
    ids=["waiting", "in service", "all in service", "served, the other waits", "one served"],
)
def test_a_lost_device_counts_only_for_samples_that_were_in_service(
    started: tuple[bool, bool], answered: tuple[bool, bool], losses: int
) -> None:
    loop = virtual_loop()
    call = InferenceCall(loop.create_future(), "m", [Sample(1.0), Sample(2.0)], arrival=0.0, expires=9.0, earliest=1.0)
    requests = call.make_requests(chosen(greedy(8))["m"], count())
    for index, request in enumerate(requests):
        if started[index]:
            request.started = 0.5
        if answered[index]:
            call.samples[index].output = 0.0
            call.complete()
    call.lose_device()
    assert call.losses == losses
    assert call.earliest == 0.0, "its response time says nothing about the other devices"
    loop.close()
