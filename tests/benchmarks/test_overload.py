"""The flags of peers under overload."""

from benchmarks.overload import PEERS, PROFILE, TIMEOUT, peer_flags
from policies.profile import load_profile


def test_a_peer_has_no_bound_by_default() -> None:
    assert [peer_flags(name, False) for name in PEERS] == [["--timeout", "1000"], ["--timeout", "1.0"]]


def test_the_last_request_of_a_full_bounded_queue_is_answered_just_in_time() -> None:
    profile = load_profile(PROFILE)
    mosec, litserve = (int(peer_flags(name, True)[-1]) for name in PEERS)
    served_last = mosec / profile.capacity + profile.service_times[-1]
    assert TIMEOUT - 2.0 / profile.capacity < served_last <= TIMEOUT
    assert litserve == mosec + profile.max_batch_size  # uvicorn counts the connections of the batch in service too
    assert peer_flags("mosec", True)[:-1] == ["--timeout", "1000", "--capacity"]
    assert peer_flags("litserve", True)[:-1] == ["--timeout", "1.0", "--most-calls"]
