"""The flags of peers under overload, and what the page says of the record."""

from benchmarks.overload import BOUNDED, OURS, PEERS, PROFILE, TIMEOUT, peer_flags
from benchmarks.support.harness import load_record
from policies.profile import load_profile


def test_a_peer_has_no_bound_by_default() -> None:
    assert [peer_flags(name, False) for name in PEERS] == [["--timeout", "1000"], ["--timeout", "1.0"]]


def test_the_last_request_of_a_full_bounded_queue_is_answered_in_four_fifths_of_the_timeout() -> None:
    profile = load_profile(PROFILE)
    mosec, litserve = (int(peer_flags(name, True)[-1]) for name in PEERS)
    served_last = mosec / profile.capacity + profile.service_times[-1]
    assert 0.8 * TIMEOUT - 2.0 / profile.capacity < served_last <= 0.8 * TIMEOUT
    assert litserve == mosec + profile.max_batch_size  # uvicorn counts the connections of the batch in service too
    assert peer_flags("mosec", True)[:-1] == ["--timeout", "1000", "--capacity"]
    assert peer_flags("litserve", True)[:-1] == ["--timeout", "1.0", "--most-calls"]


def test_the_page_says_how_goodput_compares_above_the_capacity() -> None:
    goodput = {name: found["goodput_hz"] for name, found in load_record("overload").items()}
    for load in {name.split(" @ ")[1] for name in goodput} - {"0.9"}:
        ours = min(goodput[f"{policy} @ {load}"] for policy in OURS)
        assert all(goodput[f"{peer} @ {load}"] < 0.2 * ours for peer in PEERS)
        assert 0.98 * ours < goodput[f"mosec{BOUNDED} @ {load}"] < ours
        assert 0.92 * ours < goodput[f"litserve{BOUNDED} @ {load}"] < 0.95 * ours
